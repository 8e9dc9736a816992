"""Products with packed dense weights: all implementations against a float64 definition, at ragged and tiny shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from format_values import E4M3, random_parts, values
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.dequant_gemm import dequant_gemm, kernel, without_kernel
from pallas_kernels.dequant_gemm.arg_specs import ARG_SPECS, ROWS
from pallas_kernels.dequant_gemm.weights import least_columns, most_columns
from pallas_kernels.formats import FP8, INT4, MXFP4, Dense, Format

IMPLEMENTATIONS = ("interpret", "xla")
# Widths: within a step, whole steps, partly filled steps, words and blocks.
WIDTHS = {
    Dense(): (1, 33, 160),
    FP8(): (7, 130, 256),
    FP8(16): (16, 50),
    FP8(48): (97,),
    INT4(32): (32, 96),
    INT4(128, zeros=True): (128, 384),
    INT4(48, zeros=True): (48, 480),
    INT4(64, order=True): (128,),
    INT4(16, zeros=True, order=True): (160,),
    MXFP4(): (32, 160, 256),
}
SMALL = dict(block_rows=16, block_out=16, unroll=1, splits=1, num_warps=1, num_stages=1)


def problem(form, M, N, D, dtype, seed=0, bias=True):
    """(x, parts, bias) in NumPy, of outputs about 1."""
    rng = np.random.default_rng([seed, M, N, D])
    parts = random_parts(rng, form, (N,), D, D**-0.5, "float32")
    x = rng.normal(size=(M, D)).astype(jnp.dtype(dtype))
    return x, parts, rng.normal(size=N).astype(np.float32) if bias else None


def definition(form, x, parts, bias):
    """y [M, N] in float64; weights that the kernel rounds to the dtype of x are rounded."""
    N, D = parts[""].shape[0], x.shape[1]
    w = values(form, parts, (N,), D)
    if isinstance(form, Dense | MXFP4):
        w = w.astype(np.float32).astype(x.dtype).astype(np.float64)
    with np.errstate(invalid="ignore"):
        y = x.astype(np.float64) @ w.T
        return y if bias is None else y + bias.astype(np.float64)


def check(y, form, x, parts, bias, implementation="interpret"):
    """Rounding of sums in fp32, of weights that plain XLA decodes to x's dtype, and of the output."""
    want = definition(form, x, parts, bias)
    assert y.shape == want.shape
    weight = 0 if implementation == "interpret" else jnp.finfo(x.dtype).eps
    out = jnp.finfo(y.dtype).eps / 2 if y.dtype != jnp.float32 else 0
    room = (1e-5 + weight) * np.abs(want).max() + (out + 1e-6) * np.abs(want)
    assert (np.abs(np.asarray(y, np.float64) - want) <= room).all()


def to_device(parts):
    return {suffix: jnp.asarray(part) for suffix, part in parts.items()}


def run(form, x, parts, bias=None, **options):
    bias = None if bias is None else jnp.asarray(bias)
    return dequant_gemm(jnp.asarray(x), to_device(parts), form, bias=bias, **options)


def run_tiles(form, x, parts, bias=None, out_dtype="float32", **tiles):
    bias = None if bias is None else jnp.asarray(bias)
    tiles = SMALL | tiles
    return kernel.dequant_gemm(jnp.asarray(x), to_device(parts), form, bias, out_dtype, tiles=tiles, interpret=True)


# ----------------------------------------------------------------------------------------------------------- the result


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", WIDTHS, ids=str)
def test_every_format(form, implementation):
    """Through the public function: default tiles, wider than N and M, and a bias."""
    x, parts, bias = problem(form, 3, 21, WIDTHS[form][-1], "bfloat16")
    y = run(form, x, parts, bias, implementation=implementation)
    assert y.dtype == jnp.bfloat16
    check(y, form, x, parts, bias, implementation)


