"""Weight table of DBRX: the rows of all experts of a layer follow each other in w1 (gate), v1 (up) and w2 (down).

w2 is [E * F, D], so one expert's share is the transpose of our `down` [D, F].
"""

from host_offload.parts import transposed
from moe_jax.checkpoint.mapping import ExpertRule, Rule

_BLOCK = r"transformer\.blocks\.(\d+)\."
_EXPERTS = _BLOCK + r"ffn\.experts\.mlp\."

WEIGHT_TABLE = (
    Rule(r"transformer\.wte\.weight", "embed.weight"),
    Rule(_BLOCK + r"norm_attn_norm\.norm_1\.weight", r"layers.\1.input_norm.weight"),
    Rule(_BLOCK + r"norm_attn_norm\.attn\.Wqkv\.weight", r"layers.\1.attn.qkv.weight"),
    Rule(_BLOCK + r"norm_attn_norm\.attn\.out_proj\.weight", r"layers.\1.attn.out.weight"),
    Rule(_BLOCK + r"norm_attn_norm\.norm_2\.weight", r"layers.\1.post_attention_norm.weight"),
    Rule(_BLOCK + r"ffn\.router\.layer\.weight", r"layers.\1.router.gate.weight"),
    Rule(r"transformer\.norm_f\.weight", "norm.weight"),
    Rule(r"lm_head\.weight", "lm_head.weight"),
    ExpertRule(_EXPERTS + "w1", "gate_up", part=(0, 2), stacked="rows"),
    ExpertRule(_EXPERTS + "v1", "gate_up", part=(1, 2), stacked="rows"),
    ExpertRule(_EXPERTS + "w2", "down", stacked="rows", views=(transposed,)),
)
