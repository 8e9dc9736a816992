"""The pre-norm decoder that the decoder-only families share; a family overrides how its blocks are made."""

import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from moe_jax.engine.kv_cache import PagedKV
from moe_jax.layers.attention import AttentionCall, GroupedQueryAttention, Implementation
from moe_jax.layers.linear import Embedding, Linear, project, row_implementation
from moe_jax.layers.mlp import GatedMLP
from moe_jax.layers.norm import Normed, RMSNorm
from moe_jax.layers.rope import rope_tables
from moe_jax.layers.router import KernelRouter, Router
from moe_jax.models.config import DecoderConfig


class Experts(Protocol):
    """What serves the routed experts of a sparse layer; docs/architecture.md, "Model and experts".

    An attribute `read_by_kernels` names those of its arguments "x" and "ids" which, of one row, kernels are the first
    to read in a step; without it: none.
    """

    def __call__(
        self,
        layer: int,
        x: Array,
        ids: Array,
        weights: Array,
        scores: Array,
        live: Array,
        token_ids: Array,
        state: Any,
        *,
        residual: Array | None = None,
        feeds_kernels: bool = False,
    ) -> tuple[Array, Any]:
        """x [B*T, D], ids and weights [B*T, K], scores [B*T, E], live and token_ids [B*T] -> (y [B*T, D], state).

        y is float32; with `residual` [B*T, D], given only where `row_implementation` says that kernels serve its rows,
        y is rounded to its dtype and added to it. feeds_kernels: of that sum, see `_compat.call`.
        """
        ...


class TokenMixer(Protocol):
    """What lets the tokens of a sequence see one another in a layer: attention, or a recurrence in its place."""

    def __call__(
        self, x: Array | Normed, kv: PagedKV, call: AttentionCall, *, residual: Array | None = None
    ) -> tuple[Array, PagedKV]:
        """x [B, T, D] -> (output [B, T, D], plus `residual` if any; the cache with what this layer keeps)."""
        ...


Capture = dict[str, Array] | None


def record(capture: Capture, name: str, value: Array) -> None:
    """Keep an intermediate value under `name` if somebody asked for a capture."""
    if capture is not None:
        capture[name] = value


def last_live(x: Array, live: Array) -> Array:
    """The last live token of each row: x [B, T, ...], live [B, T] -> [B, 1, ...].

    A row without one gives its first token, which nobody reads.
    """
    last = jnp.max(jnp.where(live, jnp.arange(live.shape[1]), 0), axis=1)  # [B]
    return jnp.take_along_axis(x, last.reshape(-1, *(1,) * (x.ndim - 1)), axis=1)


