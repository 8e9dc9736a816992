"""gpt-oss: the shared decoder with attention sinks, biases, and a router that weighs the chosen experts only."""

from flax import nnx

from moe_jax.layers.attention import GroupedQueryAttention
from moe_jax.layers.linear import Linear
from moe_jax.layers.norm import WideRMSNorm
from moe_jax.layers.router import KernelRouter
from moe_jax.models.decoder import Decoder
from pallas_kernels.router_topk import Routing


class TopKSoftmaxRouter(KernelRouter):
    """The K largest logits of a projection with bias; the weights are their softmax.

    The scores are the softmax over all experts: what traces and policies see.
    """

    def __init__(self, features: int, num_experts: int, k: int, dtype, *, std: float, rngs: nnx.Rngs):
        self.gate = Linear(features, num_experts, dtype, bias=True, packs=False, std=std, rngs=rngs)
        self.k = k

    def routing(self, dtype) -> Routing:
        return Routing(self.k, over_chosen=True, weights=dtype.name)


class GptOssForCausalLM(Decoder):
    """gpt-oss; adds `layers.N.attn.sinks` [N], `layers.N.attn.{qkv,out}.bias` and `layers.N.router.gate.bias` [E]."""

    norm_class = WideRMSNorm

    def make_attention(self, layer: int, rngs: nnx.Rngs) -> GroupedQueryAttention:
        cfg = self.cfg
        return GroupedQueryAttention(
            cfg.hidden_size,
            cfg.num_attention_heads,
            cfg.num_key_value_heads,
            cfg.head_dim,
            self.dtype,
            layer=layer,
            window=cfg.layer_window(layer),
            bias=cfg.attention_bias,
            sinks=True,
            std=cfg.initializer_range,
            rngs=rngs,
        )

    def make_router(self, rngs: nnx.Rngs) -> TopKSoftmaxRouter:
        cfg = self.cfg
        return TopKSoftmaxRouter(
            cfg.hidden_size,
            cfg.num_experts,
            cfg.num_experts_per_tok,
            self.dtype,
            std=cfg.initializer_range,
            rngs=rngs,
        )
