"""Weight table of gpt-oss: experts stacked, in floating point [E, in, out] or MXFP4 [E, out, in / 32, 16].

Gate and up alternate: columns 2i and 2i + 1 of a floating-point `gate_up_proj`, rows of a packed one, and entries of
its bias. Rows of ours hold all of the gate first.
"""

from host_offload.parts import (
    even,
    even_columns,
    even_scales,
    even_words,
    mxfp4_scales,
    mxfp4_words,
    odd,
    odd_columns,
    odd_scales,
    odd_words,
    transposed,
)
from moe_jax.checkpoint.mapping import ExpertRule, Rule
from moe_jax.models.params import DECODER_RULES, LAYER


def _experts(name: str, tensor: str, *views) -> ExpertRule:
    return ExpertRule(LAYER + rf"mlp\.experts\.{name}", tensor, stacked=True, views=views)


WEIGHT_TABLE = (
    *DECODER_RULES,
    Rule(LAYER + r"self_attn\.q_proj\.bias", r"layers.\1.attn.qkv.bias", part=(0, 3)),
    Rule(LAYER + r"self_attn\.k_proj\.bias", r"layers.\1.attn.qkv.bias", part=(1, 3)),
    Rule(LAYER + r"self_attn\.v_proj\.bias", r"layers.\1.attn.qkv.bias", part=(2, 3)),
    Rule(LAYER + r"self_attn\.o_proj\.bias", r"layers.\1.attn.out.bias"),
    Rule(LAYER + r"self_attn\.sinks", r"layers.\1.attn.sinks"),
    Rule(LAYER + r"mlp\.router\.weight", r"layers.\1.router.gate.weight"),
    Rule(LAYER + r"mlp\.router\.bias", r"layers.\1.router.gate.bias"),
    _experts("gate_up_proj", "gate_up", even_columns, odd_columns),
    _experts("gate_up_proj_blocks", "gate_up", even_words, odd_words),
    _experts("gate_up_proj_scales", "gate_up_scale", even_scales, odd_scales),
    _experts("gate_up_proj_bias", "gate_up_bias", even, odd),
    _experts("down_proj", "down", transposed),
    _experts("down_proj_blocks", "down", mxfp4_words),
    _experts("down_proj_scales", "down_scale", mxfp4_scales),
    _experts("down_proj_bias", "down_bias", None),
)
