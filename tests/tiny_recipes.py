"""Recipes of the tiny checkpoints: which configuration, which parameters, which values, under which names in the file.

NumPy only. ``tests/tiny_models.py`` writes the files and holds the oracle. A further family is one entry of RECIPES,
with a parameter list and, where its files name tensors otherwise, a layout.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

Tensors = dict[str, np.ndarray]
Shapes = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Recipe:
    """One tiny checkpoint.

    Attributes:
        about: what the recipe exercises, one line.
        config: content of config.json, in the spelling that the family's released checkpoints use.
        parameters: yields (name, shape) of every parameter as transformers holds it in memory (experts stacked).
        layout: turns those parameters into the tensors of the file.
        prompt_length: T of the expected outputs.
        dtype: dtype of the tensors in the file.
        shard_bytes: start a new file before this many bytes; None writes a single file without an index.
        value: the value of a parameter by name and shape, and whether the head is tied; None: `initial_value`.
        float_layout: for packed formats, the same weights as floating-point tensors: what the oracle loads, without the
            config's `quantization_config`.
        reference: computes the expected outputs, (recipe, directory) -> arrays; None: as a decoder-only model.
        padding: the oracle's model knows padding; without it the rows of the batch run one by one.
        modules: record what every module returns, beside the logits.
    """

    about: str
    config: dict
    parameters: Callable[[dict], Shapes]
    layout: Callable[[Tensors], Tensors]
    prompt_length: int = 24
    dtype: type = np.float32
    shard_bytes: int | None = None
    value: Callable[..., np.ndarray] | None = None
    float_layout: Callable[[Tensors], Tensors] | None = None
    reference: Callable[..., Tensors] | None = None
    padding: bool = True
    modules: bool = True

    @property
    def text_config(self) -> dict:
        """The settings of the language model: those that config.json nests in a checkpoint with vision, else all."""
        return self.config.get("text_config", self.config)


# ---------------------------------------------------------------------------------------------- random weights


def initial_value(name: str, shape: tuple[int, ...], tied: bool = False) -> np.ndarray:
    """Random fp32 value of a parameter, from a generator seeded by the parameter's name alone.

    The scales keep activations near 1 through every block and make the logits spread by about 2.5, so that each tensor
    moves the output and greedy choices are clear. Norm weights scatter around 1 so that a forgotten norm shows.
    A tied embedding takes the value of the head: at the embedding's own scale the logits would be four times larger.
    """
    if tied and name.endswith("embed_tokens.weight"):
        name = "lm_head.weight"
    normal = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    if name.endswith("e_score_correction_bias"):
        return 0.15 * normal  # as far apart as neighbouring scores: the choice differs with and without it
    if name.endswith("mamba.A_log"):
        return np.log(np.arange(1, shape[1] + 1, dtype=np.float32)) + 0.1 * normal
    if name.endswith("mamba.D"):
        return 1.0 + 0.3 * normal
    if name.endswith(".bias"):
        return 0.2 * normal - (1.5 if "dt_proj" in name else 0.0)  # small steps: the state must reach back
    if len(shape) == 1:
        return 1.0 + 0.15 * normal  # a norm weight
    if name.endswith("embed_tokens.weight"):
        return normal
    if name.endswith("lm_head.weight"):
        gain = 2.5
    elif "conv1d" in name:
        return 0.5 * normal
    elif name.endswith((".gate.weight", ".router.weight")):
        gain = 1.5  # router: spread the probabilities
    else:
        gain = 1.3  # projections, [out, in] or stacked [E, out, in]
    return normal * (gain * shape[-1] ** -0.5)


# ---------------------------------------------------------------------------------------------- parameter lists


def _attention(prefix: str, config: dict) -> Shapes:
    width, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or width // heads
    yield f"{prefix}.q_proj.weight", (heads * head_dim, width)
    yield f"{prefix}.k_proj.weight", (kv_heads * head_dim, width)
    yield f"{prefix}.v_proj.weight", (kv_heads * head_dim, width)
    yield f"{prefix}.o_proj.weight", (width, heads * head_dim)
    if config["model_type"] == "qwen3_moe":  # one norm over each head
        yield f"{prefix}.q_norm.weight", (head_dim,)
        yield f"{prefix}.k_norm.weight", (head_dim,)
    if config["model_type"] == "olmoe":  # one norm over the whole projection
        yield f"{prefix}.q_norm.weight", (heads * head_dim,)
        yield f"{prefix}.k_norm.weight", (kv_heads * head_dim,)


def glu_experts(prefix: str, config: dict, experts: int, expert_width: int) -> Shapes:
    width = config["hidden_size"]
    yield f"{prefix}.gate.weight", (experts, width)
    yield f"{prefix}.experts.gate_up_proj", (experts, 2 * expert_width, width)
    yield f"{prefix}.experts.down_proj", (experts, width, expert_width)


def dense_mlp(prefix: str, config: dict) -> Shapes:
    width, inner = config["hidden_size"], config["intermediate_size"]
    yield f"{prefix}.gate_proj.weight", (inner, width)
    yield f"{prefix}.up_proj.weight", (inner, width)
    yield f"{prefix}.down_proj.weight", (width, inner)


def decoder_parameters(config: dict) -> Shapes:
    """Parameters of the Mixtral, Qwen3-MoE and OLMoE decoders: pre-norm attention and a gated MLP or MoE a layer."""
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    experts = config.get("num_experts") or config["num_local_experts"]
    expert_width = config.get("moe_intermediate_size") or config["intermediate_size"]
    yield "model.embed_tokens.weight", (vocabulary, width)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (width,)
        yield from _attention(f"{layer}.self_attn", config)
        yield f"{layer}.post_attention_layernorm.weight", (width,)
        sparse = i not in config.get("mlp_only_layers", ()) and (i + 1) % config.get("decoder_sparse_step", 1) == 0
        yield from (
            glu_experts(f"{layer}.mlp", config, experts, expert_width) if sparse else dense_mlp(f"{layer}.mlp", config)
        )
    yield "model.norm.weight", (width,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocabulary, width)


def _latent_attention(prefix: str, config: dict) -> Shapes:
    width, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, v = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    if config["q_lora_rank"] is None:
        yield f"{prefix}.q_proj.weight", (heads * (nope + rope), width)
    else:
        yield f"{prefix}.q_a_proj.weight", (config["q_lora_rank"], width)
        yield f"{prefix}.q_a_layernorm.weight", (config["q_lora_rank"],)
        yield f"{prefix}.q_b_proj.weight", (heads * (nope + rope), config["q_lora_rank"])
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (rank + rope, width)
    yield f"{prefix}.kv_a_layernorm.weight", (rank,)
    yield f"{prefix}.kv_b_proj.weight", (heads * (nope + v), rank)
    yield f"{prefix}.o_proj.weight", (width, heads * v)


def deepseek_parameters(config: dict) -> Shapes:
    """Parameters of DeepSeek-V2 and V3: latent attention, dense layers first, then routed and shared experts."""
    width, vocabulary, expert_width = config["hidden_size"], config["vocab_size"], config["moe_intermediate_size"]
    yield "model.embed_tokens.weight", (vocabulary, width)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (width,)
        yield from _latent_attention(f"{layer}.self_attn", config)
        yield f"{layer}.post_attention_layernorm.weight", (width,)
        if i < config["first_k_dense_replace"]:
            yield from dense_mlp(f"{layer}.mlp", config)
            continue
        yield from glu_experts(f"{layer}.mlp", config, config["n_routed_experts"], expert_width)
        if config["model_type"] == "deepseek_v3":
            yield f"{layer}.mlp.gate.e_score_correction_bias", (config["n_routed_experts"],)
        shared = {"hidden_size": width, "intermediate_size": expert_width * config["n_shared_experts"]}
        yield from dense_mlp(f"{layer}.mlp.shared_experts", shared)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (vocabulary, width)


def _mamba(prefix: str, config: dict) -> Shapes:
    width, states, taps = config["hidden_size"], config["mamba_d_state"], config["mamba_d_conv"]
    inner, rank = config["mamba_expand"] * width, config["mamba_dt_rank"]
    yield f"{prefix}.A_log", (inner, states)
    yield f"{prefix}.D", (inner,)
    yield f"{prefix}.conv1d.weight", (inner, 1, taps)
    yield f"{prefix}.conv1d.bias", (inner,)
    yield f"{prefix}.in_proj.weight", (2 * inner, width)
    yield f"{prefix}.x_proj.weight", (rank + 2 * states, inner)
    yield f"{prefix}.dt_proj.weight", (inner, rank)
    yield f"{prefix}.dt_proj.bias", (inner,)
    yield f"{prefix}.out_proj.weight", (width, inner)
    yield f"{prefix}.dt_layernorm.weight", (rank,)
    yield f"{prefix}.b_layernorm.weight", (states,)
    yield f"{prefix}.c_layernorm.weight", (states,)


def jamba_parameters(config: dict) -> Shapes:
    """Parameters of Jamba: Mamba or attention, then a gated MLP or experts, under Jamba's own names."""
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocabulary, width)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (width,)
        attention = i % config["attn_layer_period"] == config["attn_layer_offset"]
        yield from _attention(f"{layer}.self_attn", config) if attention else _mamba(f"{layer}.mamba", config)
        yield f"{layer}.pre_ff_layernorm.weight", (width,)
        if i % config["expert_layer_period"] == config["expert_layer_offset"]:
            yield f"{layer}.feed_forward.router.weight", (config["num_experts"], width)
            inner = config["intermediate_size"]
            yield f"{layer}.feed_forward.experts.gate_up_proj", (config["num_experts"], 2 * inner, width)
            yield f"{layer}.feed_forward.experts.down_proj", (config["num_experts"], width, inner)
        else:
            yield from dense_mlp(f"{layer}.feed_forward", config)
    yield "model.final_layernorm.weight", (width,)
    yield "lm_head.weight", (vocabulary, width)


