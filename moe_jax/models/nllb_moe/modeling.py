"""NLLB-MoE: an encoder-decoder whose sparse layers route each token to two experts of limited capacity."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from moe_jax.engine.kv_cache import PagedKV
from moe_jax.layers.attention import AttentionCall, GroupedQueryAttention, Implementation
from moe_jax.layers.capacity_router import Top2Router
from moe_jax.layers.linear import Embedding, Linear, project
from moe_jax.layers.mlp import ReluMLP
from moe_jax.layers.norm import LayerNorm
from moe_jax.layers.sinusoid import sinusoids
from moe_jax.layers.source_attention import CrossAttention, SourceAttention
from moe_jax.models.decoder import Capture, Experts, in_order, last_live, record
from moe_jax.models.nllb_moe.config import NllbMoeConfig

NORM_EPS = 1e-5


def make_norm(cfg: NllbMoeConfig, dtype) -> LayerNorm:
    """A layer norm with bias over the model's width."""
    return LayerNorm(cfg.d_model, dtype, eps=NORM_EPS, bias=True)


def make_router(cfg: NllbMoeConfig, rngs: nnx.Rngs) -> Top2Router:
    """The router of a sparse layer."""
    return Top2Router(
        cfg.d_model,
        cfg.num_experts,
        bias=cfg.router_bias,
        fraction=cfg.moe_eval_capacity_token_fraction,
        prioritized=cfg.batch_prioritized_routing,
        normalize_first=cfg.normalize_router_prob_before_dropping,
        scale=1 - cfg.moe_token_dropout,  # what training drops of the experts' outputs
        std=cfg.init_std,
        rngs=rngs,
    )


class FeedForward(nnx.Module):
    """The feed-forward of a layer: exactly one of `mlp` (dense) and `router` (sparse) is a module.

    `moe_layer` counts the sparse layers of both stacks; `name` is the layer's in a capture.
    """

    def __init__(self, cfg: NllbMoeConfig, dtype, *, width: int, moe_layer: int | None, name: str, rngs: nnx.Rngs):
        sparse = moe_layer is not None
        self.mlp = None if sparse else ReluMLP(cfg.d_model, width, dtype, std=cfg.init_std, rngs=rngs)
        self.router = make_router(cfg, rngs) if sparse else None
        self.moe_layer = moe_layer
        self.name = name

    def __call__(
        self, x: Array, tokens: Array, live: Array, counted: Array, experts: Experts, state: Any, capture: Capture
    ) -> tuple[Array, Any]:
        """x [B, T, D], tokens and live [B, T], counted as `Top2Router` takes it -> (y [B, T, D], state)."""
        if self.router is None:
            with jax.named_scope("mlp"):
                return self.mlp(x), state
        B, T, D = x.shape
        rows, live = x.reshape(B * T, D), live.reshape(B * T)
        with jax.named_scope("router"):
            ids, weights, scores = self.router(rows, live, counted)
        record(capture, f"router/{self.name}/ids", ids)
        record(capture, f"router/{self.name}/weights", weights)
        record(capture, f"router/{self.name}/scores", scores)
        with jax.named_scope("experts"):
            y, state = experts(self.moe_layer, rows, ids, weights, scores, live, tokens.reshape(B * T), state)
        return y.astype(x.dtype).reshape(B, T, D), state


class EncoderLayer(nnx.Module):
    """x + attention(norm x), then x + feed-forward(norm x)."""

    def __init__(self, cfg: NllbMoeConfig, dtype, *, ffn: FeedForward, rngs: nnx.Rngs):
        self.attn_norm = make_norm(cfg, dtype)
        self.attn = SourceAttention(cfg.d_model, cfg.encoder_attention_heads, dtype, std=cfg.init_std, rngs=rngs)
        self.ffn_norm = make_norm(cfg, dtype)
        self.ffn = ffn

    def __call__(
        self, x: Array, tokens: Array, live: Array, counted: Array, experts: Experts, state: Any, capture: Capture
    ) -> tuple[Array, Any]:
        """x [B, S, D] -> (x [B, S, D], state)."""
        with jax.named_scope("attention"):
            x = x + self.attn(self.attn_norm(x), live)
        y, state = self.ffn(self.ffn_norm(x), tokens, live, counted, experts, state, capture)
        return x + y, state


