"""Causal grouped-query attention: over KV pages in XLA or a kernel, over a fresh chunk through cuDNN, and the module.

N query heads share G key/value heads, R = N / G queries a group; keys and values are never repeated in memory.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from moe_jax.engine.kv_cache import PagedKV
from moe_jax.layers.linear import Linear, contract
from moe_jax.layers.norm import Normed
from moe_jax.layers.query_blocks import by_blocks, fitting_block
from moe_jax.layers.rope import apply_rope
from pallas_kernels.paged_attention import paged_decode_attention
from pallas_kernels.row_norm import RowNorm
from pallas_kernels.turn_heads import HeadNorm, turn_heads

Implementation = Literal["xla", "cudnn", "pallas", "interpret"]

# Those that run the kernel of `pallas_kernels.paged_attention`: one new token a sequence.
KERNELS = ("pallas", "interpret")

# Most sequences that the kernel is chosen for: it won over XLA at 1 and lost at 16 (docs/measurements.md).
KERNEL_MAX_BATCH = 4

# Fewest tokens a page for it: the least depth of a tensor-core product.
KERNEL_MIN_PAGE = 16

# Largest score tensor [B, N, T, S] made at once, in elements: 256 MiB of float32. Longer prefills go by query blocks.
MAX_SCORES = 1 << 26

# cuDNN's fused attention takes heads up to this width, a multiple of 8 (jax.nn.dot_product_attention).
CUDNN_MAX_HEAD_DIM = 128


@dataclass(frozen=True)
class AttentionCall:
    """What one call of the model fixes for all its attention layers.

    Args:
        positions: [B, T] int32, position of each new token in its sequence; ascending along a row.
        live: [B, T] bool, false for padding; the live tokens of a row come first.
        cos, sin: [B, T, H/2] rotary tables of `positions`, or None in a model without positions.
        implementation: "xla" reads the pages; "cudnn" reads the fresh chunk, which must start at position 0; "pallas"
            reads the pages in a kernel, one new token a sequence ("interpret": in Pallas' interpreter).
    """

    positions: Array
    live: Array
    cos: Array | None
    sin: Array | None
    implementation: Implementation


def choose_implementation(
    *,
    platform: str,
    dtype,
    batch: int,
    tokens: int,
    from_zero: bool,
    page_size: int,
    head_dim: int,
    sinks: bool = False,
    kernel: bool = True,
) -> Implementation:
    """Attention code for `tokens` new tokens of each of `batch` sequences.

    On a GPU the decode kernel for one token of a few sequences, cuDNN for more tokens where it applies; else XLA over
    pages.

    `kernel`: whether the model's layers know the decode kernel; it needs pages of at least 16 tokens.

    cuDNN's fused kernel needs a GPU, a 16-bit dtype, a supported head width, and a chunk that attends to itself alone
    (`from_zero`: every sequence starts at position 0). It knows no `sinks`; its log-sum-exp, which would allow to add
    them afterwards, comes rounded to the compute dtype.
    """
    on_gpu = platform in ("gpu", "cuda")
    if on_gpu and tokens == 1 and kernel and batch <= KERNEL_MAX_BATCH and page_size >= KERNEL_MIN_PAGE:
        return "pallas"
    narrow = jnp.dtype(dtype) in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
    fits = head_dim % 8 == 0 and head_dim <= CUDNN_MAX_HEAD_DIM
    applies = narrow and fits and tokens > 1 and from_zero and not sinks
    return "cudnn" if on_gpu and applies else "xla"


def one_token(q: Array) -> Array:
    """q [B, 1, ...] -> [B, ...]; raises ValueError for more tokens, which the decode kernel does not take."""
    if q.shape[1] != 1:
        raise ValueError(f"{q.shape[1]} new tokens a sequence: the decode kernel takes one")
    return q[:, 0]


def fresh_attention(
    q: Array, k: Array, v: Array, live: Array, *, window: int | None, scale: float, implementation: str
) -> Array:
    """Attention of a chunk that starts at position 0 to itself, through `jax.nn.dot_product_attention`.

    Args:
        q: [B, T, N, H]; k, v: [B, T, G, H]; live: [B, T] bool, live tokens first.
        window: sliding window w (a query sees itself and the w - 1 tokens before it), or None.
        implementation: "cudnn" or "xla", as that function takes it.

    Returns:
        [B, T, N, H] in q's dtype; rows of dead tokens are meaningless but finite.
    """
    lengths = jnp.sum(live, axis=1, dtype=jnp.int32)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=True,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )


def _attend_block(
    q: Array,
    positions: Array,
    keys: Array,
    values: Array,
    key_positions: Array,
    stored: Array,
    window: int | None,
    scale: float,
    sinks: Array | None,
) -> Array:
    """Softmax attention of queries [B, T, G, R, H] at `positions` to keys [B, S, G, H]; float32 softmax.

    `sinks` [G, R]: score of a further key without a value.
    """
    scores = contract("btgrh,bsgh->bgrts", q, keys) * scale
    query, key = positions[:, :, None], key_positions[:, None, :]
    visible = (key <= query) & stored[:, None, :]  # [B, T, S]
    if window is not None:
        visible &= query - key < window
    # A finite floor: a dead query that sees no key gets a uniform average of zeroed values, not NaN.
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    else:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, :, None, None], (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1].astype(q.dtype)
    out = contract("bgrts,bsgh->btgrh", weights, values)
    return out.astype(q.dtype)


def paged_attention(
    q: Array,
    kv: PagedKV,
    layer: int,
    positions: Array,
    *,
    window: int | None,
    scale: float,
    sinks: Array | None = None,
    max_scores: int = MAX_SCORES,
) -> Array:
    """Causal attention of new tokens to all stored tokens of their sequences, in plain XLA.

    out = softmax(scale * q k^T + mask) v, where key s is visible to the query at position p iff s <= p, s < lengths
    and, with a window w, p - s < w. With a window, only the pages that a query of this call can see are read.

    Args:
        q: [B, T, N, H] queries after rope.
        kv: cache that already holds this call's keys and values, with `lengths` counting them.
        layer: static layer number.
        positions: [B, T] int32, ascending by one along the live part of a row.
        window: sliding window in tokens, or None.
        scale: factor on the scores, normally H ** -0.5.
        sinks: [N] score, in each head's softmax, of a key without a value; None: no such key. Source: Xiao et al. 2023,
            "Efficient Streaming Language Models with Attention Sinks"; here learned, as in gpt-oss.
        max_scores: query blocks keep B * N * block * S at or under this (a block has at least 16 queries).

    Returns:
        [B, T, N, H] in q's dtype; rows of dead tokens are meaningless but finite.
    """
    B, T = q.shape[:2]
    P, pages = kv.page_size, kv.page_table.shape[1]

    span = pages if window is None else min(pages, (window + T + P - 3) // P + 1)
    page_numbers = None
    if span < pages:
        first = jnp.clip((positions[:, 0] - (window - 1)) // P, 0, pages - span)  # [B]
        page_numbers = first[:, None] + jnp.arange(span, dtype=jnp.int32)  # [B, span]
        key_positions = (page_numbers[:, :, None] * P + jnp.arange(P, dtype=jnp.int32)).reshape(B, span * P)
    else:
        key_positions = jnp.broadcast_to(jnp.arange(span * P, dtype=jnp.int32), (B, span * P))
    keys, values = kv.gather(layer, "k", page_numbers), kv.gather(layer, "v", page_numbers)
    stored = key_positions < kv.lengths[:, None]  # [B, S]
    # Pages are recycled: 0 * NaN left behind by another sequence must not reach this one.
    values = jnp.where(stored[:, :, None, None], values, 0).astype(values.dtype)
    return blocked_attention(
        q,
        keys,
        values,
        positions,
        key_positions,
        stored,
        window=window,
        scale=scale,
        sinks=sinks,
        max_scores=max_scores,
    )


def blocked_attention(
    q: Array,
    keys: Array,
    values: Array,
    positions: Array,
    key_positions: Array,
    stored: Array,
    *,
    window: int | None,
    scale: float,
    sinks: Array | None = None,
    max_scores: int = MAX_SCORES,
) -> Array:
    """Causal attention to given keys, by blocks of queries where the scores would be large.

    Args:
        q: [B, T, N, H] queries at `positions` [B, T].
        keys: [B, S, G, H] at `key_positions` [B, S]; values: [B, S, G, Hv], finite everywhere.
        stored: [B, S] bool, false where a key does not exist.
        window, scale, sinks, max_scores: as for `paged_attention`.

    Returns:
        [B, T, N, Hv] in q's dtype.
    """
    B, T, N, H = q.shape
    S, G = keys.shape[1:3]
    attend = partial(
        _attend_block,
        keys=keys,
        values=values,
        key_positions=key_positions,
        stored=stored,
        window=window,
        scale=scale,
        sinks=None if sinks is None else sinks.reshape(G, N // G),
    )
    width = values.shape[-1]
    q = q.reshape(B, T, G, N // G, H)  # [B, T, G, R, H]
    block = fitting_block(B * N * S, max_scores)
    return by_blocks(lambda _, q, positions: attend(q, positions), block, q, positions).reshape(B, T, N, width)


class GroupedQueryAttention(nnx.Module):
    """Projections, rope, cache write and attention of one layer.

    With `gated`, each query head of `qkv` is followed by a gate of H components, whose sigmoid multiplies the head's
    output. A family sets what happens between the projection and rope: norms `q_norm` and `k_norm` over each head, or
    with `norm_over_all` over all query heads together and all key heads, then `clip`, to +-clip, of q, k and v.

    Args:
        layer: number of the layer in the KV cache.
        window: sliding window in tokens, or None.
        bias: whether the projections have biases.
        sinks: whether there is a parameter `sinks` [N], see `paged_attention`.
    """

    gated: bool = False
    q_norm: nnx.Module | None = None
    k_norm: nnx.Module | None = None
    norm_over_all: bool = False
    clip: float | None = None
    feeds_kernels: bool = False  # set by the decoder layer: a kernel reads the output with its residual

    def __init__(
        self,
        features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype,
        *,
        layer: int,
        window: int | None,
        bias: bool = False,
        sinks: bool = False,
        std: float,
        rngs: nnx.Rngs,
    ):
        self.query_rows = num_heads * (2 if self.gated else 1)  # heads' worth of rows before the keys
        width = (self.query_rows + 2 * num_kv_heads) * head_dim
        self.qkv = Linear(features, width, dtype, bias=bias, std=std, rngs=rngs)
        self.out = Linear(num_heads * head_dim, features, dtype, bias=bias, std=std, rngs=rngs)
        self.sinks = nnx.Param(nnx.initializers.normal(std)(rngs.params(), (num_heads,), dtype)) if sinks else None
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.layer = layer
        self.window = window

    def _condition(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        """Norm and clip of q [B, T, N, H], k and v [B, T, G, H]; the same shapes."""
        if self.q_norm is not None:
            q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        if self.clip is not None:
            q, k, v = (jnp.clip(x, -self.clip, self.clip) for x in (q, k, v))
        return q, k, v

    def _normed(self, x: Array, norm: nnx.Module) -> Array:
        if not self.norm_over_all:
            return norm(x)
        return norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)

    def _turn_heads(self, heads: Array, kv: PagedKV, call: AttentionCall) -> tuple[Array, PagedKV]:
        """All between projection and attention in a kernel: heads [B, 1, M, H] -> (q [B, 1, N, H], kv)."""
        pages = kv.pages[self.layer]
        norms = {}
        if self.q_norm is not None:
            row = RowNorm(self.q_norm.eps, self.q_norm.kind)
            norms = dict(norm=HeadNorm(row, self.norm_over_all))
            norms |= dict(q_weight=self.q_norm.weight[...], k_weight=self.k_norm.weight[...])
        q, k, v = turn_heads(
            one_token(heads),
            pages["k"],
            pages["v"],
            kv.page_table,
            one_token(call.positions),
            one_token(call.live).astype(jnp.int32),
            None if call.cos is None else one_token(call.cos),
            None if call.sin is None else one_token(call.sin),
            query_heads=self.num_heads,
            step=self.query_rows // self.num_heads,
            clip=self.clip,
            **norms,
            feeds_kernels=True,
            implementation=call.implementation,
        )
        return q[:, None], kv.with_pages(self.layer, {"k": k, "v": v})

    def __call__(
        self, x: Array | Normed, kv: PagedKV, call: AttentionCall, *, residual: Array | None = None
    ) -> tuple[Array, PagedKV]:
        """x [B, T, D] -> (output [B, T, D], kv with this layer's new keys and values written).

        The output is added to `residual` [B, T, D] if there is one.
        """
        B, T, _ = x.shape
        N, G, H = self.num_heads, self.num_kv_heads, self.head_dim
        fused = call.implementation in KERNELS
        with jax.named_scope("qkv"):
            heads = self.qkv(x, feeds_kernels=fused and not self.gated)
            heads = heads.reshape(B, T, self.query_rows + 2 * G, H)
        if fused:
            with jax.named_scope("turn_heads"):
                q, kv = self._turn_heads(heads, kv, call)
        with jax.named_scope("qkv"):
            queries, k, v = jnp.split(heads, (self.query_rows, self.query_rows + G), axis=2)
            if self.gated:
                queries, gate = jnp.moveaxis(queries.reshape(B, T, N, 2, H), 3, 0)
        if not fused:
            with jax.named_scope("qkv"):
                q, k, v = self._condition(queries, k, v)
                if call.cos is not None:
                    q, k = apply_rope(q, call.cos, call.sin), apply_rope(k, call.cos, call.sin)
            with jax.named_scope("kv_write"):
                kv = kv.write(self.layer, {"k": k, "v": v}, call.positions, call.live)
        with jax.named_scope("attention"):
            scale = H**-0.5
            sinks = None if self.sinks is None else self.sinks[...]
            if call.implementation == "cudnn" and sinks is not None:
                raise ValueError("attention implementation 'cudnn' knows no sinks: must be 'xla'")
            if call.implementation == "cudnn":
                out = fresh_attention(q, k, v, call.live, window=self.window, scale=scale, implementation="cudnn")
            elif call.implementation in KERNELS:
                pages = kv.pages[self.layer]
                out = paged_decode_attention(
                    (one_token(q),),
                    (pages["k"],),
                    pages["v"],
                    kv.page_table,
                    kv.lengths,
                    scale=scale,
                    window=self.window,
                    sinks=sinks,
                    feeds_kernels=B == 1 and not self.gated and self.out.form is None,
                    implementation=call.implementation,
                )[:, None]
            elif call.implementation == "xla":
                out = paged_attention(q, kv, self.layer, call.positions, window=self.window, scale=scale, sinks=sinks)
            else:
                raise ValueError(
                    f"attention implementation {call.implementation!r}: must be one of {get_args(Implementation)}"
                )
        with jax.named_scope("attention_out"):
            if self.gated:
                out = out * jax.nn.sigmoid(gate)
            feeds = self.feeds_kernels and residual is not None
            return self.out(out.reshape(B, T, N * H), residual=residual, feeds_kernels=feeds), kv
