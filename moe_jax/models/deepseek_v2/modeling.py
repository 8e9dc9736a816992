"""DeepSeek-V2: MLA and a softmax router within the best groups."""

import jax.numpy as jnp
from flax import nnx

from moe_jax.layers.group_router import GroupMaxRouter
from moe_jax.models.mla import MLADecoder


class DeepseekV2ForCausalLM(MLADecoder):
    """DeepSeek-V2 and V2-Lite. Rotation is computed in float32, as in transformers."""

    rope_dtype = jnp.float32

    def make_router(self, rngs: nnx.Rngs) -> GroupMaxRouter:
        cfg = self.cfg
        return GroupMaxRouter(
            cfg.hidden_size,
            cfg.num_experts,
            cfg.num_experts_per_tok,
            groups=cfg.groups,
            top_groups=cfg.top_groups,
            scale=cfg.routed_scaling_factor,
            std=cfg.initializer_range,
            rngs=rngs,
        )
