"""Weight table of OLMoE: experts one by one (hub) or stacked."""

from moe_jax.models.params import DECODER_RULES, QK_NORM_RULES, STACKED_EXPERT_RULES, expert_rules

WEIGHT_TABLE = (
    *DECODER_RULES,
    *QK_NORM_RULES,
    *expert_rules("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    *STACKED_EXPERT_RULES,
)
