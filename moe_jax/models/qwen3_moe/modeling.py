"""Qwen3-MoE: the shared decoder with RMS-normalised query and key heads."""

from flax import nnx

from moe_jax.layers.attention import GroupedQueryAttention
from moe_jax.layers.norm import RMSNorm
from moe_jax.models.decoder import Decoder


class Qwen3MoeForCausalLM(Decoder):
    """Qwen3-MoE; adds `layers.N.attn.{q_norm,k_norm}.weight` [H], norms of each head, to the shared parameters."""

    def make_attention(self, layer: int, rngs: nnx.Rngs) -> GroupedQueryAttention:
        attention = super().make_attention(layer, rngs)
        attention.q_norm = RMSNorm(self.cfg.head_dim, self.dtype, eps=self.cfg.rms_norm_eps)
        attention.k_norm = RMSNorm(self.cfg.head_dim, self.dtype, eps=self.cfg.rms_norm_eps)
        return attention
