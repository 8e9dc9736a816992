"""Damaged quantised checkpoints: one error at load that names everything that is wrong."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import tiny_models
from safetensors.numpy import save_file

from moe_jax.checkpoint import Checkpoint
from moe_jax.config import OffloadConfig
from moe_jax.engine.loading import read_parts
from moe_jax.errors import CheckpointError

Q = "model.layers.0.self_attn.q_proj"
W1, W2, W3 = (f"model.layers.1.block_sparse_moe.experts.2.w{i}" for i in (1, 2, 3))
GATE = "model.layers.1.mlp.experts.5.gate_proj"


def load(directory):
    with Checkpoint.open(directory) as files:
        return read_parts(files, OffloadConfig.parse({"dtype": "float32"}), False)


@pytest.fixture(scope="module")
def tensors_of():
    """`tensors_of(name)`: tensors of a tiny checkpoint, made once."""
    made = {}
    return lambda name: dict(made.setdefault(name, tiny_models.checkpoint_tensors(name)))


@pytest.fixture
def refused(tensors_of, tmp_path):
    """`refused(name, tensors=..., config=...)`: the error of a tiny checkpoint with these changes; None removes."""

    def run(name, tensors=(), **config):
        files = tensors_of(name) | dict(tensors)
        save_file({key: value for key, value in files.items() if value is not None}, tmp_path / "model.safetensors")
        content = tiny_models.RECIPES[name].config | config
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
        with pytest.raises(CheckpointError) as raised:
            load(tmp_path)
        return str(raised.value)

    return run


def quantization(name, **changes):
    content = tiny_models.RECIPES[name].config["quantization_config"] | changes
    return {k: v for k, v in content.items() if v is not None}


def test_missing_and_truncated_files(tmp_path):
    names = ("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors")
    tensors = list(tiny_models.checkpoint_tensors("qwen3_moe_awq").items())
    third = len(tensors) // 3 + 1
    shutil.copy(tiny_models.build("qwen3_moe_awq", tmp_path / "whole") / "config.json", tmp_path)
    for i, name in enumerate(names):
        save_file(dict(tensors[third * i : third * (i + 1)]), tmp_path / name)
    assert load(tmp_path).experts.gate_up.name == "int4"
    (tmp_path / names[1]).unlink()
    size = (tmp_path / names[2]).stat().st_size
    with open(tmp_path / names[2], "r+b") as file:
        file.truncate(size - 100)
    with pytest.raises(CheckpointError) as raised:
        load(tmp_path)
    message = str(raised.value)
    assert "2 problems" in message
    assert f"{names[1]} is missing: fetch this shard" in message
    assert f"{names[2]} ends at byte {size - 100}, before the data of" in message


def test_everything_wrong_with_packed_tensors_is_in_one_error(refused, tensors_of):
    good = tensors_of("mixtral_gptq")
    bad_scales = good[f"{W1}.scales"].copy()
    bad_scales[0, 0], bad_scales[1, 3] = np.nan, -1
    infinite = good[f"{W2}.scales"].copy()
    infinite[0, 0] = np.inf
    message = refused(
        "mixtral_gptq",
        {
            f"{W1}.scales": bad_scales,
            f"{W2}.scales": infinite,
            f"{W3}.scales": None,
            f"{Q}.qzeros": good[f"{Q}.qzeros"][:, :-1].copy(),
            "model.layers.0.self_attn.k_proj.qweight": good["model.layers.0.self_attn.k_proj.qweight"][:-4].copy(),
            "model.layers.0.self_attn.v_proj.scales": np.zeros_like(good["model.layers.0.self_attn.v_proj.scales"]),
            "model.layers.0.lost.scales": bad_scales,
            "model.stray.weight": np.ones(3, np.float32),
        },
    )
    for part in (
        "8 problems",
        f"scales with values that are NaN or negative: {W1}.scales",
        f"scales with values that are infinite: {W2}.scales",
        f"qweight without the scales that belongs to it: {W3}.qweight",
        f"qzeros of shape [4, 15], where group_size 32 for weights [128, 128] needs [4, 16]: {Q}.qzeros",
        "scales of shape [4, 64], where group_size 32 for weights [64, 96] needs [3, 64]",
        "model.layers.0.self_attn.k_proj.scales",
        "scales with values that are all zero: model.layers.0.self_attn.v_proj.scales",
        "scales without the qweight that it belongs to: model.layers.0.lost.scales",
        "1 tensor of the file with no place in the model that config.json describes: model.stray.weight",
    ):
        assert part in message, message


@pytest.mark.parametrize("name", ["mixtral_gptq", "mixtral_awq", "qwen3_moe_ct"])
def test_wrong_group_size_says_which_one_would_fit(name, refused):
    content = quantization(name, group_size=64)
    if "config_groups" in content:
        weights = content["config_groups"]["group_0"]["weights"] | {"group_size": 64}
        content["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    message = refused(name, quantization_config=content)
    assert "of 4 groups for 128 columns, where quantization_config says group_size = 64 (32 would fit)" in message
    assert message.count("\n") == len({64, 128} if name == "qwen3_moe_ct" else {128, 192}), "a line for each width"


def test_wrong_block_size(refused):
    message = refused("qwen3_moe_fp8", quantization_config=quantization("qwen3_moe_fp8", weight_block_size=[64, 64]))
    assert (
        "scale of shape [1, 1], where quantization_config's block of 64 for weights [64, 128] needs [1, 2]" in message
    )


def test_fp8_companions(refused, tensors_of):
    good = tensors_of("qwen3_moe_fp8")
    nan = np.full((1, 1), np.nan, ml_dtypes.bfloat16)
    message = refused(
        "qwen3_moe_fp8",
        {
            f"{Q}.weight_scale_inv": None,
            f"{GATE}.weight_scale_inv": nan,
            "model.norm.weight_scale_inv": nan,
            "model.layers.0.lost.weight_scale_inv": nan,
            "model.layers.1.self_attn.o_proj.weight_scale_inv": np.ones((1, 1), np.int32),
            "model.layers.1.self_attn.q_proj.scale": nan,
            "lm_head.weight": good["lm_head.weight"].astype(ml_dtypes.float8_e5m2),
        },
    )
    for part in (
        "7 problems",
        f"weight without the scale that belongs to it: {Q}.weight",
        f"scale with values that are NaN: {GATE}.weight_scale_inv",
        "weight that is float32 [128], where a matrix of float8_e4m3fn or int8 or uint8 is needed: model.norm.weight",
        "scale without the weight that it belongs to: model.layers.0.lost.weight_scale_inv",
        "scale that is int32, where float16 or bfloat16 or float32 or float8_e8m0fnu is needed",
        "a second scale of one tensor: model.layers.1.self_attn.q_proj.weight_scale_inv",
        "packed weights (float8_e5m2) that config.json's quantization_config does not describe: lm_head.weight",
    ):
        assert part in message, message


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        ({"quant_method": "quip"}, ["quantization_config.quant_method = 'quip': supported are"]),
        ({"bits": None, "group_size": 7.5}, ["2 problems", "bits is missing", "group_size = 7.5"]),
        ({"checkpoint_format": "gptq_v3"}, ["checkpoint_format = 'gptq_v3': supported is 'gptq' or 'gptq_v2'"]),
    ],
)
def test_configs(change, messages, refused):
    message = refused("mixtral_gptq", quantization_config=quantization("mixtral_gptq", **change))
    assert all(part in message for part in messages), message


def test_exponents_of_mxfp4_that_are_no_numbers(refused, tensors_of):
    name = "model.layers.2.mlp.experts.down_proj_scales"
    scales = tensors_of("gpt_oss_mxfp4")[name].copy()
    scales[3, 5, 1] = 255
    assert f"scales with values that are NaN: {name}" in refused("gpt_oss_mxfp4", {name: scales})


def test_packed_tensors_without_a_quantised_config(refused):
    message = refused("qwen3_moe_fp8", quantization_config=None)
    assert "packed weights (float8_e4m3fn) that config.json's quantization_config does not describe" in message
    message = refused("mixtral_gptq", quantization_config=None)
    assert "packed weights (int32) that config.json's quantization_config does not describe" in message


def test_act_order_that_is_none(refused):
    unequal = np.arange(128, dtype=np.int32) // 32
    unequal[0] = 1
    outside = unequal.copy()
    outside[0] = 9
    message = refused(
        "mixtral_gptq", {f"{W1}.g_idx": unequal, f"{W3}.g_idx": outside, f"{Q}.g_idx": np.zeros(64, np.int32)}
    )
    assert f"g_idx that does not put 32 columns into each of 4 groups: {W1}.g_idx, {W3}.g_idx" in message
    assert f"g_idx of shape [64], where a matrix of 128 columns needs [128]: {Q}.g_idx" in message


def test_only_biases_of_zeros_are_left_out(refused, tensors_of, tmp_path):
    """AutoGPTQ gave every packed layer a bias; the models' layers have none."""
    biases = {f"{name}.bias": np.zeros(128, np.float16) for name in (Q, W2)}
    build = tmp_path / "zeros"
    tiny_models.build("mixtral_gptq", build)
    save_file(tensors_of("mixtral_gptq") | biases, build / "model.safetensors")
    assert load(build).experts.gate_up.name == "int4"
    biases[f"{W2}.bias"][3] = 1
    message = refused("mixtral_gptq", biases)
    assert f"1 tensor of the file with no place in the model that config.json describes: {W2}.bias" in message
    assert f"model that config.json describes: {W2.replace('experts.2.w2', 'gate')}.bias" in refused(
        "mixtral_gptq", {f"{W2.replace('experts.2.w2', 'gate')}.bias": np.zeros(4, np.float16)}
    ), "not beside packed weights"


