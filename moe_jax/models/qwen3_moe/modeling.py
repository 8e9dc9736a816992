"""Qwen3-MoE: the shared decoder with RMS-normalised query and key heads."""

from flax import nnx
from jax import Array

from moe_jax.layers.attention import GroupedQueryAttention
from moe_jax.layers.norm import RMSNorm
from moe_jax.models.decoder import Decoder


class Qwen3MoeAttention(GroupedQueryAttention):
    """Normalises each query and key head over its H components before rope."""

    def condition(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        return self.q_norm(q), self.k_norm(k), v


class Qwen3MoeForCausalLM(Decoder):
    """Qwen3-MoE; adds `layers.N.attn.{q_norm,k_norm}.weight` [H] to the shared parameters."""

    attention_class = Qwen3MoeAttention

    def make_attention(self, layer: int, rngs: nnx.Rngs) -> GroupedQueryAttention:
        attention = super().make_attention(layer, rngs)
        attention.q_norm = RMSNorm(self.cfg.head_dim, self.dtype, eps=self.cfg.rms_norm_eps)
        attention.k_norm = RMSNorm(self.cfg.head_dim, self.dtype, eps=self.cfg.rms_norm_eps)
        return attention
