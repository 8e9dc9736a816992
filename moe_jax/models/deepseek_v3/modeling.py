"""DeepSeek-V3: MLA and a sigmoid router with a correction bias."""

from flax import nnx

from moe_jax.layers.group_router import BiasedSigmoidRouter
from moe_jax.models.mla import MLADecoder


class DeepseekV3ForCausalLM(MLADecoder):
    """DeepSeek-V3; adds `layers.N.router.bias` [E], float32, to the parameters of `MLADecoder`."""

    def make_router(self, rngs: nnx.Rngs) -> BiasedSigmoidRouter:
        cfg = self.cfg
        return BiasedSigmoidRouter(
            cfg.hidden_size,
            cfg.num_experts,
            cfg.num_experts_per_tok,
            groups=cfg.groups,
            top_groups=cfg.top_groups,
            normalize=cfg.normalizes_router_weights,
            scale=cfg.routed_scaling_factor,
            std=cfg.initializer_range,
            rngs=rngs,
        )
