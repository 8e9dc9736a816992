"""Recipes of gpt-oss and DBRX, whose files hold the experts of a layer in one tensor, in layouts of their own."""

from __future__ import annotations

import numpy as np
from tiny_recipes import Recipe, Shapes, Tensors, in_memory_layout, initial_value

# ---------------------------------------------------------------------------------------------- MXFP4

# e2m1: the magnitude of each of the 8 codes; bit 3 is the sign.
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
BLOCK = 32


def mxfp4_quantised(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(blocks [.., in / 32, 16] uint8, scales [.., in / 32] uint8, the values that they stand for) of w [.., in].

    The shared exponent is that of the largest magnitude, less that of 4, the largest power of two in e2m1; larger
    values become 6 (Open Compute Project, "Microscaling Formats", section 6.3). Two codes a byte, the lower first.
    """
    parts = w.reshape(*w.shape[:-1], -1, BLOCK)
    largest = np.abs(parts).max(-1)
    exponent = np.where(largest > 0, np.floor(np.log2(np.maximum(largest, 2.0**-120))) - 2, 0).astype(np.int32)
    scaled = np.ldexp(parts, -exponent[..., None])
    code = np.abs(np.abs(scaled)[..., None] - FP4).argmin(-1).astype(np.uint8)
    values = np.ldexp(np.copysign(FP4[code], scaled), exponent[..., None]).astype(np.float32)
    code |= np.where(np.signbit(scaled), 8, 0).astype(np.uint8)
    blocks = code[..., 0::2] | code[..., 1::2] << 4
    return blocks, (exponent + 127).astype(np.uint8), values.reshape(w.shape)


# ---------------------------------------------------------------------------------------------- gpt-oss


def gpt_oss_parameters(config: dict) -> Shapes:
    """gpt-oss: sinks and biases; experts [E, in, out] with gate and up in alternate columns."""
    width, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, experts, inner = config["head_dim"], config["num_local_experts"], config["intermediate_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], width)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (width,)
        for name, size in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield f"{layer}.self_attn.{name}_proj.weight", (size * head_dim, width)
            yield f"{layer}.self_attn.{name}_proj.bias", (size * head_dim,)
        yield f"{layer}.self_attn.o_proj.weight", (width, heads * head_dim)
        yield f"{layer}.self_attn.o_proj.bias", (width,)
        yield f"{layer}.self_attn.sinks", (heads,)
        yield f"{layer}.post_attention_layernorm.weight", (width,)
        yield f"{layer}.mlp.router.weight", (experts, width)
        yield f"{layer}.mlp.router.bias", (experts,)
        yield f"{layer}.mlp.experts.gate_up_proj", (experts, width, 2 * inner)
        yield f"{layer}.mlp.experts.gate_up_proj_bias", (experts, 2 * inner)
        yield f"{layer}.mlp.experts.down_proj", (experts, inner, width)
        yield f"{layer}.mlp.experts.down_proj_bias", (experts, width)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (config["vocab_size"], width)


def gpt_oss_value(name: str, shape: tuple[int, ...], tied: bool = False) -> np.ndarray:
    """As `initial_value`; gate and up are so large that their clamp at 7 takes part, and down is small to make up."""
    if name.endswith("sinks"):
        return 2.0 * (initial_value(name, shape) - 1.0) / 0.3
    if name.endswith("_proj_bias"):
        return initial_value(f"{name}.bias", shape)
    if len(shape) == 3:
        gain = 5.0 if name.endswith("gate_up_proj") else 0.1
        return initial_value(name, shape) * np.float32(gain / 1.3 * (shape[2] / shape[1]) ** 0.5)
    return initial_value(name, shape, tied)


def _each_expert_tensor(parameters: Tensors, write) -> Tensors:
    tensors = {}
    for name, value in parameters.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            tensors |= write(name, *mxfp4_quantised(value.swapaxes(1, 2)))
        else:
            tensors[name] = value
    return tensors


def mxfp4_layout(parameters: Tensors) -> Tensors:
    """Released gpt-oss: ``gate_up_proj_blocks [E, out, in / 32, 16]`` and ``_scales``; gate and up rows alternate."""
    return _each_expert_tensor(
        parameters, lambda name, blocks, scales, _: {f"{name}_blocks": blocks, f"{name}_scales": scales}
    )


def mxfp4_as_float_layout(parameters: Tensors) -> Tensors:
    """The values of `mxfp4_layout` under the names of an unquantised checkpoint."""
    return _each_expert_tensor(parameters, lambda name, blocks, scales, values: {name: values.swapaxes(1, 2)})


_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "experts_per_token": 3,
    "hidden_act": "silu",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "swiglu_limit": 7.0,
    "max_position_embeddings": 128,
    "initial_context_length": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 1,
}

_MXFP4 = {
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
}

# ---------------------------------------------------------------------------------------------- DBRX


def dbrx_parameters(config: dict) -> Shapes:
    """DBRX: fused Wqkv, layer norms, experts one after another along the rows of w1, v1 and w2."""
    width, heads, attention, ffn = config["d_model"], config["n_heads"], config["attn_config"], config["ffn_config"]
    stacked = (ffn["moe_num_experts"] * ffn["ffn_hidden_size"], width)
    yield "transformer.wte.weight", (config["vocab_size"], width)
    for i in range(config["n_layers"]):
        block = f"transformer.blocks.{i}"
        yield f"{block}.norm_attn_norm.norm_1.weight", (width,)
        yield f"{block}.norm_attn_norm.attn.Wqkv.weight", (width + 2 * attention["kv_n_heads"] * width // heads, width)
        yield f"{block}.norm_attn_norm.attn.out_proj.weight", (width, width)
        yield f"{block}.norm_attn_norm.norm_2.weight", (width,)
        yield f"{block}.ffn.router.layer.weight", (ffn["moe_num_experts"], width)
        for name in ("w1", "v1", "w2"):
            yield f"{block}.ffn.experts.mlp.{name}", stacked
    yield "transformer.norm_f.weight", (width,)
    yield "lm_head.weight", (config["vocab_size"], width)


def dbrx_value(name: str, shape: tuple[int, ...], tied: bool = False) -> np.ndarray:
    """As `initial_value`, for DBRX's names; w2 [E * F, D] is not transposed, so it is scaled by F = 48."""
    if name.endswith("wte.weight"):
        return initial_value(f"{name}.embed_tokens.weight", shape)
    if name.endswith("router.layer.weight"):
        return initial_value(f"{name}.router.weight", shape)
    if name.endswith("w2"):
        return initial_value(name, shape) * np.float32((shape[1] / 48) ** 0.5)
    return initial_value(name, shape)


_DBRX = {
    "architectures": ["DbrxForCausalLM"],
    "model_type": "dbrx",
    "vocab_size": 256,
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 3,
    "max_seq_len": 256,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 500000.0},
    "ffn_config": {
        "ffn_act_fn": {"name": "silu"},
        "ffn_hidden_size": 48,
        "moe_num_experts": 8,
        "moe_top_k": 3,
        "moe_normalize_expert_weights": 1.0,
    },
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 1,
}

RECIPES: dict[str, Recipe] = {
    "gpt_oss": Recipe(
        "sinks, alternating windows, biases, gate and up in alternate columns, clamped SwiGLU, YaRN without rounding",
        _GPT_OSS,
        gpt_oss_parameters,
        in_memory_layout,
        prompt_length=28,
        value=gpt_oss_value,
    ),
    "gpt_oss_mxfp4": Recipe(
        "the same with experts in MXFP4: packed blocks [E, out, in / 32, 16] and their scales",
        _GPT_OSS | _MXFP4,
        gpt_oss_parameters,
        mxfp4_layout,
        prompt_length=28,
        value=gpt_oss_value,
        float_layout=mxfp4_as_float_layout,
    ),
    "dbrx": Recipe(
        "fused Wqkv with clip, layer norm without bias, experts stacked along rows, weights divided by their sum",
        _DBRX,
        dbrx_parameters,
        in_memory_layout,
        value=dbrx_value,
    ),
}