class DecoderLayer(nnx.Module):
    """x + attention(norm x), then x + feed-forward(norm x); the feed-forward is a dense MLP or routed experts.

    Exactly one of `mlp` (dense) and `router` (sparse) is a module; `shared`, if any, is a shared expert whose output is
    added to that of the routed experts. `layer` counts all layers, `moe_layer` the sparse ones.
    """

    def __init__(
        self,
        cfg: DecoderConfig,
        dtype,
        *,
        norm_class: type[nnx.Module],
        layer: int,
        attention: TokenMixer,
        mlp: GatedMLP | None,
        router: nnx.Module | None,
        shared: GatedMLP | None,
        moe_layer: int | None,
    ):
        self.input_norm = norm_class(cfg.hidden_size, dtype, eps=cfg.rms_norm_eps)
        self.attn = attention
        self.post_attention_norm = norm_class(cfg.hidden_size, dtype, eps=cfg.rms_norm_eps)
        self.mlp = mlp
        self.router = router
        self.shared = shared
        self.layer = layer
        self.moe_layer = moe_layer
        # The router's first product computes the norm of what attention and residual gave: where these are kernels of
        # one row, a kernel is the next to read it (`_compat.call`).
        reads_row = isinstance(getattr(router, "gate", None), Linear) and getattr(norm_class, "kind", None) is not None
        if isinstance(attention, GroupedQueryAttention):
            attention.feeds_kernels = reads_row

    @property
    def begins_with_kernels(self) -> bool:
        """Whether kernels are the first to read the input of a layer of one row."""
        attention, kind = self.attn, getattr(self.input_norm, "kind", None)
        return isinstance(attention, GroupedQueryAttention) and attention.qkv.form is None and kind is not None

    def route(
        self, x: Normed, live: Array, tokens: Array, experts: Experts, state: Any, capture: Capture, **onward: Any
    ) -> tuple[Array, Any]:
        """Sparse feed-forward of x [B, T, D]: (y [B, T, D], state); `onward`: keywords of `Experts`."""
        B, T, D = x.shape
        rows = Normed(x.x.reshape(B * T, D), x.norm)
        live, tokens = live.reshape(B * T), tokens.reshape(B * T)
        # XLA may read what else is made of the rows, but for the sum with the residual nothing is.
        read = getattr(experts, "read_by_kernels", frozenset()) if onward else frozenset()
        with jax.named_scope("router"):
            if isinstance(self.router, KernelRouter):
                ids, weights, scores = self.router(rows, read)
            else:
                ids, weights, scores = self.choose(rows, tokens)
        record(capture, f"router/{self.layer}/ids", ids)
        record(capture, f"router/{self.layer}/weights", weights)
        record(capture, f"router/{self.layer}/scores", scores)
        with jax.named_scope("experts"):
            y, state = experts(self.moe_layer, rows.value(), ids, weights, scores, live, tokens, state, **onward)
        x.keep(rows.value())
        return y.astype(x.dtype).reshape(B, T, D), state

    def choose(self, rows: Normed, tokens: Array) -> tuple[Array, Array, Array]:
        """The router's ids [B*T, K], weights [B*T, K] and scores [B*T, E] for rows [B*T, D] of tokens [B*T]."""
        return self.router(rows)

    def attend(
        self, x: Array, kv: PagedKV, call: AttentionCall, capture: Capture, residual: Array | None = None
    ) -> tuple[Array, PagedKV]:
        """Attention with its norm on x [B, T, D], added to `residual` if there is one: ([B, T, D], kv)."""
        x = Normed(x, self.input_norm)
        if capture is None:
            return self.attn(x, kv, call, residual=residual)
        attended, kv = self.attn(x, kv, call)
        record(capture, f"attn/{self.layer}", attended)
        return (attended if residual is None else residual + attended), kv

    def feed_forward(
        self, x: Array, live: Array, tokens: Array, experts: Experts, state: Any, capture: Capture
    ) -> tuple[Array, Any]:
        """Feed-forward with its norm on x [B, T, D]: (y [B, T, D], state)."""
        hidden = Normed(x, self.post_attention_norm)
        if self.router is None:
            with jax.named_scope("mlp"):
                y = self.mlp(hidden)
        else:
            y, state = self.route(hidden, live, tokens, experts, state, capture)
            if self.shared is not None:
                with jax.named_scope("shared_expert"):
                    y = y + self.shared(hidden)
        record(capture, f"mlp/{self.layer}", y)
        return y, state

    def __call__(
        self,
        x: Array,
        tokens: Array,
        kv: PagedKV,
        call: AttentionCall,
        experts: Experts,
        state: Any,
        capture: Capture,
        *,
        feeds_kernels: bool = False,
    ) -> tuple[Array, PagedKV, Any]:
        """x [B, T, D] -> (x [B, T, D], kv, state). feeds_kernels: what comes next begins with kernels."""
        x, kv = self.attend(x, kv, call, capture, residual=x)
        B, T, D = x.shape
        if self.router is None or self.shared is not None or capture is not None or row_implementation(B * T) == "xla":
            y, state = self.feed_forward(x, call.live, tokens, experts, state, capture)
            return x + y, kv, state
        hidden = Normed(x, self.post_attention_norm)
        onward = dict(residual=x.reshape(B * T, D), feeds_kernels=feeds_kernels)
        x, state = self.route(hidden, call.live, tokens, experts, state, capture, **onward)
        return x, kv, state