@st.composite
def products(draw):
    """(format, M, N, D, dtypes, bias, tiles, seed): several tiles in each direction, none of them needs to be full."""
    form = draw(st.sampled_from(list(WIDTHS)))
    D = draw(st.sampled_from(WIDTHS[form]))
    M, N = draw(st.sampled_from([(1, 1), (2, 16), (17, 33), (16, 7), (35, 40)]))
    columns = draw(st.sampled_from([c for c in (16, 32, 64, 128) if least_columns(form) <= c <= most_columns(form)]))
    splits = draw(st.integers(1, min(4, -(-D // columns))))
    dtype = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    out_dtype = draw(st.sampled_from([dtype, "float32"]))
    unroll = draw(st.sampled_from([n for n in (1, 2, 4) if -(-D // columns) % (splits * n) == 0 or n == 1]))
    tiles = dict(block_in=columns, unroll=unroll, splits=splits, block_rows=draw(st.sampled_from([16, 32])))
    return form, M, N, D, dtype, out_dtype, draw(st.booleans()), tiles, draw(st.integers(0, 2**31))


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(products())
def test_ragged_shapes_and_tiles(case):
    form, M, N, D, dtype, out_dtype, biased, tiles, seed = case
    x, parts, bias = problem(form, M, N, D, dtype, seed, biased)
    y = run_tiles(form, x, parts, bias, out_dtype, **tiles)
    assert y.dtype == out_dtype
    check(y, form, x, parts, bias)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "form", [FP8(128), INT4(128), INT4(16, zeros=True), INT4(32, zeros=True, order=True), MXFP4()], ids=str
)
def test_every_code_in_every_place(form, dtype):
    """x is the identity, so y is W: all codes of a word's places, all zero points, each value by itself."""
    D, N = 128, 64
    rng = np.random.default_rng(4)
    parts = random_parts(rng, form, (N,), D, 1.0, "float32")
    if isinstance(form, FP8):
        codes = (np.arange(N)[:, None] * 4 + np.arange(D)[None, :] % 4 + np.arange(D)[None, :] // 4 * 5) % 256
        codes[np.isnan(E4M3[codes])] = 0
        parts[""] = codes.astype(np.uint8).view(np.uint32)
        assert len(np.unique(codes)) >= 254
    w = values(form, parts, (N,), D)
    x = np.eye(D, dtype=jnp.dtype(dtype))
    y = run_tiles(form, x, parts, block_rows=128, block_out=64)
    wanted = w.astype(np.float32)
    if isinstance(form, MXFP4):
        wanted = wanted.astype(jnp.dtype(dtype)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(y).T, wanted)


@pytest.mark.parametrize("byte", [1, 110, 241, 252])
def test_scales_of_mxfp4_over_their_range(byte):
    """No step in between overflows or loses bits. (Byte 0 makes subnormal numbers, which depend on the device.)"""
    parts = {"": np.full((16, 4), 0x76543210, np.uint32), "_scale": np.full((16, 1), byte * 0x01010101, np.uint32)}
    y = np.asarray(run_tiles(MXFP4(), np.eye(32, dtype=jnp.bfloat16), parts, block_in=32))
    wanted = values(MXFP4(), parts, (16,), 32).T
    normal = np.abs(wanted) >= 2.0**-126
    assert normal.any()
    np.testing.assert_array_equal(y[normal], wanted[normal])


def test_matrices_of_whole_blocks_stack():
    for form in (FP8(16), INT4(32, zeros=True), MXFP4()):
        x, first, _ = problem(form, 2, 32, 64, "float32", seed=1)
        _, second, _ = problem(form, 2, 19, 64, "float32", seed=2)
        stacked = {suffix: np.concatenate([first[suffix], second[suffix]]) for suffix in first}
        y = run_tiles(form, x, stacked)
        check(y[:, :32], form, x, first, None)
        check(y[:, 32:], form, x, second, None)


# ------------------------------------------------------------------------------------------------------ the same bits


@pytest.mark.parametrize("form", [Dense(), FP8(), INT4(64, zeros=True)], ids=str)
def test_a_row_does_not_depend_on_the_others(form):
    """At 1, 5 and 16 rows, whatever the others hold, also where the columns are shared out."""
    x, parts, bias = problem(form, 16, 40, 256, "bfloat16")
    tiles = dict(block_in=64, splits=2)
    alone = np.asarray(run_tiles(form, x[:1], parts, bias, **tiles))
    junk = np.concatenate([x[:1], np.full_like(x[1:5], np.nan)])
    for others in (junk, x):
        y = np.asarray(run_tiles(form, others, parts, bias, **tiles))
        assert y[:1].tobytes() == alone.tobytes()


def test_rows_of_one_class_have_the_same_tiles():
    for M, like in ((1, 16), (5, 16), (17, 32), (100, 128), (3000, 4096)):
        assert kernel.gemm_tiles(576, 7168, M, FP8()) == kernel.gemm_tiles(576, 7168, like, FP8())
        assert kernel.gemm_key(576, 7168, M, FP8()) == kernel.gemm_key(576, 7168, like, FP8())
    assert kernel.gemm_key(576, 7168, 16, FP8()) != kernel.gemm_key(576, 7168, 17, FP8())


def test_shares_of_the_columns_are_added_in_order():
    """Bit for bit the sum of products with the columns of each share alone, first to last."""
    form, D = FP8(32), 160
    x, parts, bias = problem(form, 2, 24, D, "float32")
    y = run_tiles(form, x, parts, bias, block_in=32, splits=3)
    total = np.zeros((2, 24), np.float32)
    for first, end in ((0, 1), (1, 3), (3, 5)):  # of five steps
        share = {"": parts[""][:, first * 8 : end * 8], "_scale": parts["_scale"][:, first:end]}
        total += np.asarray(run_tiles(form, x[:, first * 32 : end * 32], share, block_in=32))
    assert (total + bias).tobytes() == np.asarray(y).tobytes()


# --------------------------------------------------------------------------------------------- what is not finite


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", [Dense(), FP8(16), INT4(32, zeros=True), MXFP4()], ids=str)
def test_nan_and_infinity_reach_the_output(form, implementation):
    """Those of x spoil its row alone, those of a weight or scale its output alone, and none gets lost."""
    x, parts, _ = problem(form, 4, 20, 64, "float32")
    x[1, 5], x[2, 60] = np.nan, np.inf
    if isinstance(form, Dense):
        parts[""][3, 7] = np.nan
    elif isinstance(form, FP8):
        parts[""][3, 2] |= 0x7F00  # the two codes of NaN
        parts[""][17, 15] |= 0xFF000000
        parts["_scale"][0, 1] = np.inf
    elif isinstance(form, INT4):
        parts["_scale"][3, 1] = np.nan
    else:
        parts["_scale"][3, 0] |= 0xFF00
    want = definition(form, x, parts, None)
    y = np.asarray(run(form, x, parts, implementation=implementation))
    np.testing.assert_array_equal(np.isfinite(y), np.isfinite(want))
    assert np.isnan(y[1]).all() and not np.isfinite(y[2]).any() and not np.isfinite(y[:, 3]).any()
    assert np.isfinite(y[[0, 3]][:, [16, 19]]).all()


@pytest.mark.parametrize("form", [FP8(16), MXFP4()], ids=str)
def test_what_follows_the_last_value_is_not_read(form):
    """Bytes of the last word of a row, and of its scales, that belong to no value."""
    D = 50 if isinstance(form, FP8) else 96
    x, parts, _ = problem(form, 2, 20, D, "float32")
    name, junk = ("", 0x7FFF0000) if isinstance(form, FP8) else ("_scale", 0xFF000000)
    parts[name][:, -1] |= junk
    check(run_tiles(form, x, parts, block_in=most_columns(form)), form, x, parts, None)


# ------------------------------------------------------------------------------------------------------------ limits


@pytest.mark.parametrize("rows", ROWS)
def test_default_tiles_fit_a_multiprocessor(rows):
    """Stages in 227 KiB of shared memory, sums in half of a thread's registers, and no more programs than help."""
    for spec in ARG_SPECS:
        for itemsize in (2, 4):
            t = kernel.gemm_tiles(spec.N, spec.D, rows, spec.form, itemsize)
            bits = {"dense": 16, "fp8": 8}.get(spec.form.name, 4)
            stage = t["unroll"] * t["block_in"] * (t["block_out"] * bits // 8 + t["block_rows"] * itemsize)
            assert t["num_stages"] * stage <= 227 * 1024, spec
            assert t["block_out"] * t["block_rows"] <= 128 * 32 * t["num_warps"], spec
            programs = -(-spec.N // t["block_out"]) * -(-rows // t["block_rows"]) * t["splits"]
            assert t["splits"] == 1 or programs <= 4 * kernel.PROGRAMS, spec
            assert t["splits"] * 512 <= max(512, spec.D), spec
            assert t["unroll"] == 1 or t["unroll"] * t["block_in"] == 128, spec
            kernel.resolved(t, None, spec.form, spec.D)


# ------------------------------------------------------------------------------------------------------------ refusal


def test_formats_without_a_kernel():
    class Other(Format):
        name = "other"
        suffixes = row_tensors = decode = encode = None

    assert all(without_kernel(form) is None for form in WIDTHS)
    assert without_kernel(FP8(24)) == "the kernel needs a multiple of 16 columns a scale, fp8 has 24"
    assert without_kernel(INT4(8)) == "the kernel needs a multiple of 16 columns a scale, int4 has 8"
    assert without_kernel(Other()) == "no kernel reads other weights"
    form = INT4(8)
    x, parts, _ = problem(form, 2, 16, 32, "float32")
    with pytest.raises(ValueError, match="implementation = 'interpret': .* int4 has 8; use implementation='xla'"):
        run(form, x, parts, implementation="interpret")
    check(run(form, x, parts, implementation="xla"), form, x, parts, None, "xla")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "cuda"}, "implementation = 'cuda': must be one of pallas, interpret, xla"),
        ({"x": np.zeros((2, 1, 64), np.float32)}, r"x of shape \(2, 1, 64\) .* must be \[M, D\]"),
        ({"x": np.zeros((2, 64), np.int32)}, "dtype int32: must be .* bfloat16, float16, float32"),
        ({"x": np.zeros((0, 64), np.float32)}, r"x of shape \(0, 64\)"),
        ({"x": np.zeros((2, 96), np.float32)}, r"parts\[''\] of shape \(16, 8\) .* weights \[16, 96\] have \(16, 12\)"),
        ({"x": np.zeros((2, 65), np.float32)}, "an INT4 row of 65 values"),
        ({"parts": {"": np.zeros((16, 8), np.uint32)}}, r"parts \[''\]: int4 weights have \['', '_scale'\]"),
        ({"_scale": np.zeros((16, 2), np.int32)}, r"parts\['_scale'\] .* int32: .* a floating dtype"),
        ({"": np.zeros((16, 8), np.int32)}, r"parts\[''\] .* dtype int32: .* uint32"),
        ({"bias": np.zeros(15, np.float32)}, r"bias of shape \(15,\) .* must be \[16\]"),
        ({"bias": np.zeros(16, np.int32)}, "bias .* int32"),
        ({"out_dtype": "float16"}, "out_dtype = float16: must be float32, as x, or float32"),
    ],
)
def test_operands_that_do_not_fit(change, message):
    x, parts, _ = problem(INT4(32), 2, 16, 64, "float32")
    parts = change.pop("parts", parts) | {suffix: change.pop(suffix) for suffix in ("", "_scale") if suffix in change}
    options = {"implementation": "interpret"} | change
    with pytest.raises(ValueError, match=message):
        run(INT4(32), options.pop("x", x), parts, options.pop("bias", None), **options)


@pytest.mark.parametrize(
    ("form", "tiles", "message"),
    [
        (FP8(64), {"units": 2}, "no parameter units; they are block_rows, block_out, block_in"),
        (FP8(64), {"block_in": 128}, r"tiles\['block_in'\] = 128 for fp8 weights: .* power of two from 16 to 64"),
        (MXFP4(), {"block_in": 16}, "from 32 to 128"),
        (FP8(64), {"block_rows": 8}, r"tiles\['block_rows'\] = 8 .* from 16 to 256"),
        (FP8(64), {"block_out": 48}, r"tiles\['block_out'\] = 48"),
        (FP8(64), {"splits": 5}, r"tiles\['splits'\] = 5: a row of 4 steps has 1 to 4 shares"),
        (FP8(64), {"unroll": 3}, r"tiles\['unroll'\] = 3: must divide each of 1 equal shares of 4 steps"),
        (FP8(64), {"unroll": 2, "splits": 4}, r"tiles\['unroll'\] = 2: must divide each of 4 equal shares"),
        (FP8(64), {"splits": 0}, r"tiles\['splits'\] = 0"),
    ],
)
def test_tiles_out_of_range(form, tiles, message):
    x, parts, _ = problem(form, 2, 16, 128, "float32")
    with pytest.raises(ValueError, match=message):
        run_tiles(form, x, parts, **tiles)


def test_it_traces_under_jit_with_the_parts_as_operands():
    """As a model calls it: nothing is read at trace time."""
    form = INT4(32, zeros=True, order=True)
    x, parts, bias = problem(form, 3, 16, 64, "bfloat16")
    call = jax.jit(functools.partial(dequant_gemm, form=form, implementation="interpret"))
    check(call(x=jnp.asarray(x), parts=to_device(parts), bias=jnp.asarray(bias)), form, x, parts, bias)
