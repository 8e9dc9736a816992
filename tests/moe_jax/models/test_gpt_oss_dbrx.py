"""config.json of gpt-oss and DBRX: defaults, the files' own names, row shapes, and errors that name the field."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.errors import CheckpointError
from moe_jax.layers.rope import Yarn
from moe_jax.models.dbrx.config import DbrxConfig
from moe_jax.models.dbrx.modeling import PNormRouter
from moe_jax.models.gpt_oss.config import GptOssConfig
from moe_jax.models.gpt_oss.modeling import TopKSoftmaxRouter
from moe_jax.models.registry import family_for, targets
from pallas_kernels import formats
from pallas_kernels.expert_ffn import SILU, ExpertSpec

MXFP4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


def test_gpt_oss_defaults():
    cfg = GptOssConfig.from_hf({})
    assert (cfg.num_hidden_layers, cfg.num_experts, cfg.head_dim, cfg.rope_theta) == (36, 128, 64, 150000.0)
    assert cfg.yarn == Yarn(32.0, 4096, truncate=False)
    assert [cfg.layer_window(i) for i in range(4)] == [128, None, 128, None]
    assert cfg.expert_spec() == ExpertSpec("clamped_swiglu", alpha=1.702, limit=7.0, biases=True)
    assert cfg.attention_sinks and cfg.window == 128


def test_gpt_oss_rows():
    dense = GptOssConfig.from_hf({"num_local_experts": 32})
    assert dense.expert_row_shapes() == {
        "gate_up": (5760, 2880),
        "gate_up_bias": (5760,),
        "down": (2880, 2880),
        "down_bias": (2880,),
    }
    packed = GptOssConfig.from_hf(MXFP4)
    assert packed.expert_row_shapes() == {
        "gate_up": (5760, 360),
        "gate_up_scale": (5760, 23),
        "gate_up_bias": (5760,),
        "down": (2880, 360),
        "down_scale": (2880, 23),
        "down_bias": (2880,),
    }
    for cfg in (dense, packed):
        spec = cfg.expert_spec()
        assert tuple(cfg.expert_row_shapes()) == (*spec.parts("gate_up"), *spec.parts("down"))
    assert packed.expert_spec().gate_up == packed.expert_spec().down == formats.MXFP4()


def test_gpt_oss_parameters():
    small = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 9}
    shapes = targets(GptOssConfig.from_hf(small | {"num_hidden_layers": 1, "num_local_experts": 6}))
    assert shapes["layers.0.attn.sinks"] == (4,)
    assert shapes["layers.0.attn.qkv.bias"] == (64,) and shapes["layers.0.attn.out.bias"] == (16,)
    assert shapes["layers.0.router.gate.bias"] == (6,)
    plain = targets(GptOssConfig.from_hf(small | {"num_hidden_layers": 1, "attention_bias": False}))
    assert "layers.0.attn.qkv.bias" not in plain and "layers.0.attn.sinks" in plain


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config.quant_method = 'gptq': .*only",
        ),
        ({"num_hidden_layers": 2, "layer_types": ["full_attention"]}, "layer_types = .*each of the 2 layers"),
        ({"num_hidden_layers": 1, "layer_types": ["chunked"]}, "layer_types = .*'sliding_attention' or"),
        ({"layer_types": "full_attention"}, "layer_types = 'full_attention': must be a list"),
        ({"sliding_window": None}, "sliding_window = None: .*give their window"),
        ({"swiglu_limit": 0}, "swiglu_limit = 0: must be a positive number"),
        (MXFP4 | {"intermediate_size": 40}, "intermediate_size = 40: MXFP4 experts need a multiple of 32"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ],
)
def test_gpt_oss_errors(fields, message):
    with pytest.raises(CheckpointError, match=message):
        GptOssConfig.from_hf(fields)


RELEASED = {
    "architectures": ["DbrxForCausalLM"],
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 3,
    "max_seq_len": 128,
    "vocab_size": 99,
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 500000},
    "ffn_config": {
        "ffn_act_fn": {"name": "silu"},
        "ffn_hidden_size": 48,
        "moe_num_experts": 8,
        "moe_top_k": 3,
        "moe_normalize_expert_weights": 1,
    },
}


def test_dbrx_reads_its_own_names():
    cfg = family_for(RELEASED).config_cls.from_hf(RELEASED)
    assert isinstance(cfg, DbrxConfig)
    assert (cfg.hidden_size, cfg.num_hidden_layers, cfg.num_attention_heads, cfg.num_key_value_heads) == (64, 3, 4, 2)
    assert (cfg.num_experts, cfg.num_experts_per_tok, cfg.expert_width, cfg.clip_qkv) == (8, 3, 48, 8)
    assert cfg.max_position_embeddings == 128 and cfg.rms_norm_eps == 1e-5
    assert cfg.expert_spec() == SILU and cfg.expert_row_shapes() == {"gate_up": (96, 64), "down": (64, 48)}


def test_dbrx_base_of_rotary_embedding():
    assert DbrxConfig.from_hf(RELEASED).rope_theta == 500000
    given = RELEASED | {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}
    assert DbrxConfig.from_hf(given).rope_theta == 2e4
    assert DbrxConfig.from_hf({}).rope_theta == 1e4


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("d_model",), 0, "config.json: d_model = 0: must be an integer"),
        (("ffn_config", "moe_top_k"), 9, "ffn_config.moe_top_k = 9: there are only 8 experts"),
        (("attn_config", "clip_qkv"), -1, "attn_config.clip_qkv = -1: must be a positive number"),
        (("ffn_config", "ffn_act_fn"), {"name": "gelu"}, "ffn_config.ffn_act_fn.name = 'gelu'"),
        (("attn_config",), [1], "attn_config = .*must be an object"),
        (("tie_word_embeddings",), True, "tie_word_embeddings = True: not supported"),
    ],
)
def test_dbrx_errors_name_the_field_of_the_file(path, value, message):
    config = json.loads(json.dumps(RELEASED))
    where = config
    for name in path[:-1]:
        where = where[name]
    where[path[-1]] = value
    with pytest.raises(CheckpointError, match=message):
        DbrxConfig.from_hf(config)


def logits_of(router, x):
    return np.asarray(router.gate(x), np.float64)


def test_gpt_oss_router_weighs_the_chosen_experts_only():
    router = TopKSoftmaxRouter(16, 6, 2, jnp.float32, std=0.5, rngs=nnx.Rngs(0))
    router.gate.bias[...] = jnp.arange(6.0)
    x = jax.random.normal(jax.random.key(0), (5, 16))
    ids, weights, scores = router(x)
    logits = logits_of(router, x)
    order = np.argsort(-logits, axis=1)[:, :2]
    np.testing.assert_array_equal(ids, order)
    chosen = np.exp(np.take_along_axis(logits, order, 1))
    np.testing.assert_allclose(weights, chosen / chosen.sum(1, keepdims=True), atol=1e-6)
    np.testing.assert_allclose(scores, np.exp(logits) / np.exp(logits).sum(1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize("p", [None, 1.0, 2.0])
def test_dbrx_router_divides_by_the_p_norm(p):
    router = PNormRouter(16, 6, 3, jnp.float32, p=p, std=0.5, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (5, 16))
    ids, weights, scores = router(x)
    probabilities = np.exp(logits_of(router, x))
    probabilities /= probabilities.sum(1, keepdims=True)
    chosen = np.take_along_axis(probabilities, np.asarray(ids), 1)
    wanted = chosen if p is None else chosen / np.linalg.norm(chosen, ord=p, axis=1, keepdims=True)
    np.testing.assert_allclose(weights, wanted, atol=1e-6)
    np.testing.assert_allclose(scores, probabilities, atol=1e-6)