def test_experts_of_another_format_and_weights_that_are_there_twice(refused, tensors_of):
    parts = ("qweight", "qzeros", "scales", "g_idx")
    plain = {f"{W2}.{part}": None for part in parts} | {f"{W2}.weight": np.ones((128, 192), np.float32)}
    message = refused("mixtral_gptq", plain | {f"{Q}.weight": np.ones((128, 128), np.float32)})
    assert (
        "down of experts is Dense() here, but INT4(group=32" in message and f"7 other tensors: {W2}.weight" in message
    )
    assert f"weights that are in the file plain and as qweight: {Q}.weight" in message


def test_compressed_tensors_companions(refused, tensors_of):
    zeros = np.zeros((8, 4), np.int32)
    message = refused(
        "qwen3_moe_ct",
        {
            f"{Q}.weight_shape": np.array([128, 120]),
            f"{GATE}.weight_zero_point": zeros,
            "model.layers.0.self_attn.k_proj.weight_shape": None,
            "model.layers.0.self_attn.v_proj.weight_packed": np.ones((64, 0), np.int32),
        },
    )
    for part in (
        "4 problems",
        f"shape that says [128, 120], where packed holds [128, 128]: {Q}.weight_shape",
        f"zero_point of weights that quantization_config calls symmetric: {GATE}.weight_zero_point",
        "packed without the shape that belongs to it: model.layers.0.self_attn.k_proj.weight_packed",
        "packed that is int32 [64, 0], where a matrix of int32 or uint32 is needed",
    ):
        assert part in message, message


def test_shapes_of_packed_weights_that_the_model_does_not_have(refused):
    message = refused("mixtral_awq", hidden_size=128, intermediate_size=160)
    assert "gate_up has shape [192, 128] + [192, 128] where the model has [320, 128]" in message
    assert "down has shape [128, 192] where the model has [128, 160]" in message
    message = refused("mixtral_awq", intermediate_size=100)  # no INT4 row has 100 values
    assert "down has shape [128, 192] where the model has [128, 100]" in message
    message = refused("mixtral_awq", num_attention_heads=8, head_dim=32)
    assert "layers.0.attn.qkv.weight: has shape [384, 128] in the model, but the file has" in message