class DecoderLayer(nnx.Module):
    """x + attention(norm x), x + cross-attention(norm x), x + feed-forward(norm x)."""

    def __init__(self, cfg: NllbMoeConfig, dtype, *, layer: int, ffn: FeedForward, rngs: nnx.Rngs):
        heads = cfg.decoder_attention_heads
        self.attn_norm = make_norm(cfg, dtype)
        self.attn = GroupedQueryAttention(
            cfg.d_model,
            heads,
            heads,
            cfg.head_dim,
            dtype,
            layer=layer,
            window=None,
            bias=True,
            std=cfg.init_std,
            rngs=rngs,
        )
        self.cross_norm = make_norm(cfg, dtype)
        self.cross = CrossAttention(cfg.d_model, heads, dtype, std=cfg.init_std, rngs=rngs)
        self.ffn_norm = make_norm(cfg, dtype)
        self.ffn = ffn
        self.layer = layer

    def __call__(
        self,
        x: Array,
        tokens: Array,
        kv: PagedKV,
        call: AttentionCall,
        source_live: Array,
        counted: Array,
        experts: Experts,
        state: Any,
        capture: Capture,
    ) -> tuple[Array, PagedKV, Any]:
        """x [B, T, D], source_live [B, S] -> (x [B, T, D], kv, state)."""
        attended, kv = self.attn(self.attn_norm(x), kv, call)
        x = x + attended
        with jax.named_scope("cross_attention"):
            x = x + self.cross(self.cross_norm(x), kv.states[self.layer], source_live)
        y, state = self.ffn(self.ffn_norm(x), tokens, call.live, counted, experts, state, capture)
        return x + y, kv, state


class Stack(nnx.Module):
    """The layers of an encoder or decoder and their final norm."""

    def __init__(self, cfg: NllbMoeConfig, dtype, layers: list[nnx.Module]):
        # A dict with string keys, not a list: parameter paths are then plain strings everywhere.
        self.layers = nnx.Dict({str(number): layer for number, layer in enumerate(layers)})
        self.norm = make_norm(cfg, dtype)


