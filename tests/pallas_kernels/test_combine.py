"""`combine`: the kernel and the plain path against NumPy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.combine import IMPLEMENTATIONS, combine

HOW = ("interpret", "xla")


def operands(U, B, K, D, seed=0, weights="float32"):
    rng = np.random.default_rng([U, B, K, D, seed])
    return (
        jnp.asarray(rng.standard_normal((U, B, D)), jnp.float32),
        jnp.asarray(rng.integers(0, U, (B, K)), jnp.int32),
        jnp.asarray(rng.random((B, K)), weights),
        jnp.asarray(rng.random(B) < 0.7),
    )


def wide(y, entry, weights, live):
    y, weights = np.asarray(y, np.float64), np.asarray(weights, np.float64)
    rows = np.arange(y.shape[1])
    total = sum(weights[:, k, None] * y[np.asarray(entry)[:, k], rows] for k in range(weights.shape[1]))
    return np.where(np.asarray(live)[:, None], total, 0)


@given(
    st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 24, 128, 200]), st.integers(0, 9),
    st.sampled_from(["float32", "bfloat16"]), st.sampled_from([None, "float32", "bfloat16", "float16"]),
)  # fmt: skip
@settings(max_examples=25)
def test_against_float64(U, B, K, D, seed, weights, residual):
    given = operands(U, B, K, D, seed, weights)
    want = wide(*given)
    before = None
    if residual is not None:
        before = jnp.asarray(np.random.default_rng(seed).standard_normal((B, D)), residual)
        want = np.float64(before) + want
    for how in HOW:
        got = combine(*given, before, implementation=how)
        assert got.dtype == (residual or "float32") and got.shape == (B, D)
        tolerance = 1e-5 if got.dtype == jnp.float32 else 3e-2
        np.testing.assert_allclose(np.float64(got), want, rtol=tolerance, atol=tolerance, err_msg=how)


@pytest.mark.parametrize("how", HOW)
def test_a_tokens_experts_are_summed_in_its_order(how):
    """(1e8 + 1) - 1e8 is 0 in float32 and (1e8 - 1e8) + 1 is 1: the order of the outputs shows."""
    y = jnp.zeros((3, 1, 1), jnp.float32).at[:, 0, 0].set(jnp.array([1e8, 1.0, -1e8]))
    for order, want in (((0, 1, 2), 0.0), ((0, 2, 1), 1.0)):
        given = y, jnp.array([order], jnp.int32), jnp.ones((1, 3)), jnp.array([True])
        assert float(combine(*given, implementation=how)[0, 0]) == want


@pytest.mark.parametrize("how", HOW)
def test_the_sum_is_rounded_before_it_is_added(how):
    """Next to 1 bfloat16 has steps of 2^-7: each of the two is too small to go up one, their sum is not."""
    y = jnp.full((1, 1, 1), 1 + 2.0**-8 - 2.0**-12, jnp.float32)
    given = y, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1)), jnp.array([True])
    before = jnp.full((1, 1), 2.0**-10, jnp.bfloat16)
    want = before + y[0].astype(jnp.bfloat16)
    assert combine(*given, before, implementation=how).tolist() == want.tolist()
    assert want.tolist() != (before.astype(jnp.float32) + y[0]).astype(jnp.bfloat16).tolist()


@pytest.mark.parametrize("how", HOW)
def test_without_entries_they_are_in_order(how):
    y, _, weights, live = operands(4, 2, 3, 40)
    given = y, jnp.arange(3, dtype=jnp.int32) + jnp.zeros((2, 1), jnp.int32), weights, live
    before = jnp.ones((2, 40), jnp.bfloat16)
    for residual in (None, before):
        want = combine(*given, residual, implementation=how)
        assert combine(y, None, weights, live, residual, implementation=how).tolist() == want.tolist()


@pytest.mark.parametrize("how", HOW)
def test_a_dead_row_gets_nothing_even_if_its_values_are_not_finite(how):
    y = jnp.full((1, 2, 3), jnp.nan)
    given = y, jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1)), jnp.zeros(2, bool)
    before = jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)
    assert np.asarray(combine(*given, implementation=how)).tolist() == np.zeros((2, 3)).tolist()
    assert combine(*given, before, implementation=how).tolist() == before.tolist()
    alive = combine(*given[:3], jnp.ones(2, bool), before, implementation=how)
    assert bool(jnp.isnan(alive).all())


def test_bad_arguments_are_named():
    y, entry, weights, live = operands(3, 2, 2, 8)
    with pytest.raises(ValueError, match=f"'cuda': must be one of {', '.join(IMPLEMENTATIONS)}"):
        combine(y, entry, weights, live, implementation="cuda")
    with pytest.raises(ValueError, match=r"entry \(1, 2\)"):
        combine(y, entry[:1], weights[:1], live, implementation="xla")
    with pytest.raises(ValueError, match=r"live \(1,\)"):
        combine(y, entry, weights, live[:1], implementation="xla")
    with pytest.raises(ValueError, match=r"weights \(2, 2\): without entry K is at most the 1 experts"):
        combine(y[:1], None, weights, live, implementation="xla")
    with pytest.raises(ValueError, match=r"residual \(2, 7\): must be \(2, 8\)"):
        combine(y, entry, weights, live, jnp.zeros((2, 7)), implementation="xla")
