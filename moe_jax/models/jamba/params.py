"""Weight table of Jamba: experts one by one (hub) or stacked, under `feed_forward`."""

from moe_jax.checkpoint.mapping import Rule
from moe_jax.models.params import BASE_RULES, LAYER, QKV_RULES, expert_rules, gated_mlp_rules, stacked_expert_rules

MAMBA_NAMES = {
    r"in_proj\.weight": "in_proj.weight",
    r"conv1d\.weight": "conv_weight",
    r"conv1d\.bias": "conv_bias",
    r"x_proj\.weight": "x_proj.weight",
    r"dt_proj\.weight": "dt_proj.weight",
    r"dt_proj\.bias": "dt_bias",
    r"dt_layernorm\.weight": "dt_norm.weight",
    r"b_layernorm\.weight": "b_norm.weight",
    r"c_layernorm\.weight": "c_norm.weight",
    "A_log": "A_log",
    "D": "D",
    r"out_proj\.weight": "out.weight",
}

WEIGHT_TABLE = (
    *BASE_RULES,
    *QKV_RULES,
    *(Rule(LAYER + rf"mamba\.{theirs}", rf"layers.\1.attn.{ours}") for theirs, ours in MAMBA_NAMES.items()),
    Rule(LAYER + r"pre_ff_layernorm\.weight", r"layers.\1.post_attention_norm.weight"),
    Rule(LAYER + r"feed_forward\.router\.weight", r"layers.\1.router.gate.weight"),
    Rule(r"model\.final_layernorm\.weight", "norm.weight"),
    *gated_mlp_rules("feed_forward", "mlp"),
    *expert_rules("feed_forward", gate="gate_proj", up="up_proj", down="down_proj"),
    *stacked_expert_rules("feed_forward"),
)
