"""Weight table of Qwen3-MoE: experts one by one (hub) or stacked; dense layers have a plain MLP."""

from moe_jax.models.params import (
    DECODER_RULES,
    DENSE_MLP_RULES,
    QK_NORM_RULES,
    STACKED_EXPERT_RULES,
    expert_rules,
)

WEIGHT_TABLE = (
    *DECODER_RULES,
    *QK_NORM_RULES,
    *DENSE_MLP_RULES,
    *expert_rules("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    *STACKED_EXPERT_RULES,
)
