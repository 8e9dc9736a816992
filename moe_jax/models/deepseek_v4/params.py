"""Weight table of DeepSeek-V4: released names, those that transformers saves, and those it has in memory.

released            saved by transformers            in memory
embed               model.embed_tokens               model.embed_tokens
layers.N.attn.wkv   model.layers.N.attn.wkv          model.layers.N.self_attn.kv_proj
layers.N.ffn...     model.layers.N.ffn...            model.layers.N.mlp...
"""

from moe_jax.checkpoint.mapping import ExpertRule, Ignore, Rule

LAYER = r"(?:model\.)?layers\.(\d+)\."
ATTENTION = LAYER + r"(?:attn|self_attn)\."
# The indexer is beside the compressor in files, and inside of it in memory.
INDEXER = ATTENTION + r"(?:compressor\.)?indexer\."
INDEX_COMPRESSOR = ATTENTION + r"(?:indexer\.compressor|compressor\.indexer)\."
COMPRESSOR = ATTENTION + r"compressor\."
FFN = LAYER + r"(?:ffn|mlp)\."


def _compressor(pattern: str, ours: str) -> tuple[Rule, ...]:
    ours = rf"layers.\1.attn.{ours}"
    return (
        Rule(pattern + r"(?:wkv|kv_proj)\.weight", f"{ours}.kv_gate.weight", part=(0, 2)),
        Rule(pattern + r"(?:wgate|gate_proj)\.weight", f"{ours}.kv_gate.weight", part=(1, 2)),
        Rule(pattern + r"(?:ape|position_bias)", f"{ours}.position_bias"),
        Rule(pattern + r"(?:norm|kv_norm)\.weight", f"{ours}.norm.weight"),
    )


def _streams(name: str, ours: str) -> tuple[Rule, ...]:
    return tuple(
        Rule(LAYER + rf"(?:hc_{name}_|{name}_hc\.){part}", rf"layers.\1.{ours}.{part}")
        for part in ("fn", "base", "scale")
    )


WEIGHT_TABLE = (
    Rule(r"embed\.weight|model\.embed_tokens\.weight", "embed.weight"),
    Rule(r"(?:lm_)?head\.weight", "lm_head.weight"),
    Rule(r"(?:model\.)?norm\.weight", "norm.weight"),
    *(Rule(rf"(?:hc_head_|model\.hc_head\.hc_){part}", f"streams_head.{part}") for part in ("fn", "base", "scale")),
    Rule(LAYER + r"(?:attn_norm|input_layernorm)\.weight", r"layers.\1.input_norm.weight"),
    Rule(LAYER + r"(?:ffn_norm|post_attention_layernorm)\.weight", r"layers.\1.post_attention_norm.weight"),
    *_streams("attn", "attn_streams"),
    *_streams("ffn", "mlp_streams"),
    Rule(ATTENTION + r"(?:wq_a|q_a_proj)\.weight", r"layers.\1.attn.qkv.weight", part=(0, 2)),
    Rule(ATTENTION + r"(?:wkv|kv_proj)\.weight", r"layers.\1.attn.qkv.weight", part=(1, 2)),
    Rule(ATTENTION + r"(?:q_norm|q_a_norm)\.weight", r"layers.\1.attn.q_norm.weight"),
    # "norm" is a slip of transformers' renaming when it saves.
    Rule(ATTENTION + r"(?:kv_norm|norm)\.weight", r"layers.\1.attn.kv_norm.weight"),
    Rule(ATTENTION + r"(?:wq_b|q_b_proj)\.weight", r"layers.\1.attn.q_up.weight"),
    Rule(ATTENTION + r"(?:attn_sink|sinks)", r"layers.\1.attn.sinks"),
    Rule(ATTENTION + r"(?:wo_a|o_a_proj)\.weight", r"layers.\1.attn.out_down.weight"),
    Rule(ATTENTION + r"(?:wo_b|o_b_proj)\.weight", r"layers.\1.attn.out.weight"),
    *_compressor(COMPRESSOR, "compressor"),
    *_compressor(INDEX_COMPRESSOR, "indexer.compressor"),
    Rule(INDEXER + r"(?:wq_b|q_b_proj)\.weight", r"layers.\1.attn.indexer.q_up.weight"),
    Rule(INDEXER + r"(?:scorer\.)?weights_proj\.weight", r"layers.\1.attn.indexer.weights.weight"),
    Rule(FFN + r"gate\.weight", r"layers.\1.router.gate.weight"),
    Rule(FFN + r"gate\.(?:bias|e_score_correction_bias)", r"layers.\1.router.bias"),
    Rule(FFN + r"gate\.tid2eid", r"layers.\1.router.table"),
    Rule(FFN + r"shared_experts\.(?:w1|gate_proj)\.weight", r"layers.\1.shared.gate_up.weight", part=(0, 2)),
    Rule(FFN + r"shared_experts\.(?:w3|up_proj)\.weight", r"layers.\1.shared.gate_up.weight", part=(1, 2)),
    Rule(FFN + r"shared_experts\.(?:w2|down_proj)\.weight", r"layers.\1.shared.down.weight"),
    ExpertRule(FFN + r"experts\.(\d+)\.w1\.weight", "gate_up", part=(0, 2)),
    ExpertRule(FFN + r"experts\.(\d+)\.w3\.weight", "gate_up", part=(1, 2)),
    ExpertRule(FFN + r"experts\.(\d+)\.w2\.weight", "down"),
    ExpertRule(FFN + r"experts\.gate_up_proj", "gate_up", stacked=True),
    ExpertRule(FFN + r"experts\.down_proj", "down", stacked=True),
    Ignore(r"(?:model\.)?mtp\..*", "predicts further tokens"),
)