# ---------------------------------------------------------------------------------------------- file layouts


def in_memory_layout(parameters: Tensors) -> Tensors:
    """The names of transformers 5 in memory: experts stacked, ``mlp.experts.gate_up_proj [E, 2F, D]``."""
    return dict(parameters)


def _expert_layout(parameters: Tensors, gate: str, up: str, down: str, rename: Callable[[str], str]) -> Tensors:
    tensors = {}
    for name, value in parameters.items():
        block, _, leaf = name.rpartition(".experts.")
        if leaf == "gate_up_proj":
            inner = value.shape[1] // 2
            for e, expert in enumerate(value):
                tensors[rename(f"{block}.experts.{e}.{gate}.weight")] = expert[:inner]
                tensors[rename(f"{block}.experts.{e}.{up}.weight")] = expert[inner:]
        elif leaf == "down_proj":
            for e, expert in enumerate(value):
                tensors[rename(f"{block}.experts.{e}.{down}.weight")] = expert
        else:
            tensors[rename(name)] = value
    return tensors


def mixtral_layout(parameters: Tensors) -> Tensors:
    """Released Mixtral: ``block_sparse_moe.experts.<e>.{w1,w3,w2}.weight`` = gate, up, down."""
    return _expert_layout(parameters, "w1", "w3", "w2", lambda name: name.replace(".mlp.", ".block_sparse_moe."))


