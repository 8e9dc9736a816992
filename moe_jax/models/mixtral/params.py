"""Weight table of Mixtral: the hub layout (`block_sparse_moe`, w1 = gate, w3 = up, w2 = down) and the stacked one."""

from moe_jax.checkpoint.mapping import Rule
from moe_jax.models.params import DECODER_RULES, LAYER, STACKED_EXPERT_RULES, expert_rules

WEIGHT_TABLE = (
    *DECODER_RULES,
    Rule(LAYER + r"block_sparse_moe\.gate\.weight", r"layers.\1.router.gate.weight"),
    *expert_rules("block_sparse_moe", gate="w1", up="w3", down="w2"),
    *STACKED_EXPERT_RULES,
)
