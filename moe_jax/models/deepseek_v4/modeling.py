"""DeepSeek-V4: residual streams under hyper-connections, compressed attention, hash and scored routers."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from moe_jax.engine.kv_cache import PagedKV
from moe_jax.layers.attention import AttentionCall
from moe_jax.layers.compressed_attention import CompressedAttention
from moe_jax.layers.hash_router import BiasedSqrtSoftplusRouter, HashRouter
from moe_jax.layers.hyper_connections import HyperConnection, HyperHead
from moe_jax.layers.mlp import GatedMLP
from moe_jax.layers.norm import Float32RMSNorm
from moe_jax.models.decoder import Capture, Decoder, DecoderLayer, Experts
from moe_jax.models.deepseek_v4.config import HASH, DeepseekV4Config
from pallas_kernels.expert_ffn import ExpertSpec


class SharedExpert(GatedMLP):
    """A dense MLP with the activation of the routed experts."""

    def __init__(self, features: int, hidden: int, dtype, *, spec: ExpertSpec, std: float, rngs: nnx.Rngs):
        super().__init__(features, hidden, dtype, std=std, rngs=rngs)
        self.spec = spec

    def __call__(self, x: Array) -> Array:
        gate, up = jnp.split(self.gate_up(x).astype(jnp.float32), 2, axis=-1)
        return self.down(self.spec.activate(gate, up).astype(x.dtype))


class HyperLayer(DecoderLayer):
    """A decoder layer between n streams [B, T, n, D]: each block reads and writes them through its hyper-connection."""

    def __init__(self, cfg: DeepseekV4Config, dtype, *, rngs: nnx.Rngs, **parts: Any):
        super().__init__(cfg, dtype, **parts)
        settings = dict(
            iterations=cfg.hc_sinkhorn_iters,
            eps=cfg.hc_eps,
            norm_eps=cfg.rms_norm_eps,
            std=cfg.initializer_range,
            rngs=rngs,
        )
        self.attn_streams = HyperConnection(cfg.hidden_size, cfg.hc_mult, **settings)
        self.mlp_streams = HyperConnection(cfg.hidden_size, cfg.hc_mult, **settings)

    def choose(self, rows: Array, tokens: Array) -> tuple[Array, Array, Array]:
        if isinstance(self.router, HashRouter):
            return self.router(rows, tokens)
        return super().choose(rows, tokens)

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
        """Streams x [B, T, n, D] -> (streams, kv, state); XLA writes them, so nothing feeds kernels."""
        del feeds_kernels
        with jax.named_scope("streams"):
            collapsed, post, matrix = self.attn_streams.read(x)
        attended, kv = self.attend(collapsed, kv, call, capture)
        with jax.named_scope("streams"):
            x = self.attn_streams.write(x, attended, post, matrix)
            collapsed, post, matrix = self.mlp_streams.read(x)
        y, state = self.feed_forward(collapsed, call.live, tokens, experts, state, capture)
        with jax.named_scope("streams"):
            return self.mlp_streams.write(x, y, post, matrix), kv, state


class DeepseekV4ForCausalLM(Decoder):
    """DeepSeek-V4.

    Parameter paths beside the shared ones: those of `CompressedAttention` in `layers.N.attn`,
    `layers.N.{attn_streams,mlp_streams}.{fn,base,scale}`, `layers.N.router.bias` [E] float32 or, in hash layers,
    `layers.N.router.table` [V, K] int32, and `streams_head.{fn,base,scale}`. Hidden states between layers are the
    streams [B, T, n, D].
    """

    norm_class = Float32RMSNorm

    def __init__(self, cfg: DeepseekV4Config, dtype, *, rngs: nnx.Rngs):
        super().__init__(cfg, dtype, rngs=rngs)
        self.streams_head = HyperHead(
            cfg.hidden_size,
            cfg.hc_mult,
            eps=cfg.hc_eps,
            norm_eps=cfg.rms_norm_eps,
            std=cfg.initializer_range,
            rngs=rngs,
        )

    def make_layer(self, layer: int, moe_layer: int | None, rngs: nnx.Rngs) -> HyperLayer:
        return HyperLayer(
            self.cfg,
            self.dtype,
            norm_class=self.norm_class,
            layer=layer,
            attention=self.make_attention(layer, rngs),
            mlp=None,
            router=self.make_layer_router(layer, rngs),
            shared=self.make_shared(rngs),
            moe_layer=moe_layer,
            rngs=rngs,
        )

    def make_attention(self, layer: int, rngs: nnx.Rngs) -> CompressedAttention:
        cfg = self.cfg
        return CompressedAttention(
            cfg.hidden_size,
            cfg.num_attention_heads,
            cfg.head_dim,
            self.dtype,
            q_rank=cfg.q_lora_rank,
            groups=cfg.o_groups,
            out_rank=cfg.o_lora_rank,
            window=cfg.sliding_window,
            compression=cfg.compression(layer),
            rope=cfg.rope(layer),
            eps=cfg.rms_norm_eps,
            layer=layer,
            std=cfg.initializer_range,
            rngs=rngs,
        )

    def make_layer_router(self, layer: int, rngs: nnx.Rngs) -> HashRouter | BiasedSqrtSoftplusRouter:
        """Router of decoder layer `layer`."""
        cfg = self.cfg
        sizes = cfg.hidden_size, cfg.num_experts, cfg.num_experts_per_tok, self.dtype
        settings = dict(scale=cfg.routed_scaling_factor, std=cfg.initializer_range, rngs=rngs)
        if cfg.mlp_layer_types[layer] == HASH:
            return HashRouter(*sizes, vocab_size=cfg.vocab_size, **settings)
        return BiasedSqrtSoftplusRouter(*sizes, **settings)

    def make_shared(self, rngs: nnx.Rngs) -> SharedExpert:
        cfg = self.cfg
        return SharedExpert(
            cfg.hidden_size,
            cfg.shared_width,
            self.dtype,
            spec=cfg.expert_spec(),
            std=cfg.initializer_range,
            rngs=rngs,
        )

    def enter(self, x: Array) -> Array:
        """Every stream begins as the embedding."""
        return jnp.repeat(x[..., None, :], self.cfg.hc_mult, axis=-2)

    def leave(self, x: Array) -> Array:
        return self.streams_head(x)

    def rotary(self, positions: Array) -> tuple[None, None]:
        """Nothing: sliding and compressed layers have bases of their own, see `Rope`."""
        return None, None