def per_expert_layout(parameters: Tensors) -> Tensors:
    """Released Qwen3-MoE and OLMoE: ``mlp.experts.<e>.{gate,up,down}_proj.weight``."""
    return _expert_layout(parameters, "gate_proj", "up_proj", "down_proj", lambda name: name)


# ---------------------------------------------------------------------------------------------- recipes

_COMMON = {"vocab_size": 256, "hidden_act": "silu", "max_position_embeddings": 256, "attention_dropout": 0.0}

_MIXTRAL = _COMMON | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_MIXTRAL_WINDOW = _MIXTRAL | {
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "num_local_experts": 4,
    "rope_theta": 1e4,
    "sliding_window": 6,
    "tie_word_embeddings": True,
}

# The spelling that transformers 5 writes: rope settings in one dict instead of a top-level rope_theta.
_MIXTRAL_V5 = {k: v for k, v in _MIXTRAL.items() if k != "rope_theta"} | {
    "head_dim": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}

_QWEN3_MOE = _COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "use_sliding_window": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_OLMOE = _COMMON | {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "attention_bias": False,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
    "clip_qkv": 1.2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 1,
}

_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
}

_DEEPSEEK_V2_LITE = _COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "attention_bias": False,
    "max_position_embeddings": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

_DEEPSEEK_V2 = _DEEPSEEK_V2_LITE | {
    "q_lora_rank": 24,
    "v_head_dim": 16,
    "num_experts_per_tok": 3,
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 4.0,
    "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.707},
}

