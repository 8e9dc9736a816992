"""Weight table of Qwen3-MoE: experts one by one (hub) or stacked; dense layers have a plain MLP."""

from moe_jax.checkpoint.mapping import Rule
from moe_jax.models.params import DECODER_RULES, LAYER, QK_NORM_RULES, STACKED_EXPERT_RULES, expert_rules

WEIGHT_TABLE = (
    *DECODER_RULES,
    *QK_NORM_RULES,
    Rule(LAYER + r"mlp\.gate_proj\.weight", r"layers.\1.mlp.gate_up.weight", part=(0, 2)),
    Rule(LAYER + r"mlp\.up_proj\.weight", r"layers.\1.mlp.gate_up.weight", part=(1, 2)),
    Rule(LAYER + r"mlp\.down_proj\.weight", r"layers.\1.mlp.down.weight"),
    *expert_rules("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    *STACKED_EXPERT_RULES,
)
