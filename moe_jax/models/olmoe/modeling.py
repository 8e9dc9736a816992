"""OLMoE: the shared decoder with query/key norms over the whole projection and clipped activations."""

import jax.numpy as jnp
from flax import nnx
from jax import Array

from moe_jax.layers.attention import GroupedQueryAttention
from moe_jax.layers.norm import RMSNorm
from moe_jax.models.decoder import Decoder


class OlmoeAttention(GroupedQueryAttention):
    """Normalises all N*H query components together (keys: G*H), then clips q, k and v to [-clip, clip]."""

    def condition(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        q = self.q_norm(q.reshape(*q.shape[:2], -1)).reshape(q.shape)
        k = self.k_norm(k.reshape(*k.shape[:2], -1)).reshape(k.shape)
        if self.clip is not None:
            q, k, v = (jnp.clip(x, -self.clip, self.clip) for x in (q, k, v))
        return q, k, v


class OlmoeForCausalLM(Decoder):
    """OLMoE; adds `layers.N.attn.q_norm.weight` [N*H] and `k_norm.weight` [G*H] to the shared parameters."""

    attention_class = OlmoeAttention

    def make_attention(self, layer: int, rngs: nnx.Rngs) -> GroupedQueryAttention:
        cfg = self.cfg
        attention = super().make_attention(layer, rngs)
        attention.q_norm = RMSNorm(cfg.num_attention_heads * cfg.head_dim, self.dtype, eps=cfg.rms_norm_eps)
        attention.k_norm = RMSNorm(cfg.num_key_value_heads * cfg.head_dim, self.dtype, eps=cfg.rms_norm_eps)
        attention.clip = cfg.clip_qkv
        return attention
