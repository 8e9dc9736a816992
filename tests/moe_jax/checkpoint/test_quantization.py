"""Reading a config's quantisation: every format that is supported, and all that is wrong in one error."""

import copy

import pytest

from moe_jax.checkpoint.quantization import WHOLE_ROW, Quantization
from moe_jax.errors import CheckpointError

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "checkpoint_format": "gptq"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "GEMM"}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
CT = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": WEIGHTS}},
}


def read(content, key="quantization_config"):
    return Quantization.from_hf({"hidden_size": 64, key: content})


def changed(content, path, value):
    content = copy.deepcopy(content)
    *outer, last = path.split(".")
    place = content
    for name in outer:
        place = place[name]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return content


def test_supported_formats():
    assert read(FP8) == Quantization("fp8", 128)
    assert read(FP8 | {"weight_block_size": [64, 64], "scale_fmt": "ue8m0"}) == Quantization("fp8", 64)
    assert read(GPTQ) == Quantization("gptq", 128, stored_zero_offset=1, column_order=True)
    assert read(changed(GPTQ, "checkpoint_format", None)) == read(GPTQ)
    assert read(GPTQ | {"checkpoint_format": "gptq_v2", "group_size": -1, "sym": False, "desc_act": False}) == (
        Quantization("gptq", WHOLE_ROW, zero_points=True)
    )
    assert read(AWQ) == Quantization("awq", 64)
    assert read({"quant_method": "awq", "w_bit": 4, "q_group_size": 32}) == Quantization("awq", 32)
    assert read(CT) == Quantization("compressed-tensors", 32)
    weights = "config_groups.group_0.weights"
    assert read(changed(CT, f"{weights}.symmetric", False)).zero_points
    assert not read(CT).column_order and not read(changed(CT, f"{weights}.actorder", "weight")).column_order
    assert read(changed(CT, f"{weights}.actorder", "group")).column_order
    assert read(changed(CT, f"{weights}.strategy", "channel")).size == WHOLE_ROW
    assert read({"quant_method": "mxfp4"}) == Quantization("mxfp4")


def test_places_where_it_may_stand():
    assert Quantization.from_hf({"hidden_size": 64}) is None
    assert Quantization.from_hf({"quantization_config": None, "text_config": {"hidden_size": 64}}) is None
    assert Quantization.from_hf({"text_config": {"quantization_config": FP8}}) == Quantization("fp8", 128)
    assert read(changed(CT, "quant_method", None), "compression_config") == Quantization("compressed-tensors", 32)


@pytest.mark.parametrize(
    ("content", "messages"),
    [
        ("fp8", ["quantization_config = 'fp8': must be an object"]),
        ({}, ["quantization_config.quant_method is missing"]),
        ({"quant_method": "bitsandbytes"}, ["quant_method = 'bitsandbytes': supported are fp8, gptq, awq,"]),
        (changed(FP8, "weight_block_size", None), ["quantization_config.weight_block_size is missing"]),
        (FP8 | {"weight_block_size": [128, 64]}, ["weight_block_size = [128, 64]: supported are two equal"]),
        (FP8 | {"weight_block_size": 128}, ["weight_block_size = 128: supported are two equal"]),
        (FP8 | {"fmt": "e5m2"}, ["fmt = 'e5m2': supported is 'e4m3'"]),
        (FP8 | {"activation_scheme": "static"}, ["activation_scheme = 'static': supported is 'dynamic'"]),
        (
            GPTQ | {"bits": 8, "group_size": 0, "checkpoint_format": "marlin"},
            ["3 problems", "bits = 8: supported is 4", "group_size = 0: must be", "checkpoint_format = 'marlin'"],
        ),
        (changed(GPTQ, "bits", None) | {"group_size": "128"}, ["bits is missing", "group_size = '128'"]),
        (GPTQ | {"group_size": True}, ["group_size = True: must be a positive integer"]),
        (AWQ | {"version": "gemv", "zero_point": False}, ["version = 'gemv'", "zero_point = False: supported is True"]),
        (changed(AWQ, "group_size", None), ["quantization_config.group_size is missing"]),
        (CT | {"format": "float-quantized"}, ["format = 'float-quantized': supported is 'pack-quantized'"]),
        (CT | {"config_groups": {}}, ["config_groups = {}: must be an object with at least one group"]),
        (changed(CT, "config_groups", None), ["config_groups is missing"]),
        (
            changed(CT, "config_groups.group_0.weights", WEIGHTS | {"num_bits": 8, "strategy": "tensor"}),
            ["group_0.weights.num_bits = 8: supported is 4", "strategy = 'tensor': supported is 'group' or 'channel'"],
        ),
        (changed(CT, "config_groups.group_0.weights", None), ["config_groups.group_0.weights is missing"]),
        (
            changed(CT, "config_groups.group_0.input_activations", {"num_bits": 8}),
            ["group_0.input_activations: supported are 4-bit weights only"],
        ),
        (
            changed(CT, "config_groups.group_1", {"weights": WEIGHTS | {"group_size": 64}}),
            ["groups of different sizes"],
        ),
    ],
)
def test_everything_wrong_is_named_with_what_is_supported(content, messages):
    with pytest.raises(CheckpointError) as raised:
        read(content)
    for message in ("config.json: ", *messages):
        assert message in str(raised.value)
