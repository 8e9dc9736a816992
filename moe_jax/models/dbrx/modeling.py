"""DBRX: the shared decoder with layer norms, clipped projections and a router normalised by a p-norm."""

from flax import nnx

from moe_jax.layers.attention import GroupedQueryAttention
from moe_jax.layers.linear import Linear
from moe_jax.layers.norm import LayerNorm
from moe_jax.layers.router import KernelRouter
from moe_jax.models.decoder import Decoder
from pallas_kernels.router_topk import Routing


class PNormRouter(KernelRouter):
    """Softmax over all E experts in the compute dtype, the K largest, divided by their p-norm (p None: not divided)."""

    def __init__(self, features: int, num_experts: int, k: int, dtype, *, p: float | None, std: float, rngs: nnx.Rngs):
        self.gate = Linear(features, num_experts, dtype, packs=False, std=std, rngs=rngs)
        self.k = k
        self.p = p

    def routing(self, dtype) -> Routing:
        return Routing(self.k, rounded=dtype.name, norm=self.p, weights=dtype.name)


class DbrxForCausalLM(Decoder):
    """DBRX; the parameters are the shared ones."""

    norm_class = LayerNorm

    def make_attention(self, layer: int, rngs: nnx.Rngs) -> GroupedQueryAttention:
        attention = super().make_attention(layer, rngs)
        attention.clip = self.cfg.clip_qkv  # of q, k and v before rope
        return attention

    def make_router(self, rngs: nnx.Rngs) -> PNormRouter:
        cfg = self.cfg
        return PNormRouter(
            cfg.hidden_size,
            cfg.num_experts,
            cfg.num_experts_per_tok,
            self.dtype,
            p=cfg.moe_normalize_expert_weights,
            std=cfg.initializer_range,
            rngs=rngs,
        )
