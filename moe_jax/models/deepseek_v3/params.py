"""Weight table of DeepSeek-V3: that of MLA and the router's correction bias."""

from moe_jax.checkpoint.mapping import Rule
from moe_jax.models.mla import MLA_RULES
from moe_jax.models.params import LAYER

WEIGHT_TABLE = (*MLA_RULES, Rule(LAYER + r"mlp\.gate\.e_score_correction_bias", r"layers.\1.router.bias"))
