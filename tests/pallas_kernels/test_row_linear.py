"""`row_linear`: the kernel and the plain path against NumPy in float64, over odd sizes and all that it may carry."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.row_linear import row_linear
from pallas_kernels.row_linear.arg_specs import ARG_SPECS
from pallas_kernels.row_linear.kernel import PROGRAMS, column_block, row_tiles
from pallas_kernels.row_linear.kernel import row_linear as with_tiles
from pallas_kernels.row_norm import NORM_KINDS, RowNorm


def operands(n_out, n_in, dtype=np.float32, *, norm=None, bias=False, residual=False, gated=False, seed=0):
    rng = np.random.default_rng([n_out, n_in, seed])
    rows = 2 * n_out if gated else n_out

    def draw(*shape, scale=1.0):
        return jnp.asarray(rng.standard_normal(shape) * scale, dtype)

    return dict(
        x=draw(n_in, scale=3.0),
        weight=draw(rows, n_in, scale=n_in**-0.5),
        norm=norm and RowNorm(1e-5, norm),
        norm_weight=draw(n_in) if norm else None,
        bias=draw(rows) if bias else None,
        residual=draw(n_out) if residual else None,
        gated=gated,
    )


def wide(x, weight, norm, norm_weight, bias, residual, gated):
    """(y, n) in float64; n is rounded as the layers round it."""
    dtype = x.dtype
    x, weight, norm_weight, bias, residual = (
        None if a is None else np.asarray(a, np.float64) for a in (x, weight, norm_weight, bias, residual)
    )
    n = x
    if norm:
        r = x / np.sqrt(np.mean(x**2) + norm.eps)
        if norm.kind == "narrow":
            r = np.asarray(jnp.asarray(r, jnp.float32).astype(dtype), np.float64)
        n = r * (1 + norm_weight if norm.kind == "zero_centred" else norm_weight)
        n = np.asarray(jnp.asarray(n, jnp.float32).astype(dtype), np.float64)
    y = weight @ n + (0 if bias is None else bias)
    if gated:
        gate, up = np.split(y, 2)
        y = gate / (1 + np.exp(-gate)) * up
    return y if residual is None else residual + y, n


def check(given, implementation="interpret", **tiles):
    if tiles:
        order = ("x", "weight", "norm", "norm_weight", "bias", "residual", "gated")
        y, n = with_tiles(*(given[name] for name in order), tiles=tiles, interpret=True)
    else:
        y, n = row_linear(**given, implementation=implementation)
    dtype = given["x"].dtype
    assert (y.dtype, n.dtype) == (dtype, dtype)
    expected = wide(**given)
    tolerance = 1e-5 if dtype == jnp.float32 else 4e-2
    np.testing.assert_allclose(np.float64(y), expected[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(np.float64(n), expected[1], rtol=1e-6 if dtype == jnp.float32 else 1e-2)


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("norm", [None, *NORM_KINDS])
def test_norms(norm, dtype, implementation):
    check(operands(37, 200, dtype, norm=norm), implementation)


@settings(deadline=None, max_examples=12)
@given(
    st.sampled_from([1, 3, 16, 37]),
    st.sampled_from([1, 7, 64, 300]),
    st.sampled_from([None, "narrow", "zero_centred"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_odd_sizes_and_all_that_it_carries(n_out, n_in, norm, bias, residual, gated):
    check(operands(n_out, n_in, norm=norm, bias=bias, residual=residual, gated=gated))


@pytest.mark.parametrize("tiles", [dict(block_out=1), dict(block_out=16), dict(block_in=64), dict(block_in=1024)])
def test_tiles(tiles):
    check(operands(37, 200, norm="wide", bias=True, residual=True, gated=True), **tiles)


@pytest.mark.parametrize("name, bad", [("x", np.nan), ("x", np.inf), ("weight", np.nan), ("norm_weight", np.nan)])
def test_nan_and_inf_propagate(name, bad):
    given = operands(5, 70, norm="narrow")
    index = (2, 3) if name == "weight" else (3,)
    y, _ = row_linear(**{**given, name: given[name].at[index].set(bad)}, implementation="interpret")
    clean, _ = row_linear(**given, implementation="interpret")
    if name == "weight":
        assert np.isnan(y).tolist() == [False, False, True, False, False]
        np.testing.assert_array_equal(np.delete(y, 2), np.delete(clean, 2))
    else:
        assert np.isnan(y).all()


def test_a_wider_weight_than_the_row():
    given = operands(6, 40, "bfloat16")
    given["weight"] = given["weight"].astype(jnp.float32)
    check(given)


@pytest.mark.parametrize("spec", ARG_SPECS, ids=lambda spec: f"{spec.model} {spec.matrix}")
def test_default_tiles_fill_the_card_and_waste_little(spec):
    n_out = spec.N // 2 if spec.gated else spec.N
    tiles = row_tiles(n_out, spec.D, 2, spec.gated)
    assert tiles["block_out"] == 1 or -(-n_out // tiles["block_out"]) >= PROGRAMS
    assert -(-spec.D // tiles["block_in"]) * tiles["block_in"] <= 1.1 * spec.D


def test_column_blocks_are_powers_of_two():
    for n_in in (1, 5, 64, 2880, 7168, 10944):
        block = column_block(n_in)
        assert block & (block - 1) == 0 and block <= 4096


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(implementation="cuda"), "implementation = 'cuda'"),
        (dict(weight=jnp.zeros((4, 5))), r"weight \(4, 5\)"),
        (dict(weight=jnp.zeros((3, 6)), gated=True), "as many rows"),
        (dict(norm=RowNorm(1e-5)), r"norm_weight None: must be \(6,\)"),
        (dict(norm_weight=jnp.zeros(6)), r"norm_weight \(6,\): must be None"),
        (dict(bias=jnp.zeros(6)), r"bias \(6,\): must be \(4,\)"),
        (dict(residual=jnp.zeros(4), gated=True), r"residual \(4,\): must be \(2,\)"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        row_linear(**{**dict(x=jnp.zeros(6), weight=jnp.zeros((4, 6)), implementation="interpret"), **change})


@pytest.mark.parametrize("tiles, message", [(dict(rows=2), "no parameter rows"), (dict(block_in=48), "block_in.*48")])
def test_bad_tiles_are_refused(tiles, message):
    with pytest.raises(ValueError, match=message):
        check(operands(4, 6), **tiles)


@pytest.mark.parametrize("kwargs, message", [(dict(eps=0), "eps = 0"), (dict(eps=1e-6, kind="flat"), "kind = 'flat'")])
def test_bad_norms_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        RowNorm(**kwargs)