class NllbMoeForConditionalGeneration(nnx.Module):
    """The model without expert weights: `encode` once a request, then calls with the target's tokens.

    Parameter paths: `embed.weight`; `encoder.layers.N.` and `decoder.layers.N.` with `attn_norm`, `attn.{qkv,out}`,
    `cross_norm`, `cross.{q,kv,out}` (decoder), `ffn_norm`, `ffn.mlp.{up,down}` or `ffn.router.gate`, each with `weight`
    and `bias` (of the gate only with `router_bias`); `encoder.norm`, `decoder.norm`; `lm_head.weight` unless tied.

    Args:
        cfg: the config.
        dtype: compute dtype and dtype of all parameters but the routers': float32 or bfloat16.
        rngs: source of the random initial weights (normal with std `init_std`).
    """

    def __init__(self, cfg: NllbMoeConfig, dtype, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(dtype)
        if dtype not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
            raise ValueError(f"dtype = {dtype}: must be float32, bfloat16 or float16")
        self.cfg = cfg
        self.dtype = dtype
        self.embed = Embedding(cfg.vocab_size, cfg.d_model, dtype, std=cfg.init_std, rngs=rngs)

        def ffn(stack: str, layer: int, width: int, sparse: tuple[int, ...], first: int) -> FeedForward:
            moe_layer = first + sparse.index(layer) if layer in sparse else None
            return FeedForward(cfg, dtype, width=width, moe_layer=moe_layer, name=f"{stack}/{layer}", rngs=rngs)

        def encoder_layer(layer: int) -> EncoderLayer:
            block = ffn("encoder", layer, cfg.encoder_ffn_dim, cfg.encoder_sparse, 0)
            return EncoderLayer(cfg, dtype, ffn=block, rngs=rngs)

        def decoder_layer(layer: int) -> DecoderLayer:
            block = ffn("decoder", layer, cfg.decoder_ffn_dim, cfg.decoder_sparse, cfg.encoder_moe_layers)
            return DecoderLayer(cfg, dtype, layer=layer, ffn=block, rngs=rngs)

        self.encoder = Stack(cfg, dtype, [encoder_layer(layer) for layer in range(cfg.encoder_layers)])
        self.decoder = Stack(cfg, dtype, [decoder_layer(layer) for layer in range(cfg.decoder_layers)])
        tied = cfg.tie_word_embeddings
        self.lm_head = (
            None if tied else Linear(cfg.d_model, cfg.vocab_size, dtype, packs=False, std=cfg.init_std, rngs=rngs)
        )

    def embedded(self, tokens: Array, live: Array, start: Array | int) -> Array:
        """tokens [B, T] that follow `start` others ([B, 1] or 0) -> [B, T, D] with positions.

        Position p is counted over the tokens that are not the padding token, and the first has p = pad + 1; a padding
        token has no position vector.
        """
        cfg = self.cfg
        with jax.named_scope("embed"):
            counts = live & (tokens != cfg.pad_token_id)
            positions = start + jnp.cumsum(counts, axis=1, dtype=jnp.int32) + cfg.pad_token_id
            vectors = jnp.where(counts[..., None], sinusoids(positions, cfg.d_model, self.dtype), 0)
            return self.embed(tokens) * jnp.asarray(cfg.embedding_scale, self.dtype) + vectors

    def encode(
        self,
        tokens: Array,
        live: Array,
        counted: Array,
        experts: Experts,
        state: Any,
        *,
        capture: Capture = None,
    ) -> tuple[tuple[dict[str, Array], ...], Any]:
        """Run whole sources through the encoder.

        Args:
            tokens: [B, S] int32 ids; live: [B, S] bool, false marks padding, which comes last in its row.
            counted: int32 scalar: tokens of the call for the experts' capacity, padding between rows included.
            experts, state, capture: as for the decoder; a capture has `hidden/encoder/i` and `router/encoder/i/...`.

        Returns:
            (what each decoder layer keeps of the source, `source_k` and `source_v` [B, S, N, H]; state).
        """
        x = self.embedded(tokens, live, 0)
        for index, layer in in_order(self.encoder.layers):
            record(capture, f"hidden/encoder/{index}", x)
            with jax.named_scope(f"encoder_{index}"):
                x, state = layer(x, tokens, live, counted, experts, state, capture)
        x = self.encoder.norm(x)
        record(capture, f"hidden/encoder/{len(self.encoder.layers)}", x)
        with jax.named_scope("remember"):
            return tuple(layer.cross.remember(x) for _, layer in in_order(self.decoder.layers)), state

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
        """Run new tokens of the target through the decoder; arguments and results as of `models.decoder.Decoder`.

        kv also holds what `encode` gave, in `states`, and `source_lengths`. Captured are `hidden/decoder/i` and
        `router/decoder/i/{ids,weights,scores}`. Dead tokens do not count for the experts' capacity.
        """
        if capture is not None and last_only:
            raise ValueError("capture needs all positions: call with last_only=False")
        kv = kv.extend(live)
        S = kv.states[0]["source_k"].shape[1]
        source_live = jnp.arange(S, dtype=jnp.int32) < kv.source_lengths[:, None]
        counted = jnp.sum(live, dtype=jnp.int32)
        x = self.embedded(tokens, live, positions[:, :1])
        call = AttentionCall(positions, live, None, None, attention)
        for index, layer in in_order(self.decoder.layers):
            record(capture, f"hidden/decoder/{index}", x)
            with jax.named_scope(f"decoder_{index}"):
                x, kv, state = layer(x, tokens, kv, call, source_live, counted, experts, state, capture)
        if last_only:
            x = last_live(x, live)
        x = self.decoder.norm(x)
        record(capture, f"hidden/decoder/{len(self.decoder.layers)}", x)
        return x, kv, state

    def logits(self, hidden: Array) -> Array:
        """Vocabulary scores of hidden [..., D]: [..., V] float32."""
        with jax.named_scope("lm_head"):
            head = self.embed if self.lm_head is None else self.lm_head
            return project(hidden, head.weight[...])