_DEEPSEEK_V3 = _DEEPSEEK_V2 | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}

_JAMBA = _COMMON | {
    "architectures": ["JambaForCausalLM"],
    "model_type": "jamba",
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "attn_layer_period": 4,
    "attn_layer_offset": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": 3,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

RECIPES: dict[str, Recipe] = {
    "mixtral": Recipe(
        "top-2 renormalised after softmax, grouped queries, released names w1/w2/w3",
        _MIXTRAL,
        decoder_parameters,
        mixtral_layout,
    ),
    "mixtral_swa_tied": Recipe(
        "sliding window shorter than the prompt, tied embedding, explicit head width, one kv head",
        _MIXTRAL_WINDOW,
        decoder_parameters,
        mixtral_layout,
        prompt_length=20,
    ),
    "mixtral_bf16_sharded": Recipe(
        "bf16 file in several shards with an index; the expected outputs are fp32 compute on the bf16 weights",
        _MIXTRAL,
        decoder_parameters,
        mixtral_layout,
        dtype=ml_dtypes.bfloat16,
        shard_bytes=300_000,
    ),
    "mixtral_v5keys": Recipe(
        "the weights of mixtral under transformers 5's in-memory names: stacked experts, rope_parameters",
        _MIXTRAL_V5,
        decoder_parameters,
        in_memory_layout,
    ),
    "qwen3_moe": Recipe(
        "norm per head, head width unequal to width / heads, dense layers by sparse step (0,2,4) and by list (3)",
        _QWEN3_MOE,
        decoder_parameters,
        per_expert_layout,
    ),
    "olmoe": Recipe(
        "norm over the whole q and k projection, clip after it, weights not renormalised",
        _OLMOE,
        decoder_parameters,
        per_expert_layout,
    ),
    "deepseek_v2_lite": Recipe(
        "latent attention without query compression, greedy router, two shared experts, YaRN with equal mscales",
        _DEEPSEEK_V2_LITE,
        deepseek_parameters,
        per_expert_layout,
        prompt_length=40,
    ),
    "deepseek_v2": Recipe(
        "compressed queries, the best experts of the best groups (by maximum), scaling 4, unequal mscales",
        _DEEPSEEK_V2,
        deepseek_parameters,
        per_expert_layout,
        prompt_length=40,
    ),
    "deepseek_v3": Recipe(
        "sigmoid router with correction bias, groups by their two best, renormalised and scaled by 2.5",
        _DEEPSEEK_V3,
        deepseek_parameters,
        per_expert_layout,
        prompt_length=40,
    ),
    "jamba": Recipe(
        "Mamba layers with attention at 2 and 6 and experts at odd layers, no positions",
        _JAMBA,
        jamba_parameters,
        per_expert_layout,
        prompt_length=20,
    ),
}
