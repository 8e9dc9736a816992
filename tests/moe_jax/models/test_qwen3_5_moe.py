"""Qwen3.5-MoE: config, nested or not, names beside a vision tower, cache sizes, blocks, and the tiny one offloaded."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx

from moe_jax import MoE
from moe_jax.checkpoint.mapping import Ignore
from moe_jax.errors import CheckpointError
from moe_jax.layers.attention import AttentionCall
from moe_jax.layers.mlp import SigmoidGatedMLP
from moe_jax.layers.norm import ZeroCentredRMSNorm
from moe_jax.layers.rope import Yarn, apply_rope
from moe_jax.models.qwen3_5_moe.config import Qwen3_5MoeConfig
from moe_jax.models.qwen3_5_moe.modeling import GatedAttention
from moe_jax.models.qwen3_5_moe.params import WEIGHT_TABLE
from moe_jax.models.registry import family_for

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 12,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
}
FIELDS = (
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "initializer_range",
    "linear_conv_kernel_dim",
    *(name for name in SMALL if name != "full_attention_interval"),
)


def test_defaults_are_those_of_transformers():
    want, cfg = transformers.Qwen3_5MoeTextConfig(), Qwen3_5MoeConfig.from_hf({})
    assert cfg == Qwen3_5MoeConfig()
    for field in FIELDS:
        assert getattr(cfg, field) == getattr(want, field), field
    assert list(cfg.layer_types) == want.layer_types
    assert cfg.rope_theta == want.rope_parameters["rope_theta"]
    assert cfg.partial_rotary_factor == want.rope_parameters["partial_rotary_factor"] and cfg.rotary_dim == 64


def test_a_config_that_transformers_saves_reads_back():
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
    alone = transformers.Qwen3_5MoeTextConfig(**SMALL, rope_parameters=rope).to_dict()
    nested = transformers.Qwen3_5MoeConfig(text_config=SMALL | {"rope_parameters": rope}).to_dict()
    for saved in (alone, nested, nested | {"architectures": ["Qwen3_5MoeForConditionalGeneration"]}):
        family = family_for(saved)
        assert family.name == "qwen3_5_moe"
        cfg = family.config_cls.from_hf(saved)
        assert cfg == Qwen3_5MoeConfig.from_hf(SMALL | {"rope_theta": 1e7, "partial_rotary_factor": 0.5} | LAYERS)
        assert cfg.rotary_dim == 4 and cfg.attention_layers == (1, 3) and cfg.moe_layers == (0, 1, 2, 3)


LAYERS = {"layer_types": ["linear_attention", "full_attention"] * 2, "full_attention_interval": 4}


def test_the_released_models_cache_sizes():
    released = Qwen3_5MoeConfig()
    assert released.kv_bytes_per_token(jnp.bfloat16) == 20_480, "10 layers, 2 heads of 256, keys and values"
    # transformers keeps a fourth column of the convolution's inputs, which is never read: 65,536 bytes a layer.
    assert released.state_bytes(jnp.bfloat16) == 30 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)
    assert released.expert_row_shapes() == {"gate_up": (1024, 2048), "down": (2048, 512)}
    assert released.shared_width == 512 and released.normalizes_router_weights


def test_derived_values():
    cfg = Qwen3_5MoeConfig.from_hf(SMALL | {"intermediate_size": 99})
    assert cfg.expert_row_shapes() == {"gate_up": (16, 16), "down": (16, 8)} and cfg.shared_width == 12
    assert [sorted(layer.paged) for layer in cfg.cache_layout()] == [[], ["k", "v"]] * 2
    assert cfg.kv_bytes_per_token(jnp.float32) == 2 * (2 * 2 * 8) * 4
    assert cfg.state_bytes(jnp.bfloat16) == 2 * (3 * (2 * 6 + 20) * 2 + 4 * 3 * 5 * 4)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "partial_rotary_factor": 0.5}
    extended = Qwen3_5MoeConfig.from_hf(SMALL | {"rope_parameters": yarn})
    assert extended.yarn == Yarn(4.0, 32) and extended.rotary_dim == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"linear_num_value_heads": 3}, "linear_num_value_heads = 3: must be a multiple of linear_num_key_heads = 2"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim = 1: must be at least 2"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim = 0: must be an integer"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size = None: must be an integer"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size = 0: must be an integer"),
        ({"partial_rotary_factor": 0.4}, "partial_rotary_factor = 0.4: must be at most 1 and take an even number"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5: must be at most 1"),
        ({"rope_parameters": {"partial_rotary_factor": "x"}}, "partial_rotary_factor = 'x': must be a positive number"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.rope_type = 'linear'"),
        ({"full_attention_interval": 5}, "full_attention_interval = 5: none of the 4 layers would attend"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types = .*'full_attention' at least once"),
        ({"layer_types": ["full_attention"]}, "layer_types = .*each of the 4 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types = .*'linear_attention' or 'full_attention'"),
        ({"layer_types": "full_attention"}, "layer_types = 'full_attention': must be a list"),
        ({"attn_output_gate": False}, "attn_output_gate = False: not supported"),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\]: not supported"),
        ({"text_config": [1]}, r"text_config = \[1\]: must be an object"),
        (
            {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}},
            "tie_word_embeddings = True: .*",
        ),
        ({"text_config": {"hidden_act": "gelu"}}, "hidden_act = 'gelu': not supported"),
    ],
)
def test_a_bad_value_is_named(fields, message):
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        Qwen3_5MoeConfig.from_hf(SMALL | fields)


def test_names_beside_a_vision_tower():
    def places(name):
        return [rule for rule in WEIGHT_TABLE if re.fullmatch(rule.pattern, name)]

    for name in ("embed_tokens.weight", "layers.7.linear_attn.A_log", "layers.7.mlp.experts.gate_up_proj"):
        (alone,), (beside,) = places(f"model.{name}"), places(f"model.language_model.{name}")
        assert alone is beside and not isinstance(alone, Ignore)
    for name in ("model.visual.blocks.0.attn.qkv.weight", "mtp.layers.0.mlp.experts.3.up_proj.weight", "mtp.fc.weight"):
        assert [type(rule) for rule in places(name)] == [Ignore]


# ---------------------------------------------------------------------------------------------- blocks


def test_the_norm_scales_by_one_plus_its_weight():
    norm, x = ZeroCentredRMSNorm(6, jnp.float32, eps=1e-6), jax.random.normal(jax.random.key(0), (3, 6))
    unit = np.asarray(x) / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True))
    np.testing.assert_allclose(norm(x), unit, atol=1e-5)
    norm.weight[...] = jnp.arange(6.0)
    np.testing.assert_allclose(norm(x), unit * np.arange(1.0, 7.0), atol=1e-5)
    assert norm(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_the_shared_expert_has_one_factor_a_token():
    shared = SigmoidGatedMLP(6, 10, jnp.float32, std=0.5, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 3, 6))
    ungated = super(SigmoidGatedMLP, shared).__call__(x)
    factor = 1 / (1 + np.exp(-np.asarray(x) @ np.asarray(shared.gate.weight[...])[0]))
    np.testing.assert_allclose(shared(x), factor[..., None] * ungated, atol=1e-6)


def test_rope_turns_the_first_components_only():
    x = jax.random.normal(jax.random.key(0), (1, 2, 3, 8))
    cos, sin = (f(jnp.arange(1.0, 5.0).reshape(1, 2, 2)) for f in (jnp.cos, jnp.sin))
    turned = apply_rope(x, cos, sin)
    np.testing.assert_array_equal(turned[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(turned[..., :4], apply_rope(x[..., :4], cos, sin))
    with pytest.raises(ValueError, match="width 4 for heads of width 2"):
        apply_rope(x[..., :2], cos, sin)


def test_a_closed_gate_silences_its_head_only(load_tiny):
    tiny = load_tiny("qwen3_5_moe")
    attention = nnx.merge(tiny.graphdef, tiny.params).layers["3"].attn
    assert isinstance(attention, GatedAttention)
    N, H, D = 4, 32, 64
    x = jax.random.normal(jax.random.key(0), (1, 3, D))
    call = AttentionCall(jnp.arange(3)[None], jnp.ones((1, 3), bool), None, None, "xla")

    def heads(rows):
        """The output before its projection: with the identity in place of its weight, [3, N, H]."""
        attention.qkv.weight[...] = rows
        attention.out.weight = nnx.Param(jnp.eye(N * H))
        return np.asarray(attention(x, tiny.cache([3]).extend(call.live), call)[0]).reshape(3, N, H)

    rows = attention.qkv.weight[...]
    gate_of_head_1 = slice((2 * 1 + 1) * H, (2 * 1 + 2) * H)
    half = heads(rows.at[gate_of_head_1].set(0.0))
    whole = heads(rows)
    gate = 1 / (1 + np.exp(-np.asarray(x[0]) @ np.asarray(rows[gate_of_head_1]).T))  # [3, H]
    np.testing.assert_allclose(whole[:, 1], 2 * gate * half[:, 1], atol=1e-5)
    np.testing.assert_allclose(np.delete(whole, 1, axis=1), np.delete(half, 1, axis=1), atol=1e-6)


# ---------------------------------------------------------------------------------------------- the released files


def test_the_release_without_types_at_the_top_loads_whole(tiny, expected, tmp_path):
    """As released: neither dtype nor special tokens at the top level of config.json, nor a generation_config.json."""
    directory, want = (
        shutil.copytree(tiny("qwen3_5_moe_released"), tmp_path / "model"),
        expected("qwen3_5_moe_released"),
    )
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["dtype"] = config.pop("dtype")
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").unlink()
    run = {"transport": "callback", "cache_rate": 0.25, "progress": False, "max_batch": 1, "max_sequence_length": 128}
    with MoE(directory, run) as moe:
        assert moe.dtype == jnp.bfloat16 and moe.sampling_params().eos_token_id == (2,)
    with MoE(directory, run | {"dtype": "float32"}) as moe:
        ids = moe.generate(want["input_ids"], max_new_tokens=4, eos_token_id=[])
        np.testing.assert_array_equal(ids[0, -4:], want["gen_ids"].ravel()[:4])
