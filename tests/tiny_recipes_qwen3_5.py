"""Recipes of Qwen3.5-MoE: the text model alone, and inside checkpoints with a vision tower and a predictor."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from tiny_recipes import Recipe, Shapes, Tensors, dense_mlp, glu_experts, initial_value, per_expert_layout


def _gated_attention(prefix: str, config: dict) -> Shapes:
    width, head_dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    yield f"{prefix}.q_proj.weight", (2 * heads * head_dim, width)  # a gate after each head
    yield f"{prefix}.k_proj.weight", (kv_heads * head_dim, width)
    yield f"{prefix}.v_proj.weight", (kv_heads * head_dim, width)
    yield f"{prefix}.o_proj.weight", (width, heads * head_dim)
    yield f"{prefix}.q_norm.weight", (head_dim,)
    yield f"{prefix}.k_norm.weight", (head_dim,)


def _delta_net(prefix: str, config: dict) -> Shapes:
    width, heads, value_dim = config["hidden_size"], config["linear_num_value_heads"], config["linear_value_head_dim"]
    values = heads * value_dim
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    yield f"{prefix}.dt_bias", (heads,)
    yield f"{prefix}.A_log", (heads,)
    yield f"{prefix}.conv1d.weight", (channels, 1, config["linear_conv_kernel_dim"])
    yield f"{prefix}.norm.weight", (value_dim,)
    yield f"{prefix}.out_proj.weight", (width, values)
    yield f"{prefix}.in_proj_qkv.weight", (channels, width)
    yield f"{prefix}.in_proj_z.weight", (values, width)
    yield f"{prefix}.in_proj_b.weight", (heads, width)
    yield f"{prefix}.in_proj_a.weight", (heads, width)


def text_parameters(config: dict) -> Shapes:
    """Three layers of four are Gated DeltaNet, each fourth attends; experts and a gated shared expert in all."""
    config = config.get("text_config", config)
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    shared = {"hidden_size": width, "intermediate_size": config["shared_expert_intermediate_size"]}
    yield "model.embed_tokens.weight", (vocabulary, width)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (width,)
        linear = (i + 1) % config["full_attention_interval"]
        yield from (
            _delta_net(f"{layer}.linear_attn", config) if linear else _gated_attention(f"{layer}.self_attn", config)
        )
        yield f"{layer}.post_attention_layernorm.weight", (width,)
        yield from glu_experts(f"{layer}.mlp", config, config["num_experts"], config["moe_intermediate_size"])
        yield from dense_mlp(f"{layer}.mlp.shared_expert", shared)
        yield f"{layer}.mlp.shared_expert_gate.weight", (1, width)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (vocabulary, width)


def qwen3_5_value(name: str, shape: tuple[int, ...], tied: bool = False) -> np.ndarray:
    """As `initial_value`; weights of all norms but that of Gated DeltaNet are what is added to one."""
    value = initial_value(name, shape, tied)
    if name.endswith(
        "A_log"
    ):  # slow decays: an output of one token alone may be near zero, and its norm blows up noise
        return np.log(0.05 + 0.95 / (1 + np.exp(-(value - 1.0) / 0.15))).astype(np.float32)
    if name.endswith("dt_bias"):
        return 0.5 * (value - 1.0) / np.float32(0.15) - np.float32(0.5)
    if len(shape) == 1 and not name.endswith("linear_attn.norm.weight"):
        return value - np.float32(1.0)
    return value


def _beside_vision(parameters: Tensors) -> Tensors:
    """Names of the language model in a checkpoint with vision, and tensors that it does not use."""
    tensors = {
        (name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name): value
        for name, value in parameters.items()
    }
    unused = {
        "model.visual.patch_embed.proj.weight": (32, 3, 2, 4, 4),
        "model.visual.blocks.0.attn.qkv.weight": (96, 32),
        "model.visual.merger.norm.weight": (32,),
        "mtp.fc.weight": (64, 128),
        "mtp.layers.0.mlp.experts.0.gate_proj.weight": (32, 64),
        "mtp.layers.0.self_attn.q_proj.weight": (256, 64),
    }
    return tensors | {name: initial_value(name, shape) for name, shape in unused.items()}


def vision_layout(parameters: Tensors) -> Tensors:
    """``model.language_model.layers.N.mlp.experts.<e>.*``, vision tower and predictor."""
    return _beside_vision(per_expert_layout(parameters))


_TEXT = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}

_ALONE = _TEXT | {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}

_WITH_VISION = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": _TEXT
    | {
        "model_type": "qwen3_5_moe_text",
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
    "vision_config": {
        "model_type": "qwen3_5_moe_vision",
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
    },
    "image_token_id": 255,
    "video_token_id": 254,
    "vision_start_token_id": 253,
    "vision_end_token_id": 252,
    "tie_word_embeddings": False,
}

RECIPES: dict[str, Recipe] = {
    "qwen3_5_moe": Recipe(
        "Gated DeltaNet over more than a chunk of 64, gated attention, partial rotary, norms around one, shared expert",
        _ALONE,
        text_parameters,
        per_expert_layout,
        prompt_length=70,
        value=qwen3_5_value,
    ),
    "qwen3_5_moe_vl": Recipe(
        "the same model inside a checkpoint with vision, one tensor an expert, nested config",
        _WITH_VISION,
        text_parameters,
        vision_layout,
        prompt_length=30,
        value=qwen3_5_value,
    ),
    "qwen3_5_moe_released": Recipe(
        "as the BF16 release: stacked experts, bf16 file; the expected outputs are fp32 compute on the bf16 weights",
        _WITH_VISION,
        text_parameters,
        _beside_vision,
        prompt_length=30,
        dtype=ml_dtypes.bfloat16,
        value=qwen3_5_value,
    ),
}