def in_order(layers: nnx.Dict) -> Iterator[tuple[str, nnx.Module]]:
    """The layers of a stack, kept by their numbers as strings, from the first to the last.

    Not the order of the dict: `nnx.merge` sorts its keys as text, which puts "10" before "2".
    """
    for index in map(str, range(len(layers))):
        yield index, layers[index]


class Decoder(nnx.Module):
    """Embedding, decoder layers, final norm and head of a causal language model, without expert weights.

    Parameter paths: `embed.weight`, `layers.N.{input_norm,post_attention_norm}.weight`,
    `layers.N.attn.{qkv,out}.weight`, `layers.N.router.gate.weight` or `layers.N.mlp.{gate_up,down}.weight`,
    `layers.N.shared.{gate_up,down}.weight` where sparse layers have a shared expert, `norm.weight`, and
    `lm_head.weight` unless the head is tied.

    Args:
        cfg: the family's config.
        dtype: compute dtype and dtype of all parameters: float32, bfloat16 or float16.
        rngs: source of the random initial weights (normal with std `initializer_range`).
    """

    attention_class: type[GroupedQueryAttention] = GroupedQueryAttention
    norm_class: type[nnx.Module] = RMSNorm  # made as norm_class(features, dtype, eps=...)
    router_weights_dtype = None  # dtype of the router's weights; None: the compute dtype
    rope_dtype = None  # dtype of the rotary tables; None: the compute dtype

    def __init__(self, cfg: DecoderConfig, dtype, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(dtype)
        if dtype not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
            raise ValueError(f"dtype = {dtype}: must be float32, bfloat16 or float16")
        self.cfg = cfg
        self.dtype = dtype
        std = cfg.initializer_range
        self.embed = Embedding(cfg.vocab_size, cfg.hidden_size, dtype, std=std, rngs=rngs)
        moe_number = {layer: index for index, layer in enumerate(cfg.moe_layers)}
        # A dict with string keys, not a list: parameter paths are then plain strings everywhere.
        self.layers = nnx.Dict(
            {str(layer): self.make_layer(layer, moe_number.get(layer), rngs) for layer in range(cfg.num_hidden_layers)}
        )
        self.norm = self.norm_class(cfg.hidden_size, dtype, eps=cfg.rms_norm_eps)
        self.lm_head = (
            None
            if cfg.tie_word_embeddings
            else Linear(cfg.hidden_size, cfg.vocab_size, dtype, packs=False, std=std, rngs=rngs)
        )

    def make_layer(self, layer: int, moe_layer: int | None, rngs: nnx.Rngs) -> DecoderLayer:
        """Decoder layer `layer`, sparse layer `moe_layer` among these or dense (None)."""
        sparse = moe_layer is not None
        return DecoderLayer(
            self.cfg,
            self.dtype,
            norm_class=self.norm_class,
            layer=layer,
            attention=self.make_attention(layer, rngs),
            mlp=None if sparse else self.make_mlp(self.cfg.intermediate_size, rngs),
            router=self.make_router(rngs) if sparse else None,
            shared=self.make_shared(rngs) if sparse and self.cfg.shared_width else None,
            moe_layer=moe_layer,
        )

    def make_attention(self, layer: int, rngs: nnx.Rngs) -> TokenMixer:
        """Attention of decoder layer `layer`, or what stands in its place."""
        cfg = self.cfg
        return self.attention_class(
            cfg.hidden_size,
            cfg.num_attention_heads,
            cfg.num_key_value_heads,
            cfg.head_dim,
            self.dtype,
            layer=layer,
            window=cfg.window,
            std=cfg.initializer_range,
            rngs=rngs,
        )

    def make_mlp(self, width: int, rngs: nnx.Rngs) -> GatedMLP:
        """Feed-forward of a dense layer, or a shared expert, of hidden width `width`."""
        cfg = self.cfg
        return GatedMLP(cfg.hidden_size, width, self.dtype, std=cfg.initializer_range, rngs=rngs)

    def make_shared(self, rngs: nnx.Rngs) -> GatedMLP:
        """Shared expert of a sparse layer; made only where the config gives it a width."""
        return self.make_mlp(self.cfg.shared_width, rngs)

    def make_router(self, rngs: nnx.Rngs) -> nnx.Module:
        """Router of a sparse layer."""
        cfg = self.cfg
        return Router(
            cfg.hidden_size,
            cfg.num_experts,
            cfg.num_experts_per_tok,
            self.dtype,
            normalize=cfg.normalizes_router_weights,
            weights_dtype=self.router_weights_dtype or self.dtype,
            std=cfg.initializer_range,
            rngs=rngs,
        )

    def __call__(
        self,
        tokens: Array,
        positions: Array,
        live: Array,
        kv: PagedKV,
        experts: Experts,
        state: Any,
        *,
        last_only: bool = False,
        attention: Implementation = "xla",
        capture: Capture = None,
    ) -> tuple[Array, PagedKV, Any]:
        """Run new tokens through the model.

        Args:
            tokens: [B, T] int32 ids.
            positions: [B, T] int32, ascending by one over the live tokens of a row.
            live: [B, T] bool; false marks padding, which comes after the live tokens of its row.
            kv: cache whose page table covers the new positions.
            experts: serves the routed experts; called once a sparse layer.
            state: opaque value threaded through `experts`.
            last_only: (static) return only the last live token of each row.
            attention: (static) see `choose_implementation`.
            capture: (static) a dict to fill with intermediate values: `hidden/i` (input of layer i; the last is the
                normed output), `attn/i`, `mlp/i` [B, T, D] and `router/i/{ids,weights,scores}` [B*T, ...] by decoder
                layer i. Needs last_only=False.

        Returns:
            (hidden after the final norm, [B, T, D] or [B, 1, D]; kv with the live tokens stored; state).
        """
        if capture is not None and last_only:
            raise ValueError("capture needs all positions: call with last_only=False")

        kv = kv.extend(live)
        with jax.named_scope("embed"):
            x = self.enter(self.embed(tokens))
            cos, sin = self.rotary(positions)
        call = AttentionCall(positions, live, cos, sin, attention)
        layers = list(in_order(self.layers))
        for (index, layer), (_, following) in itertools.zip_longest(layers, layers[1:], fillvalue=(None, None)):
            record(capture, f"hidden/{index}", x)
            feeds = following is not None and following.begins_with_kernels
            with jax.named_scope(f"layer_{index}"):
                x, kv, state = layer(x, tokens, kv, call, experts, state, capture, feeds_kernels=feeds)
        if last_only:
            x = last_live(x, live)
        with jax.named_scope("final_norm"):
            x = self.norm(self.leave(x))
        record(capture, f"hidden/{len(self.layers)}", x)
        return x, kv, state

    def enter(self, x: Array) -> Array:
        """What the layers pass on, from embeddings [B, T, D]: the same, unless a family keeps more than one stream."""
        return x

    def leave(self, x: Array) -> Array:
        """Input [B, T, D] of the final norm from what the last layer gives."""
        return x

    def rotary(self, positions: Array) -> tuple[Array | None, Array | None]:
        """Cosines and sines [B, T, H/2] for positions [B, T]; None, None in a model without positions."""
        cfg = self.cfg
        if cfg.rotary_dim is None:
            return None, None
        return rope_tables(positions, cfg.rotary_dim, cfg.rope_theta, self.rope_dtype or self.dtype, cfg.yarn)

    def guess(self, moe_layer: int, rows: Array, tokens: Array) -> Array:
        """ids [B*T, K] that the router of sparse layer `moe_layer` makes of rows [B*T, D] of tokens [B*T]: what it will
        choose, guessed from what the router of an earlier layer saw."""
        layer = self.layers[str(self.cfg.moe_layers[moe_layer])]
        with jax.named_scope("guess"):
            return layer.choose(rows, tokens)[0]

    def logits(self, hidden: Array) -> Array:
        """Vocabulary scores of hidden [..., D]: [..., V] float32."""
        with jax.named_scope("lm_head"):
            head = self.embed if self.lm_head is None else self.lm_head
            return project(hidden, head.weight[...])
