"""Packed tensors of every variant, gathered and decoded, against values computed one group at a time."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_recipes_quantised import words

from moe_jax.checkpoint import Checkpoint, Quantization
from moe_jax.checkpoint.logical import gather, group_names, scale_fault
from moe_jax.checkpoint.mapping import ExpertRule, map_checkpoint
from moe_jax.errors import CheckpointError
from pallas_kernels.expert_ffn import SILU
from pallas_kernels.formats import FP8, INT4, MXFP4, Dense

N, K, GROUP = 16, 32, 8
G = K // GROUP
RNG = np.random.default_rng(0)
CODES = RNG.integers(0, 16, (N, K)).astype(np.uint8)
ZEROS = RNG.integers(0, 16, (N, G)).astype(np.uint8)
ZEROS[0] = 0, 15, 8, 1
SCALES = RNG.uniform(0.5, 1.5, (N, G)).astype(np.float16)
SHAPE = np.array([N, K])
SHUFFLED = RNG.permutation(np.arange(K) // GROUP).astype(np.int32)  # the group of each column
E8M0 = ml_dtypes.float8_e8m0fnu
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def values(zeros=None, groups=None, scales=SCALES):
    """(code - zero) * scale of every weight, in float64; groups [K] says whose zero and scale a column has."""
    groups = np.arange(K) // (K // scales.shape[1]) if groups is None else groups
    w = np.empty((N, K))
    for n, k in np.ndindex(N, K):
        zero = 8 if zeros is None else int(zeros[n, groups[k]])
        w[n, k] = (int(CODES[n, k]) - zero) * np.float64(scales[n, groups[k]])
    return w


def gptq(zeros, stored, groups=None, scales=SCALES):
    tensors = {"x.qweight": words(CODES.T, 0), "x.qzeros": words(zeros.T, 1), "x.scales": scales.T.copy()}
    return tensors | ({} if groups is None else {"x.g_idx": groups}), stored


def compressed(**more):
    return {"x.weight_packed": words(CODES, 1), "x.weight_scale": SCALES, "x.weight_shape": SHAPE} | more


BYTES = RNG.integers(0, 120, (3, N, K)).astype(np.uint8)  # positive e4m3 values
EIGHTS = np.full((N, G), 8, np.uint8)
BLOCKS = RNG.integers(125, 130, (2, 4)).astype(np.uint8)  # e8m0 of 8 x 8 blocks
STACK = RNG.uniform(0.5, 1.5, (3, 2, 4)).astype(np.float32)
HALF = RNG.integers(0, 256, (N, K // 2)).astype(np.uint8)
POWERS = RNG.integers(120, 130, (N, 1)).astype(np.uint8)


def blockwise(q, scales):
    return q.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales.repeat(8, -2).repeat(8, -1)


GPTQ, GPTQ2 = Quantization("gptq", GROUP, stored_zero_offset=1), Quantization("gptq", GROUP)
CT, CT_ZEROS = (Quantization("compressed-tensors", GROUP, zero_points=zeros) for zeros in (False, True))
CASES = {
    "gptq": (
        *gptq(ZEROS - 1 & 15, GPTQ, np.arange(K, dtype=np.int32) // GROUP),
        INT4(GROUP, zeros=True),
        values(ZEROS),
    ),
    "gptq-v2": (*gptq(ZEROS, GPTQ2), INT4(GROUP, zeros=True), values(ZEROS)),
    "gptq-symmetric": (*gptq(EIGHTS - 1, GPTQ), INT4(GROUP), values()),
    "gptq-v2-symmetric": (*gptq(EIGHTS, GPTQ2), INT4(GROUP), values()),
    "gptq-act-order": (
        *gptq(ZEROS - 1 & 15, GPTQ, SHUFFLED),
        INT4(GROUP, zeros=True, order=True),
        values(ZEROS, SHUFFLED),
    ),
    "gptq-whole-rows": (
        *gptq(EIGHTS[:, :1] - 1, Quantization("gptq", -1, 1), scales=SCALES[:, :1]),
        INT4(K),
        values(scales=SCALES[:, :1]),
    ),
    "compressed-zeros": (
        compressed(**{"x.weight_zero_point": words(ZEROS, 0)}),
        CT_ZEROS,
        INT4(GROUP, zeros=True),
        values(ZEROS),
    ),
    "compressed-act-order": (
        compressed(**{"x.weight_g_idx": SHUFFLED.astype(np.int64)}),
        CT,
        INT4(GROUP, order=True),
        values(None, SHUFFLED),
    ),
    "compressed-unused-order": (compressed(**{"x.weight_g_idx": np.full(K, -1)}), CT, INT4(GROUP), values()),
    "fp8-powers": (
        {"x.weight": BYTES[0].view(ml_dtypes.float8_e4m3fn), "x.scale": BLOCKS.view(E8M0)},
        Quantization("fp8", 8),
        FP8(8),
        blockwise(BYTES[0], 2.0 ** (BLOCKS - 127.0)),
    ),
    "fp8-stacked": (
        {"x.weight": BYTES.view(ml_dtypes.float8_e4m3fn), "x.weight_scale_inv": STACK},
        Quantization("fp8", 8),
        FP8(8),
        blockwise(BYTES, STACK),
    ),
    "fp4": (
        {"x.weight": HALF.view(np.int8), "x.scale": POWERS.view(E8M0)},
        Quantization("fp8", 128),
        MXFP4(),
        FP4[np.stack([HALF & 15, HALF >> 4], -1).reshape(N, K)] * 2.0 ** (POWERS - 127.0),
    ),
    "plain": (
        {"x.weight": BYTES[0].astype(np.float32)},
        Quantization("fp8", 128),
        Dense(),
        BYTES[0].astype(np.float64),
    ),
}


def gathered(directory, tensors, quantization):
    (directory / "config.json").write_text("{}")
    save_file(tensors, directory / "model.safetensors")
    checkpoint, faults = Checkpoint.open(directory), {}
    found = gather(checkpoint, group_names(checkpoint.names(), quantization, faults), quantization, faults)
    return checkpoint, found, faults


@pytest.mark.parametrize("case", CASES)
def test_values_of_every_variant(case, tmp_path):
    tensors, quantization, form, wanted = CASES[case]
    checkpoint, found, faults = gathered(tmp_path, tensors, quantization)
    assert faults == {} and list(found) == ["x.weight"]
    tensor = found["x.weight"]
    assert tensor.format == form and tensor.shape == wanted.shape
    assert sorted(tensor.files) == sorted(tensors)
    lead = range(wanted.shape[0]) if wanted.ndim == 3 else (None,)
    for e in lead:
        parts = {}
        for suffix, (shape, dtype) in form.row_tensors((N,), K).items():
            part = tensor.parts[suffix]
            parts[suffix] = type(part)(part.file, e, part.view, part.beside).array(checkpoint)
            assert parts[suffix].shape == shape and dtype in (None, parts[suffix].dtype)
        got = form.decode(parts, (N,), K, jnp.float32)
        np.testing.assert_array_equal(got, (wanted if e is None else wanted[e]).astype(np.float32))


def expert_map(directory, tensors, quantization, **changes):
    (directory / "config.json").write_text(json.dumps({}))
    save_file(tensors, directory / "model.safetensors")
    table = [
        ExpertRule(r"(\d+)\.(\d+)\.gate\.weight", "gate_up", part=(0, 2)),
        ExpertRule(r"(\d+)\.(\d+)\.up\.weight", "gate_up", part=(1, 2)),
        ExpertRule(r"(\d+)\.both\.weight", "gate_up", stacked=True),
        ExpertRule(r"(\d+)\.rows\.weight", "gate_up", stacked="rows"),
    ]
    arguments = dict(targets={}, expert_tensors={"gate_up": (2 * N, K)}, moe_layers=[0], num_experts=2) | changes
    return map_checkpoint(Checkpoint.open(directory), table, experts=SILU, quantization=quantization, **arguments)


def test_experts_take_the_options_that_any_of_them_needs(tmp_path):
    """One matrix has zero points, another an order: all rows get both, with values that change nothing."""
    variants = iter(("gptq-symmetric", "gptq", "gptq-symmetric", "gptq-act-order"))
    tensors, wanted = {}, {}
    for e in range(2):
        for name in ("gate", "up"):
            files, _, _, wanted[e, name] = CASES[next(variants)]
            tensors |= {f"0.{e}.{name}{file[1:]}": array for file, array in files.items()}
    found = expert_map(tmp_path, tensors, GPTQ)
    form = INT4(GROUP, zeros=True, order=True)
    assert found.experts.gate_up == form and found.packed == set(found.expert_shapes)
    assert found.expert_shapes == {
        f"gate_up{suffix}": shape for suffix, (shape, _) in form.row_tensors((N, N), K).items()
    }
    checkpoint = Checkpoint.open(tmp_path)
    for e in range(2):
        parts = {
            suffix: np.concatenate([part.array(checkpoint) for part in found.expert_sources[f"gate_up{suffix}"][0][e]])
            for suffix in form.suffixes
        }
        got = form.decode(parts, (N, N), K, jnp.float32)
        np.testing.assert_array_equal(got, np.concatenate([wanted[e, "gate"], wanted[e, "up"]]).astype(np.float32))


def test_stacked_packed_experts(tmp_path):
    quantization = Quantization("fp8", 8)
    q = np.concatenate([BYTES[:2], BYTES[1:]], axis=1).view(ml_dtypes.float8_e4m3fn)  # gate, then up
    scales = np.concatenate([STACK[:2], STACK[1:]], axis=1)
    found = expert_map(tmp_path, {"0.both.weight": q, "0.both.weight_scale_inv": scales}, quantization)
    assert found.expert_shapes == {"gate_up": (2 * N, K // 4), "gate_up_scale": (4, 4)}
    (part,) = found.expert_sources["gate_up_scale"][0][1]
    np.testing.assert_array_equal(part.array(Checkpoint.open(tmp_path)), scales[1])

    wide = Quantization("fp8", 12)  # a block over the last rows of the gate and the first of up
    shape = (2, -(-2 * N // 12), -(-K // 12))
    with pytest.raises(CheckpointError, match=r"fp8 parts are not those of \(16, 16\) rows: 0.both.weight"):
        expert_map(tmp_path, {"0.both.weight": q, "0.both.weight_scale_inv": np.ones(shape, np.float32)}, wide)
    rows = {"0.rows.weight": q.reshape(4 * N, K), "0.rows.weight_scale_inv": np.ones((8, 4), np.float32)}
    with pytest.raises(CheckpointError, match=r"packed experts \(fp8\) in a layout that is read only unpacked: 0.rows"):
        expert_map(tmp_path, rows, quantization)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=str)
def test_scales_that_cannot_be_right(dtype):
    good = np.array([[1e-5, 2.0], [0.0, 3.0]], dtype)
    assert scale_fault(good) is None
    assert scale_fault(np.zeros((2, 2), dtype)) == "all zero"
    for value, wanted in ((np.nan, "NaN"), (np.inf, "infinite"), (-np.inf, "infinite or negative"), (-1, "negative")):
        bad = good.copy()
        bad[1, 1] = value
        assert scale_fault(bad) == wanted
    good[1, 0] = -0.0
    assert scale_fault(good) is None
    good.flags.writeable = False
    assert scale_fault(np.zeros((0, 2), dtype)) is None


def test_powers_that_are_no_numbers():
    assert scale_fault(np.array([[0, 254]], np.uint8)) is None
    assert scale_fault(np.array([[0, 255]], np.uint8)) == "NaN"
    assert scale_fault(np.array([[0, 255]], np.uint8).view(E8M0)) == "NaN"
