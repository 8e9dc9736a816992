"""Every format against its definition in float64: all codes, ragged sizes, stacked matrices, encoding, refusals."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from format_values import E2M1, E4M3, random_parts, values
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.formats import FP8, INT4, MXFP4, Dense, fp8, int4, mxfp4

FORMATS = (
    Dense(),
    MXFP4(),
    FP8(),
    FP8(8),
    INT4(32),
    INT4(16, zeros=True),
    INT4(32, order=True),
    INT4(8, zeros=True, order=True),
)
decode = jax.jit(
    lambda parts, form, outs, width, dtype: form.decode(parts, outs, width, dtype), static_argnums=(1, 2, 3, 4)
)


def read(parts, form, outs, width, dtype="float32"):
    return np.asarray(decode(parts, form, outs, width, jnp.dtype(dtype)))


def rounded(w, dtype):
    """float64 to float32, then to `dtype`."""
    with np.errstate(over="ignore"):
        return w.astype(np.float32).astype(jnp.dtype(dtype))


def same(actual, wanted):
    """Equal bits, but for the bits of NaN."""
    assert actual.shape == wanted.shape and actual.dtype == wanted.dtype
    nan = np.isnan(wanted.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(actual.astype(np.float32)), nan)
    bits = f"u{wanted.dtype.itemsize}"
    np.testing.assert_array_equal(np.where(nan, 0, actual.view(bits)), np.where(nan, 0, wanted.view(bits)))


# ------------------------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_mxfp4_byte_under_every_scale(dtype):
    packed = np.broadcast_to(np.arange(256, dtype=np.uint8), (256, 256))
    scales = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None], (256, 16))
    parts = {"": np.ascontiguousarray(packed).view(np.uint32), "_scale": np.ascontiguousarray(scales).view(np.uint32)}
    got = read(parts, MXFP4(), (256,), 512, dtype)
    byte = np.arange(256)
    codes = np.stack([byte & 15, byte >> 4], axis=-1).reshape(-1)  # the lower four bits come first
    wanted = E2M1[codes] * 2.0 ** (np.arange(256)[:, None] - 127.0)
    wanted[255] = np.nan
    # Subnormal values depend on the device.
    normal = (np.abs(wanted) >= 2.0**-126) | (wanted == 0) | np.isnan(wanted)
    assert normal.all(axis=1).sum() >= 250
    same(np.where(normal, got, 0).astype(got.dtype), rounded(np.where(normal, wanted, 0), dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_fp8_byte(dtype):
    parts = {"": np.arange(256, dtype=np.uint8)[None].view(np.uint32), "_scale": np.ones((1, 2), np.float32)}
    same(read(parts, FP8(128), (1,), 256, dtype), rounded(E4M3[None], dtype))


@pytest.mark.parametrize("zero", [0, 8, 15])
def test_every_int4_code(zero):
    words = (np.arange(16) << 4 * (np.arange(16) % 8)).reshape(2, 8).sum(axis=1).astype(np.uint32)[None]
    parts = {"": words, "_scale": np.array([[0.5, -3]], np.float16), "_zero": np.full((1, 1), zero * 0x11, np.uint32)}
    wanted = (np.arange(16) - zero) * np.repeat([0.5, -3], 8)
    same(read(parts, INT4(8, zeros=True), (1,), 16) + 0, rounded(wanted[None], "float32") + 0)


@st.composite
def stored(draw):
    """(format, outs, width, seed): few widths, as each is a compilation; odd sizes where the format allows them."""
    form = draw(st.sampled_from(FORMATS))
    outs = draw(st.sampled_from([(1,), (5, 5), (8, 3), (16, 16), (9, 1)]))
    width = {"dense": [7, 33], "fp8": [1, 13, 130], "mxfp4": [32, 96, 160], "int4": [32, 96]}[form.name]
    return form, outs, draw(st.sampled_from(width)), draw(st.integers(0, 2**31))


@settings(deadline=None, max_examples=25)
@given(stored())
def test_ragged_and_stacked_matrices(case):
    form, outs, width, seed = case
    rng = np.random.default_rng(seed)
    rows = [random_parts(rng, form, outs, width, dtype="float16") for _ in range(2)]
    assert tuple(rows[0]) == form.suffixes
    parts = {suffix: np.stack([row[suffix] for row in rows]) for suffix in form.suffixes}  # a leading axis of rows
    wanted = np.stack([values(form, row, outs, width) for row in rows])
    got = read(parts, form, outs, width)
    assert got.shape == (2, sum(outs), width)
    # A product of two rounded numbers: float32 rounds it once, as the cast of the float64 product does. +0 for -0.
    same(got + 0, rounded(wanted, "float32") + 0)


@pytest.mark.parametrize("form", [FP8(8), INT4(16), INT4(16, zeros=True, order=True)])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scales_that_are_not_finite_spoil_their_own_values_only(form, bad):
    rng = np.random.default_rng(3)
    parts = random_parts(rng, form, (8, 8), 32)
    parts["_scale"][1, 1] = bad
    wanted = values(form, parts, (8, 8), 32)
    assert 0 < (~np.isfinite(wanted)).sum() < wanted.size
    same(read(parts, form, (8, 8), 32) + 0, rounded(wanted, "float32") + 0)


@pytest.mark.parametrize("form", [f for f in FORMATS if not isinstance(f, Dense)], ids=str)
def test_values_are_rounded_once(form):
    """bfloat16 values are the float32 ones rounded: no step in between is narrower."""
    parts = random_parts(np.random.default_rng(5), form, (6, 6), 64)
    wide = read(parts, form, (6, 6), 64)
    same(read(parts, form, (6, 6), 64, "bfloat16"), wide.astype(ml_dtypes.bfloat16))


def test_lanes_are_the_same_values():
    """What the kernels decode in registers, over all codes in every lane: the values of the definition."""
    codes = np.arange(2**16, dtype=np.uint32)
    words = np.concatenate([codes, codes << 16, codes ^ codes << 16])
    nibbles, bytes_ = (words[:, None] >> np.arange(0, 32, bits, dtype=np.uint32) for bits in (4, 8))
    lanes = np.stack(jax.jit(mxfp4.lane_values)(words), axis=-1)
    np.testing.assert_array_equal(lanes * mxfp4.UNIT, E2M1[nibbles & 15])
    lanes = np.stack(jax.jit(lambda words: int4.lane_values(words, np.uint32(8)))(words), axis=-1)
    np.testing.assert_array_equal(lanes, (nibbles & 15).astype(np.int64) - 8)
    lanes = np.stack(jax.jit(fp8.lane_values)(words), axis=-1)
    wanted = E4M3[bytes_ & 255]
    np.testing.assert_array_equal(np.where(np.isnan(wanted), 0, lanes * fp8.UNIT), np.nan_to_num(wanted))
    np.testing.assert_array_equal(jax.jit(fp8.has_nan)(words), np.isnan(wanted).any(axis=-1))
    factors = np.asarray(mxfp4.block_factors(np.arange(256, dtype=np.uint32)))
    assert np.isnan(factors[255]) and factors[0].view(np.uint32) == 1 << 22
    np.testing.assert_array_equal(factors[1:255], 2.0 ** (np.arange(1, 255) - 127.0))


# ------------------------------------------------------------------------------------------------------------- encoding


def encoded(form, w):
    """float64 values of the encoded matrix, by the definition; its parts have the shapes that `row_tensors` says."""
    parts = form.encode(w)
    tensors = form.row_tensors(w.shape[:1], w.shape[1])
    assert tuple(parts) == tuple(tensors) == form.suffixes
    for suffix, (shape, dtype) in tensors.items():
        assert parts[suffix].shape == shape and parts[suffix].dtype == (dtype or w.dtype)
    return values(form, parts, w.shape[:1], w.shape[1]), parts


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_what_the_format_can_hold_is_kept(form):
    """Encoding decoded values gives them back: zeros, both signs, the ends of the range."""
    rng = np.random.default_rng(11)
    out, width = 9, 96
    if isinstance(form, MXFP4):
        w = E2M1[rng.integers(0, 16, (out, width))]
        w[:, ::32] = 6  # the block's scale is then 1, times a power of two
        w *= np.repeat(2.0 ** rng.integers(-30, 30, (out, width // 32)), 32, axis=1)
    elif isinstance(form, FP8):
        finite = E4M3[np.isfinite(E4M3)]
        w = rng.choice(finite, (out, width))
        w[:: form.block, :: form.block] = 448
        w *= 2.0**-9
    elif isinstance(form, INT4):
        low, high = (0, 15) if form.zeros else (-7, 7)
        w = rng.integers(low, high + 1, (out, width)).astype(np.float64)
        w[:, :: form.group], w[:, 1 :: form.group] = low, high
        w = (w - 3 if form.zeros else w) * 0.375
    else:
        w = rng.normal(size=(out, width))
    w = w.astype(np.float32)
    np.testing.assert_array_equal(encoded(form, w)[0], w)
    zeros = np.zeros((out, width), np.float32)
    kept, parts = encoded(form, zeros)
    np.testing.assert_array_equal(kept, zeros)
    if isinstance(form, FP8 | INT4):
        np.testing.assert_array_equal(parts["_scale"], 1)


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from([f for f in FORMATS if not isinstance(f, Dense)]),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.integers(-6, 3),
    st.integers(0, 2**31),
)
def test_no_value_is_farther_than_half_a_step(form, dtype, exponent, seed):
    rng = np.random.default_rng(seed)
    w = (rng.standard_t(3, size=(7, 64)) * 2.0**exponent).astype(jnp.dtype(dtype))
    got, parts = encoded(form, w)
    exact = w.astype(np.float64)
    error = np.abs(got - exact)
    if isinstance(form, MXFP4):
        largest = np.abs(exact).reshape(7, -1, 32).max(axis=-1)
        scale = np.repeat(2.0 ** (np.floor(np.log2(largest)) - 2), 32, axis=1)
        x = np.abs(exact) / scale
        # Steps of e2m1: 0.5 below 2, 1 below 4, 2 above, and what is above 6 saturates.
        limit = np.where(x > 6, x - 6, np.where(x < 2, 0.25, np.where(x < 4, 0.5, 1)))
        assert (error <= limit * scale).all()
    elif isinstance(form, FP8):
        scale = np.repeat(np.repeat(parts["_scale"].astype(np.float64), form.block, 0), form.block, 1)[:7, :64]
        x = np.abs(exact) / scale
        step = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(x, 1e-9))), -6) - 3)
        assert (error <= scale * step * 0.5001).all()
        assert np.nanmax(x) <= 448.001
    else:
        # Rounding the scale moves the ends of the range, 15 steps, by at most half a unit in its last place: 2^-8 of it
        # in bfloat16, whose significand has 8 bits.
        scale = np.repeat(parts["_scale"].astype(np.float64), form.group, 1)
        assert (error <= scale * (0.5 + 15 * 2.0**-8)).all()


@pytest.mark.parametrize("form", [f for f in FORMATS if not isinstance(f, Dense)], ids=str)
def test_weights_without_a_packed_form_are_refused(form):
    w = np.ones((8, 64), np.float32)
    w[2, 3], w[4, 5] = np.nan, np.inf
    with pytest.raises(ValueError, match="2 of 512 weights are NaN or infinite"):
        form.encode(w)
    with pytest.raises(ValueError, match=r"shape \(2, 8, 64\): encode one matrix"):
        form.encode(np.ones((2, 8, 64), np.float32))


# -------------------------------------------------------------------------------------------------------------- shapes


def test_parts_of_real_matrices():
    word, f32 = np.dtype(np.uint32), np.dtype(np.float32)
    assert Dense().row_tensors((768, 768), 2048) == {"": ((1536, 2048), None)}
    assert MXFP4().row_tensors((2880, 2880), 2880) == {"": ((5760, 360), word), "_scale": ((5760, 23), word)}
    assert MXFP4().row_tensors((3,), 128) == {"": ((3, 16), word), "_scale": ((3, 1), word)}
    assert FP8().row_tensors((2048, 2048), 7168) == {"": ((4096, 1792), word), "_scale": ((32, 56), f32)}
    # Each of the stacked matrices has a partial last block of its own; so has the width.
    assert FP8().row_tensors((576, 576), 1410) == {"": ((1152, 353), word), "_scale": ((10, 12), f32)}
    assert INT4(128, zeros=True, order=True).row_tensors((768, 768), 2048) == {
        "": ((1536, 256), word),
        "_scale": ((1536, 16), None),
        "_zero": ((1536, 2), word),
        "_order": ((2, 2048), np.dtype(np.int32)),
    }
    assert INT4(1408, zeros=True).row_tensors((2048,), 1408)["_zero"] == ((2048, 1), word)  # one scale a row


def test_a_format_is_a_static_argument():
    assert len({*FORMATS, Dense(), FP8(128), INT4(32, False)}) == len(FORMATS)
    assert FP8(8) != INT4(8) and MXFP4() != Dense()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MXFP4().row_tensors((3,), 100), "an MXFP4 row of 100 values: must be a multiple of 32"),
        (lambda: INT4(32).row_tensors((3,), 80), "an INT4 row of 80 values: .* and of the group, 32"),
        (lambda: INT4(4).row_tensors((3,), 12), "an INT4 row of 12 values: must be a multiple of 8"),
        (lambda: INT4(0), "group = 0: at least 1; for one scale a row give the width"),
        (lambda: INT4(-1), "group = -1: at least 1"),
        (lambda: FP8(0), "block = 0: the side of an FP8 block is at least 1"),
        (lambda: INT4(32).encode(np.ones((2, 40))), "an INT4 row of 40 values"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
