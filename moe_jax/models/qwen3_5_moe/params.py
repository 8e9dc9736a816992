"""Weight table of Qwen3.5-MoE: experts one by one or stacked, alone or inside a checkpoint with vision."""

from dataclasses import replace

from moe_jax.checkpoint.mapping import Ignore, Rule
from moe_jax.models.params import (
    DECODER_RULES,
    LAYER,
    QK_NORM_RULES,
    STACKED_EXPERT_RULES,
    expert_rules,
    gated_mlp_rules,
)

# Our in_proj: what is convolved, the output gate, beta's and the decay's logits.
IN_PROJ = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

DELTA_NET_NAMES = {
    r"conv1d\.weight": "conv_weight",
    "A_log": "A_log",
    "dt_bias": "dt_bias",
    r"norm\.weight": "norm.weight",
    r"out_proj\.weight": "out.weight",
}

TEXT_TABLE = (
    *DECODER_RULES,
    *QK_NORM_RULES,
    *(
        Rule(LAYER + rf"linear_attn\.{name}\.weight", r"layers.\1.attn.in_proj.weight", part=(i, len(IN_PROJ)))
        for i, name in enumerate(IN_PROJ)
    ),
    *(Rule(LAYER + rf"linear_attn\.{theirs}", rf"layers.\1.attn.{ours}") for theirs, ours in DELTA_NET_NAMES.items()),
    *gated_mlp_rules(r"mlp\.shared_expert", "shared"),
    Rule(LAYER + r"mlp\.shared_expert_gate\.weight", r"layers.\1.shared.gate.weight"),
    *expert_rules("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    *STACKED_EXPERT_RULES,
)

_TEXT, _IN_VISION = r"model\.", r"model\.(?:language_model\.)?"


def _also_in_vision(rule):
    """The rule for names that may have the prefix of the language model in a checkpoint with vision."""
    pattern = rule.pattern
    return replace(rule, pattern=_IN_VISION + pattern[len(_TEXT) :]) if pattern.startswith(_TEXT) else rule


WEIGHT_TABLE = (
    *map(_also_in_vision, TEXT_TABLE),
    Ignore(r"model\.visual\..*", "sees images; this is the language model"),
    Ignore(r"mtp\..*", "predicts further tokens"),
)
