"""Weight rules that the decoder-only families have in common."""

from moe_jax.checkpoint.mapping import ExpertRule, Ignore, Rule

LAYER = r"model\.layers\.(\d+)\."

BASE_RULES = (
    Rule(r"model\.embed_tokens\.weight", "embed.weight"),
    Rule(LAYER + r"input_layernorm\.weight", r"layers.\1.input_norm.weight"),
    Rule(LAYER + r"self_attn\.o_proj\.weight", r"layers.\1.attn.out.weight"),
    Rule(LAYER + r"post_attention_layernorm\.weight", r"layers.\1.post_attention_norm.weight"),
    Rule(LAYER + r"mlp\.gate\.weight", r"layers.\1.router.gate.weight"),
    Rule(r"model\.norm\.weight", "norm.weight"),
    Rule(r"lm_head\.weight", "lm_head.weight"),
    Ignore(LAYER + r"self_attn\.rotary_emb\.inv_freq", "computed from the config"),
)

QKV_RULES = (
    Rule(LAYER + r"self_attn\.q_proj\.weight", r"layers.\1.attn.qkv.weight", part=(0, 3)),
    Rule(LAYER + r"self_attn\.k_proj\.weight", r"layers.\1.attn.qkv.weight", part=(1, 3)),
    Rule(LAYER + r"self_attn\.v_proj\.weight", r"layers.\1.attn.qkv.weight", part=(2, 3)),
)

# With grouped-query attention.
DECODER_RULES = (*BASE_RULES, *QKV_RULES)

QK_NORM_RULES = (
    Rule(LAYER + r"self_attn\.q_norm\.weight", r"layers.\1.attn.q_norm.weight"),
    Rule(LAYER + r"self_attn\.k_norm\.weight", r"layers.\1.attn.k_norm.weight"),
)


def stacked_expert_rules(block: str) -> tuple[ExpertRule, ...]:
    """Rules for experts as transformers 5 holds them in memory: one tensor a layer, the expert is the first axis."""
    return (
        ExpertRule(LAYER + block + r"\.experts\.gate_up_proj", "gate_up", stacked=True),
        ExpertRule(LAYER + block + r"\.experts\.down_proj", "down", stacked=True),
    )


STACKED_EXPERT_RULES = stacked_expert_rules("mlp")


def gated_mlp_rules(block: str, ours: str) -> tuple[Rule, ...]:
    """Rules for a dense MLP `model.layers.N.<block>.{gate,up,down}_proj.weight` that is `layers.N.<ours>` here."""
    return (
        Rule(LAYER + block + r"\.gate_proj\.weight", rf"layers.\1.{ours}.gate_up.weight", part=(0, 2)),
        Rule(LAYER + block + r"\.up_proj\.weight", rf"layers.\1.{ours}.gate_up.weight", part=(1, 2)),
        Rule(LAYER + block + r"\.down_proj\.weight", rf"layers.\1.{ours}.down.weight"),
    )


DENSE_MLP_RULES = gated_mlp_rules("mlp", "mlp")


def expert_rules(block: str, gate: str, up: str, down: str) -> tuple[ExpertRule, ...]:
    """Rules for experts stored one by one as `model.layers.N.<block>.experts.E.<gate|up|down>.weight`."""

    def pattern(name: str) -> str:
        return LAYER + rf"{block}\.experts\.(\d+)\.{name}\.weight"

    return (
        ExpertRule(pattern(gate), "gate_up", part=(0, 2)),
        ExpertRule(pattern(up), "gate_up", part=(1, 2)),
        ExpertRule(pattern(down), "down"),
    )
