"""DeepSeek-V4's attention: a short window of tokens, and compressed entries of everything before (report, section 2.3).

All N heads share one head of keys, which are the values as well: the last `window` tokens as they are, and one entry
for every m tokens of the past (`compressor.py`), of which a query sees those whose windows have ended, or with an
indexer only the best of these (`indexer.py`). Keys carry rotary positions, so the values do; the output is rotated back
by the query's position, which leaves each value turned by its distance from the query.

A sequence keeps the last window - 1 tokens and the tokens of open windows as states, and the entries in pages.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from moe_jax.engine.kv_cache import LayerCache, PagedKV, StateTensor
from moe_jax.layers.attention import MAX_SCORES, AttentionCall
from moe_jax.layers.compressor import Compressor, pending
from moe_jax.layers.indexer import Indexer
from moe_jax.layers.linear import Linear, contract
from moe_jax.layers.norm import Float32RMSNorm, Normed, rms_norm, value_of
from moe_jax.layers.query_blocks import MIN_BLOCK, by_blocks, fitting_block
from moe_jax.layers.rope import Rope


@dataclass(frozen=True)
class Compression:
    """How a layer compresses the past: an entry every `every` tokens.

    index: (heads, width, entries a query) of the indexer; None: queries see all entries. Windows overlap with an
    indexer, and do not without.
    """

    every: int
    index: tuple[int, int, int] | None = None


def compressed_cache(head_dim: int, window: int, compression: Compression | None) -> LayerCache:
    """What a layer keeps: the window [w - 1, H], and with compression entries [H] in pages and pending tokens."""
    states = {"window": StateTensor((window - 1, head_dim))}
    if compression is None:
        return LayerCache(states=states)
    m, index = compression.every, compression.index
    paged = {"entry": (head_dim,)}
    states["entry"] = pending(head_dim, m, index is not None)
    if index is not None:
        paged["index"] = (index[1],)
        states["index"] = pending(index[1], m, True)
    return LayerCache(paged=paged, states=states, every=m)


def window_and_entries(
    q: Array,
    local: Array,
    start: Array,
    sinks: Array,
    entries: Array | Callable[[Array], Array] | None,
    visible: Array | None,
    *,
    window: int,
    scale: float,
    max_scores: int = MAX_SCORES,
) -> Array:
    """Softmax attention of new tokens to the tokens in their window and to entries; keys are values. Float32 softmax.

    Args:
        q: [B, T, N, H] queries.
        local: [B, w - 1 + T, H] keys of the w - 1 tokens before the first query, then of the queries' own tokens.
        start: [B] int32 tokens before the first query: only that many of the earlier keys exist, at their end.
        sinks: [N] score of a further key without a value, in each head.
        entries: [B, S, H], the same for all queries, or a function that fetches them, see `visible`; None: none.
        visible: [B, T, S] bool, which entries a query sees. Where `entries` is a function, [B, T, k] int32, their
            numbers or -1: it takes numbers [B, t, k] to entries [B, t, k, H], finite also where there is none.
        window: w, a query sees itself and the w - 1 tokens before it.
        scale: factor on the scores.
        max_scores: blocks of queries keep their scores, and the entries made for them, at or under this many numbers.

    Returns:
        [B, T, N, H] in q's dtype.
    """
    B, T, N, H = q.shape
    chosen = callable(entries)
    S = 0 if visible is None else visible.shape[-1]
    numbers = B * max(N * (2 * window + S), S * H if chosen else 0)
    # Longer blocks than the window would mostly compute scores that the window hides.
    block = min(fitting_block(numbers, max_scores), max(MIN_BLOCK, 1 << (window - 1).bit_length()))

    def attend(first, q, visible=None):
        queries = q.shape[1]
        keys = lax.dynamic_slice_in_dim(local, first, queries + window - 1, axis=1)
        back = jnp.arange(queries + window - 1) - (window - 1)  # distance of a key from the block's first query
        ahead = jnp.arange(queries)[:, None] - back  # distance of a query from a key
        exists = start[:, None] + first + back >= 0  # [B, keys]
        near = (ahead >= 0) & (ahead < window) & exists[:, None]  # [B, t, keys]
        scores = [jnp.where(near[:, None], contract("btnh,bsh->bnts", q, keys) * scale, -jnp.inf)]
        if visible is not None:
            if chosen:
                past = entries(visible)
                scored = contract("btnh,btsh->bnts", q, past)
                visible = visible >= 0
            else:
                past = entries
                scored = contract("btnh,bsh->bnts", q, past)
            scores.append(jnp.where(visible[:, None], scored * scale, -jnp.inf))
        sink = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None, None], (q.shape[0], N, queries, 1))
        # The sink is finite, so that a query that sees nothing (a dead one) gets zeros, not NaN.
        weights = jax.nn.softmax(jnp.concatenate([*scores, sink], axis=-1), axis=-1).astype(q.dtype)
        near_weights, past_weights, _ = jnp.split(weights, (keys.shape[1], weights.shape[-1] - 1), axis=-1)
        out = contract("bnts,bsh->btnh", near_weights, keys)
        if visible is not None:
            out += contract("bnts,btsh->btnh" if chosen else "bnts,bsh->btnh", past_weights, past)
        return out.astype(q.dtype)

    if T > block:
        # The last block may reach past the queries.
        local = jnp.pad(local, ((0, 0), (0, -T % block), (0, 0)))
    return by_blocks(attend, block, q, *(() if visible is None else (visible,)))


class CompressedAttention(nnx.Module):
    """Projections, rope, states, entries and attention of one layer.

    Parameters: `qkv.weight` [Rq + H, D] (compressed query and shared key), `q_norm`, `q_up.weight` [N H, Rq],
    `kv_norm`, `sinks` [N] float32, `out_down.weight` [g Ro, N H / g] (one block for each of g groups of heads),
    `out.weight` [D, g Ro], `compressor` and `indexer` where the layer has them. Norm weights are float32.

    Args:
        features: D; num_heads: N; head_dim: H; q_rank: Rq; groups: g; out_rank: Ro.
        window: tokens seen as they are; compression: of the others, or None.
        rope: of queries, keys and entries. layer: number of the layer in the cache.
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        head_dim: int,
        dtype,
        *,
        q_rank: int,
        groups: int,
        out_rank: int,
        window: int,
        compression: Compression | None,
        rope: Rope,
        eps: float,
        layer: int,
        std: float,
        rngs: nnx.Rngs,
    ):
        self.qkv = Linear(features, q_rank + head_dim, dtype, std=std, rngs=rngs)
        self.q_norm = Float32RMSNorm(q_rank, dtype, eps=eps)
        self.q_up = Linear(q_rank, num_heads * head_dim, dtype, std=std, rngs=rngs)
        self.kv_norm = Float32RMSNorm(head_dim, dtype, eps=eps)
        self.sinks = nnx.Param(jnp.zeros((num_heads,), jnp.float32))
        self.out_down = Linear(
            num_heads * head_dim // groups, groups * out_rank, dtype, packs=False, std=std, rngs=rngs
        )
        self.out = Linear(groups * out_rank, features, dtype, std=std, rngs=rngs)
        compressor = indexer = None
        if compression is not None:
            shared = dict(every=compression.every, rope=rope, eps=eps, std=std, rngs=rngs)
            overlap = compression.index is not None
            compressor = Compressor(features, head_dim, dtype, overlap=overlap, **shared)
            if compression.index is not None:
                heads, width, top = compression.index
                indexer = Indexer(features, q_rank, heads, width, dtype, top=top, **shared)
        self.compressor, self.indexer = compressor, indexer
        self.num_heads, self.head_dim, self.q_rank, self.groups = num_heads, head_dim, q_rank, groups
        self.window, self.rope, self.eps, self.layer = window, rope, eps, layer

    def _compress(self, x: Array, kv: PagedKV, start: Array, count: Array) -> tuple[PagedKV, dict[str, Array]]:
        """Writes the entries that end in this call: (kv, the new states of the open windows)."""
        parts = {"entry": self.compressor}
        if self.indexer is not None:
            parts["index"] = self.indexer.compressor
        entries, states = {}, {}
        for name, compressor in parts.items():
            state = kv.states[self.layer][name]
            entries[name], first, ended, states[name] = compressor(x, state, start, count)
        return kv.write(self.layer, entries, first, ended).settled(self.layer), states

    def _past(
        self, x: Array, q_low: Array, kv: PagedKV, positions: Array
    ) -> tuple[Array | Callable[[Array], Array], Array]:
        """(entries, visible) of `window_and_entries` for new tokens x [B, T, D]."""
        m = self.compressor.every
        ended = (kv.lengths // m)[:, None]  # [B, 1]
        seen = jnp.minimum((positions + 1) // m, ended)  # [B, T]; positions of dead tokens may be anything

        def stored(name):
            """All entries in order; zero where none is stored: pages are recycled, and 0 * NaN must not arise."""
            entries = kv.gather_entries(self.layer, name, m)
            exists = jnp.arange(entries.shape[1], dtype=jnp.int32) < ended
            return jnp.where(exists[:, :, None], entries, 0)

        places = kv.page_table.shape[1] * kv.page_size // m
        if self.indexer is None or places <= self.indexer.top:
            entries = stored("entry")
            return entries, jnp.arange(entries.shape[1], dtype=jnp.int32) < seen[:, :, None]

        def take(numbers):
            B, t, k = numbers.shape
            entries = kv.take(self.layer, "entry", jnp.maximum(numbers, 0).reshape(B, t * k) * m)
            return jnp.where((numbers >= 0)[..., None], entries.reshape(B, t, k, -1), 0)

        with jax.named_scope("indexer"):
            return take, self.indexer(x, q_low, positions, stored("index"), seen)

    def __call__(
        self, x: Array | Normed, kv: PagedKV, call: AttentionCall, *, residual: Array | None = None
    ) -> tuple[Array, PagedKV]:
        """x [B, T, D] -> (output, plus `residual` if any; kv with the entries and states after the live tokens)."""
        if call.implementation != "xla":
            raise ValueError(
                f'attention implementation {call.implementation!r}: must be "xla" where keys are compressed'
            )
        B, T, _ = x.shape
        N, H = self.num_heads, self.head_dim
        count = jnp.sum(call.live, axis=1, dtype=jnp.int32)
        start = kv.lengths - count
        with jax.named_scope("qkv"):
            q_low, key = jnp.split(self.qkv(x), (self.q_rank,), axis=-1)
            x = value_of(x)
            q_low = self.q_norm(q_low)
            q = rms_norm(self.q_up(q_low).reshape(B, T, N, H), jnp.ones((), x.dtype), self.eps)
            q = self.rope.turn(q, call.positions)
            key = self.rope.turn(self.kv_norm(key)[:, :, None], call.positions)[:, :, 0]  # [B, T, H]
        with jax.named_scope("kv_write"):
            local = jnp.concatenate([kv.states[self.layer]["window"].astype(key.dtype), key], axis=1)
            last = count[:, None] + jnp.arange(self.window - 1, dtype=jnp.int32)
            states = {"window": jnp.take_along_axis(local, last[:, :, None], axis=1)}
        entries = visible = None
        if self.compressor is not None:
            with jax.named_scope("compress"):
                kv, pending_tokens = self._compress(x, kv, start, count)
                states |= pending_tokens
            entries, visible = self._past(x, q_low, kv, call.positions)
        with jax.named_scope("attention"):
            out = window_and_entries(
                q, local, start, self.sinks[...], entries, visible, window=self.window, scale=H**-0.5
            )
        with jax.named_scope("attention_out"):
            out = self.rope.turn(out, call.positions, back=True).reshape(B, T, self.groups, N * H // self.groups)
            down = self.out_down.weight[...].reshape(self.groups, -1, N * H // self.groups)
            low = contract("btgi,gri->btgr", out, down)
            low = low.astype(x.dtype).reshape(B, T, -1)
            return self.out(low, residual=residual), kv.with_states(self.layer, states)
