"""Recipes of quantised checkpoints: FP8 in blocks, GPTQ, AWQ and compressed-tensors, of families that tests have plain.

The oracle loads the float model with the values that the packed tensors stand for: transformers needs further packages
for INT4, and its FP8 reader takes partial blocks wrongly.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import ml_dtypes
import numpy as np
import tiny_recipes
from tiny_recipes import Recipe, Tensors, decoder_parameters, deepseek_parameters, mixtral_layout, per_expert_layout

BLOCK, GROUP = 128, 32
FP8_MAX = 448.0
# Nibble i of an AWQ word holds column 8 c + AWQ_ORDER[i].
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Quantised = tuple[Tensors, np.ndarray]  # the file tensors by suffix of the module's name, and the values

# ---------------------------------------------------------------------------------------------- one matrix [N, K]


def fp8(w: np.ndarray, scale_dtype: type) -> Quantised:
    """e4m3 values with a scale for each block of 128 x 128, the last of a row or column maybe partial."""
    grid = [-(-size // BLOCK) for size in w.shape]
    scale = np.zeros(grid, np.float32)
    for i, j in np.ndindex(*grid):
        block = w[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
        scale[i, j] = np.abs(block).max() / FP8_MAX
    scale = scale.astype(scale_dtype)
    each = scale.astype(np.float32).repeat(BLOCK, 0)[: w.shape[0]].repeat(BLOCK, 1)[:, : w.shape[1]]
    q = np.clip(w / each, -FP8_MAX, FP8_MAX).astype(ml_dtypes.float8_e4m3fn)
    return {".weight": q, ".weight_scale_inv": scale}, q.astype(np.float32) * each


def int4(w: np.ndarray, symmetric: bool, scale_dtype: type = np.float16):
    """(q [N, K] uint8, scale [N, K / 32], zero [N, K / 32] uint8, values (q - zero) * scale)."""
    groups = w.reshape(len(w), -1, GROUP)
    if symmetric:
        scale = (np.abs(groups).max(-1) / 7).astype(scale_dtype)
        zero = np.full(scale.shape, 8, np.uint8)
    else:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scale = ((high - low) / 15).astype(scale_dtype)
        zero = np.clip(np.round(-low / scale.astype(np.float32)), 0, 15).astype(np.uint8)
    step = scale.astype(np.float32)[..., None]
    q = np.clip(np.round(groups / step) + zero[..., None], 0, 15).astype(np.uint8)
    values = (q.astype(np.float32) - zero[..., None]) * step
    return q.reshape(w.shape), scale, zero, values.reshape(w.shape)


def words(nibbles: np.ndarray, axis: int) -> np.ndarray:
    """int32 words of eight neighbours along `axis`, the first in the lowest bits."""
    parts = np.moveaxis(nibbles, axis, -1).astype(np.uint32)
    parts = parts.reshape(*parts.shape[:-1], -1, 8)
    packed = sum(parts[..., i] << np.uint32(4 * i) for i in range(8)).view(np.int32)
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis))


def gptq(w: np.ndarray, symmetric: bool, act_order: bool) -> Quantised:
    """GPTQ v1: zero points less one; with `act_order` groups are of columns far apart."""
    K = w.shape[1]
    order = np.random.default_rng(K).permutation(K) if act_order else np.arange(K)
    q, scale, zero, values = int4(w[:, order], symmetric)
    back = np.argsort(order)
    tensors = {
        ".qweight": words(q[:, back].T, 0),
        ".qzeros": words((zero.T - 1) & 15, 1),
        ".scales": scale.T,
        ".g_idx": (back // GROUP).astype(np.int32),
    }
    return tensors, values[:, back]


def awq(w: np.ndarray) -> Quantised:
    """AWQ "gemm": outputs packed in an order of their own."""
    q, scale, zero, values = int4(w, symmetric=False)

    def mixed(nibbles):
        return nibbles.reshape(len(nibbles), -1, 8)[:, :, AWQ_ORDER].reshape(nibbles.shape)

    return {".qweight": words(mixed(q.T), 1), ".qzeros": words(mixed(zero.T), 1), ".scales": scale.T}, values


def compressed(w: np.ndarray) -> Quantised:
    """compressed-tensors "pack-quantized", symmetric."""
    q, scale, _, values = int4(w, symmetric=True, scale_dtype=ml_dtypes.bfloat16)
    shape = np.array(w.shape, np.int64)
    return {".weight_packed": words(q, 1), ".weight_scale": scale, ".weight_shape": shape}, values


# ---------------------------------------------------------------------------------------------- layouts of files

_LINEAR = re.compile(r".*(_proj|_proj_with_mqa|\.w[123])\.weight")


def packed_layout(parameters: Tensors, plain: Callable, quantise: Callable, extra: Callable | None = None) -> Tensors:
    """The layout `plain` with every linear layer quantised, and `extra` tensors that are not part of the model."""
    tensors = {}
    for name, value in plain(parameters).items():
        if _LINEAR.fullmatch(name):
            module = name.removesuffix(".weight")
            tensors |= {module + suffix: part for suffix, part in quantise(value)[0].items()}
        else:
            tensors[name] = value
    return tensors | (extra() if extra else {})


def values_layout(parameters: Tensors, plain: Callable, quantise: Callable) -> Tensors:
    """The layout `plain` with the values that `packed_layout` stands for."""
    return {name: quantise(value)[1] if _LINEAR.fullmatch(name) else value for name, value in plain(parameters).items()}


def further_layer() -> Tensors:
    """Tensors of DeepSeek-V3's layer that predicts a second token, number 3, partly FP8."""
    values = np.random.default_rng(3).standard_normal((160, 320)).astype(np.float32)
    tensors, _ = fp8(values, np.float32)
    layer = "model.layers.3"
    return {f"{layer}.eh_proj{suffix}": part for suffix, part in tensors.items()} | {
        f"{layer}.enorm.weight": np.ones(160, np.float32),
        f"{layer}.embed_tokens.weight": values[:, :160],
    }


