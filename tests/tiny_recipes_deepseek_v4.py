"""Recipes of DeepSeek-V4: all kinds of layers under the names that transformers saves, and in the released format."""

from __future__ import annotations

import re
import zlib
from functools import partial

import ml_dtypes
import numpy as np
from tiny_recipes import Recipe, Shapes, Tensors, initial_value
from tiny_recipes_fused import mxfp4_quantised

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


def _compressor(prefix: str, width: int, channels: int, model: int, rate: int) -> Shapes:
    yield f"{prefix}.position_bias", (rate, channels)
    yield f"{prefix}.kv_proj.weight", (channels, model)
    yield f"{prefix}.gate_proj.weight", (channels, model)
    yield f"{prefix}.kv_norm.weight", (width,)


def _attention(prefix: str, config: dict, rate: int, overlap: bool) -> Shapes:
    width, heads, head_dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    rank, groups, out_rank = config["q_lora_rank"], config["o_groups"], config["o_lora_rank"]
    yield f"{prefix}.sinks", (heads,)
    yield f"{prefix}.q_a_proj.weight", (rank, width)
    yield f"{prefix}.q_a_norm.weight", (rank,)
    yield f"{prefix}.q_b_proj.weight", (heads * head_dim, rank)
    yield f"{prefix}.kv_proj.weight", (head_dim, width)
    yield f"{prefix}.kv_norm.weight", (head_dim,)
    yield f"{prefix}.o_a_proj.weight", (groups * out_rank, heads * head_dim // groups)
    yield f"{prefix}.o_b_proj.weight", (width, groups * out_rank)
    if rate:
        yield from _compressor(f"{prefix}.compressor", head_dim, head_dim * (1 + overlap), width, rate)
    if overlap:
        indexer, index_dim, index_heads = (
            f"{prefix}.compressor.indexer",
            config["index_head_dim"],
            config["index_n_heads"],
        )
        yield from _compressor(indexer, index_dim, 2 * index_dim, width, rate)
        yield f"{indexer}.q_b_proj.weight", (index_heads * index_dim, rank)
        yield f"{indexer}.scorer.weights_proj.weight", (index_heads, width)


def _kinds(config: dict) -> list[tuple[int, bool]]:
    """(tokens an entry or 0, whether windows overlap) of each layer."""
    count = config["num_hidden_layers"]
    if "compress_ratios" in config:
        return [(ratio, ratio == 4) for ratio in config["compress_ratios"][:count]]
    return [(config["compress_rates"].get(kind, 0), kind == SPARSE) for kind in config["layer_types"]]


def _hash_layers(config: dict) -> int:
    if "num_hash_layers" in config:
        return config["num_hash_layers"]
    return config["mlp_layer_types"].count("hash_moe")


def deepseek_v4_parameters(config: dict) -> Shapes:
    """Compressed attention and experts in every layer, each between hyper-connections."""
    width, streams, inner = config["hidden_size"], config["hc_mult"], config["moe_intermediate_size"]
    experts, vocabulary = config["n_routed_experts"], config["vocab_size"]
    mixed = (2 + streams) * streams
    yield "model.embed_tokens.weight", (vocabulary, width)
    for i, (rate, overlap) in enumerate(_kinds(config)):
        layer = f"model.layers.{i}"
        yield from _attention(f"{layer}.self_attn", config, rate, overlap)
        yield f"{layer}.mlp.gate.weight", (experts, width)
        if i < _hash_layers(config):
            yield f"{layer}.mlp.gate.tid2eid", (vocabulary, config["num_experts_per_tok"])
        else:
            yield f"{layer}.mlp.gate.e_score_correction_bias", (experts,)
        yield f"{layer}.mlp.experts.gate_up_proj", (experts, 2 * inner, width)
        yield f"{layer}.mlp.experts.down_proj", (experts, width, inner)
        yield f"{layer}.mlp.shared_experts.gate_proj.weight", (inner, width)
        yield f"{layer}.mlp.shared_experts.up_proj.weight", (inner, width)
        yield f"{layer}.mlp.shared_experts.down_proj.weight", (width, inner)
        yield f"{layer}.input_layernorm.weight", (width,)
        yield f"{layer}.post_attention_layernorm.weight", (width,)
        for block in ("attn_hc", "ffn_hc"):
            yield f"{layer}.{block}.fn", (mixed, streams * width)
            yield f"{layer}.{block}.base", (mixed,)
            yield f"{layer}.{block}.scale", (3,)
    yield "model.hc_head.hc_fn", (streams, streams * width)
    yield "model.hc_head.hc_base", (streams,)
    yield "model.hc_head.hc_scale", (1,)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (vocabulary, width)


def deepseek_v4_value(name: str, shape: tuple[int, ...], tied: bool = False, experts: int = 8) -> np.ndarray:
    """As `initial_value`; hash tables name distinct experts, and what mixes streams differs from token to token."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if name.endswith("tid2eid"):
        return rng.permuted(np.tile(np.arange(experts), (shape[0], 1)), axis=1)[:, : shape[1]]
    normal = rng.standard_normal(shape).astype(np.float32)
    if name.endswith("sinks"):
        return normal
    if name.endswith("position_bias"):
        return 0.7 * normal
    if name.endswith("scale"):
        return 1.0 + 0.2 * normal
    if name.endswith("base"):
        return 0.3 * normal
    return initial_value(name, shape, tied)


# In memory -> in files, applied one after another.
_RELEASED = (
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.sinks$", ".attn_sink"),
    (r"\.compressor\.indexer\.(kv_proj|gate_proj|kv_norm|position_bias)", r".indexer.compressor.\1"),
    (r"\.compressor\.indexer\.(?:scorer\.)?", ".indexer."),
    (r"(compressor)\.kv_norm\.", r"\1.norm."),
    (r"\.position_bias$", ".ape"),
    (r"\.(q|o)_(a|b)_proj\.", r".w\1_\2."),
    (r"\.attn\.(.*)kv_proj\.", r".attn.\1wkv."),
    (r"\.attn\.(.*)gate_proj\.", r".attn.\1wgate."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.e_score_correction_bias$", ".bias"),
    (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
    (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
    (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
)


def released_layout(parameters: Tensors) -> Tensors:
    """Names of the released files: nothing before `layers`, experts one by one as w1 (gate), w3 (up) and w2 (down)."""
    tensors = {}
    for name, value in parameters.items():
        for pattern, new in _RELEASED:
            name = re.sub(pattern, new, name)
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(value, 2, axis=1)
            for e in range(len(value)):
                base = name.removesuffix("gate_up_proj")
                tensors |= {f"{base}{e}.w1.weight": gate[e], f"{base}{e}.w3.weight": up[e]}
        elif name.endswith("experts.down_proj"):
            base = name.removesuffix("down_proj")
            tensors |= {f"{base}{e}.w2.weight": value[e] for e in range(len(value))}
        else:
            tensors[name] = value
    return tensors


def saved_layout(parameters: Tensors) -> Tensors:
    """Names that transformers saves: as released but for a prefix, the embedding, the head of streams and one norm."""
    tensors = {}
    for name, value in released_layout(parameters).items():
        name = name if name.startswith("head.") else f"model.{name}"
        name = name.replace("model.embed.", "model.embed_tokens.").replace("model.hc_head_", "model.hc_head.hc_")
        tensors[name.replace("attn.kv_norm.", "attn.norm.")] = value
    return tensors


BLOCK, FP8_MAX = 128, 448.0
_FP4 = re.compile(r".*\.ffn\.experts\.\d+\.w[123]\.weight")
_FP8 = re.compile(r".*\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b)\.weight|.*\.shared_experts\.w[123]\.weight")
E8M0 = ml_dtypes.float8_e8m0fnu


def fp8_powers(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(e4m3 values, scales, what they stand for) of w [N, K]; each block of 128 x 128 has a power of two as scale."""
    exponent = np.zeros([-(-size // BLOCK) for size in w.shape], np.int32)
    for i, j in np.ndindex(*exponent.shape):
        largest = np.abs(w[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]).max()
        exponent[i, j] = np.ceil(np.log2(largest / FP8_MAX))
    each = np.ldexp(np.float32(1), exponent).repeat(BLOCK, 0)[: w.shape[0]].repeat(BLOCK, 1)[:, : w.shape[1]]
    q = (w / each).astype(ml_dtypes.float8_e4m3fn)
    return q, (exponent + 127).astype(np.uint8).view(E8M0), q.astype(np.float32) * each


def packed_layout(parameters: Tensors) -> Tensors:
    """Released DeepSeek-V4-Flash: experts in FP4, most linear layers in FP8, and a tensor without use."""
    tensors = {"mtp.0.enorm.weight": np.ones(8, np.float32)}
    for name, value in released_layout(parameters).items():
        scale_name = name.removesuffix("weight") + "scale"
        if _FP4.fullmatch(name):
            blocks, scales, _ = mxfp4_quantised(value)
            tensors |= {name: blocks.reshape(len(value), -1).view(np.int8), scale_name: scales.view(E8M0)}
        elif _FP8.fullmatch(name):
            tensors[name], tensors[scale_name], _ = fp8_powers(value)
        else:
            tensors[name] = value
    return tensors


def values_layout(parameters: Tensors) -> Tensors:
    """The values of `packed_layout`, unpacked."""
    tensors = {}
    for name, value in released_layout(parameters).items():
        if _FP4.fullmatch(name):
            value = mxfp4_quantised(value)[2]
        elif _FP8.fullmatch(name):
            value = fp8_powers(value)[2]
        tensors[name] = value
    return tensors


_DEEPSEEK_V4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 256,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 1.0,  # active
    "layer_types": [SLIDING, SLIDING, SPARSE, HEAVY, SPARSE, HEAVY],
    "compress_rates": {SPARSE: 4, HEAVY: 16},
    "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 3,
    "sliding_window": 8,
    # Scores of few heads are often all zero, and ties are decided differently by every framework.
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 3,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "compress": {
            "rope_type": "yarn",
            "rope_theta": 160000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 32,
            "beta_slow": 1,
            "attention_factor": 1.0,
            "partial_rotary_factor": 0.25,
        },
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

# As released: other names for the kinds of layers, one YaRN object, and an entry for the layer after the last.
_NOT_RELEASED = ("layer_types", "compress_rates", "mlp_layer_types", "rope_parameters", "partial_rotary_factor")
_DEEPSEEK_V4_FP4 = {name: value for name, value in _DEEPSEEK_V4.items() if name not in _NOT_RELEASED} | {
    "hidden_size": 160,
    "moe_intermediate_size": 64,
    "n_routed_experts": 6,
    "q_lora_rank": 64,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4, 0],
    "num_hash_layers": 1,
    "index_topk": 8,
    "qk_rope_head_dim": 8,
    "max_position_embeddings": 512,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 32,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    },
}

RECIPES: dict[str, Recipe] = {
    "deepseek_v4": Recipe(
        "windows with overlapping and long compressed entries, an indexer, hash and scored routers, four streams",
        _DEEPSEEK_V4,
        deepseek_v4_parameters,
        saved_layout,
        prompt_length=45,
        value=deepseek_v4_value,
        padding=False,
    ),
    "deepseek_v4_fp4": Recipe(
        "released names and config, FP4 experts, FP8 with powers of two as scales, windows of 128 tokens that end late",
        _DEEPSEEK_V4_FP4,
        deepseek_v4_parameters,
        packed_layout,
        prompt_length=250,
        value=partial(deepseek_v4_value, experts=6),
        float_layout=values_layout,
        padding=False,
        modules=False,
    ),
}
