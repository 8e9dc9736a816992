"""Qwen3.5-MoE: the shared decoder with Gated DeltaNet in most layers, gated attention and a gated shared expert."""

from flax import nnx

from moe_jax.layers.attention import GroupedQueryAttention
from moe_jax.layers.gated_delta_net import GatedDeltaNet
from moe_jax.layers.mlp import SigmoidGatedMLP
from moe_jax.layers.norm import ZeroCentredRMSNorm
from moe_jax.models.decoder import Decoder, TokenMixer


class GatedAttention(GroupedQueryAttention):
    """Attention with a gate after each query head."""

    gated = True


class Qwen3_5MoeForCausalLM(Decoder):
    """Qwen3.5-MoE, text only; in linear layers `layers.N.attn` holds the parameters of `GatedDeltaNet`.

    In the others it has `q_norm` and `k_norm` [H], and `qkv` has two heads of rows a query head. `layers.N.shared.gate`
    [1, D] scales the shared expert.
    """

    attention_class = GatedAttention
    norm_class = ZeroCentredRMSNorm

    def make_attention(self, layer: int, rngs: nnx.Rngs) -> TokenMixer:
        cfg = self.cfg
        if layer in cfg.attention_layers:
            attention = super().make_attention(layer, rngs)
            attention.q_norm = self.norm_class(cfg.head_dim, self.dtype, eps=cfg.rms_norm_eps)
            attention.k_norm = self.norm_class(cfg.head_dim, self.dtype, eps=cfg.rms_norm_eps)
            return attention
        return GatedDeltaNet(
            cfg.hidden_size,
            self.dtype,
            key_heads=cfg.linear_num_key_heads,
            value_heads=cfg.linear_num_value_heads,
            key_dim=cfg.linear_key_head_dim,
            value_dim=cfg.linear_value_head_dim,
            taps=cfg.linear_conv_kernel_dim,
            eps=cfg.rms_norm_eps,
            layer=layer,
            std=cfg.initializer_range,
            rngs=rngs,
        )

    def make_shared(self, rngs: nnx.Rngs) -> SigmoidGatedMLP:
        cfg = self.cfg
        return SigmoidGatedMLP(cfg.hidden_size, cfg.shared_width, self.dtype, std=cfg.initializer_range, rngs=rngs)