# ---------------------------------------------------------------------------------------------- recipes

_DEEPSEEK_V3 = tiny_recipes.RECIPES["deepseek_v3"].config | {
    "hidden_size": 160,
    "intermediate_size": 192,
    "qk_nope_head_dim": 32,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "q_lora_rank": 48,
}
_QWEN3_MOE = tiny_recipes.RECIPES["qwen3_moe"].config | {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_MIXTRAL = tiny_recipes.RECIPES["mixtral"].config | {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_local_experts": 4,
}
_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
_GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP,
    "checkpoint_format": "gptq",
    "damp_percent": 0.1,
    "true_sequential": True,
}
_AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": GROUP,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["gate"],
}
_COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": GROUP,
            },
        }
    },
    "ignore": ["lm_head", "re:.*mlp.gate$"],
}


def _recipe(about, config, parameters, plain, quantise, quantization, extra=None, **fields) -> Recipe:
    return Recipe(
        about,
        config | {"quantization_config": quantization},
        parameters,
        partial(packed_layout, plain=plain, quantise=quantise, extra=extra),
        float_layout=partial(values_layout, plain=plain, quantise=quantise),
        **fields,
    )


def _mixtral(about, quantise, quantization) -> Recipe:
    return _recipe(about, _MIXTRAL, decoder_parameters, mixtral_layout, quantise, quantization)


def _qwen3_moe(about, quantise, quantization) -> Recipe:
    return _recipe(about, _QWEN3_MOE, decoder_parameters, per_expert_layout, quantise, quantization)


RECIPES: dict[str, Recipe] = {
    "deepseek_v3_fp8": _recipe(
        "FP8 with float32 scales of 128 x 128 blocks, partial ones in both directions, and a further layer to ignore",
        _DEEPSEEK_V3,
        deepseek_parameters,
        per_expert_layout,
        partial(fp8, scale_dtype=np.float32),
        _FP8,
        further_layer,
        prompt_length=40,
    ),
    "qwen3_moe_fp8": _qwen3_moe(
        "FP8 with bfloat16 scales, router and head in floating point",
        partial(fp8, scale_dtype=ml_dtypes.bfloat16),
        _FP8 | {"modules_to_not_convert": ["lm_head"]},
    ),
    "mixtral_gptq": _mixtral(
        "GPTQ, symmetric: all zero points are 8",
        partial(gptq, symmetric=True, act_order=False),
        _GPTQ | {"sym": True, "desc_act": False},
    ),
    "mixtral_awq": _mixtral("AWQ with zero points, w1/w2/w3", awq, _AWQ),
    "qwen3_moe_gptq": _qwen3_moe(
        "GPTQ with zero points, stored less one",
        partial(gptq, symmetric=False, act_order=False),
        _GPTQ | {"sym": False, "desc_act": False},
    ),
    "qwen3_moe_gptq_actorder": _qwen3_moe(
        "GPTQ with act-order: a group's columns lie anywhere",
        partial(gptq, symmetric=True, act_order=True),
        _GPTQ | {"sym": True, "desc_act": True},
    ),
    "qwen3_moe_awq": _qwen3_moe("AWQ with zero points", awq, _AWQ),
    "qwen3_moe_ct": _qwen3_moe("compressed-tensors W4A16, symmetric, bfloat16 scales", compressed, _COMPRESSED),
}
