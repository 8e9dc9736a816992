"""OLMoE: the shared decoder with query/key norms over the whole projection and clipped activations."""

from flax import nnx

from moe_jax.layers.attention import GroupedQueryAttention
from moe_jax.layers.norm import RMSNorm
from moe_jax.models.decoder import Decoder


class OlmoeAttention(GroupedQueryAttention):
    """Normalises all N*H query components together (keys: G*H), then clips q, k and v to [-clip, clip]."""

    norm_over_all = True


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
