"""Norms beside the plain RMS norm, against their formulas in float64."""

import jax.numpy as jnp
import numpy as np

from moe_jax.layers.norm import LayerNorm, Normed, RMSNorm, WideRMSNorm, ZeroCentredRMSNorm, rms_norm, value_of
from pallas_kernels.row_norm import RowNorm

X = np.random.default_rng(0).normal(1.0, 2.0, size=(3, 64))
W = np.random.default_rng(1).normal(1.0, 0.5, size=64)


def test_layer_norm():
    norm = LayerNorm(64, jnp.float32, eps=0.1)
    norm.weight[...] = jnp.asarray(W, jnp.float32)
    centred = X - X.mean(-1, keepdims=True)
    wanted = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 0.1) * W
    np.testing.assert_allclose(norm(jnp.asarray(X, jnp.float32)), wanted, atol=1e-5)
    assert norm(jnp.asarray(X, jnp.bfloat16)).dtype == jnp.bfloat16


def test_wide_rms_norm_scales_before_it_rounds():
    x, w = jnp.asarray(X, jnp.bfloat16), jnp.asarray(W, jnp.bfloat16)
    norm = WideRMSNorm(64, jnp.bfloat16, eps=1e-5)
    norm.weight[...] = w
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(w, np.float64)
    wide = np.asarray(norm(x), np.float64)
    np.testing.assert_array_equal(wide, np.asarray(jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16), np.float64))
    rounded_twice = np.asarray(rms_norm(x, w, 1e-5), np.float64)
    assert np.abs(rounded_twice - exact).mean() > np.abs(wide - exact).mean()


def test_a_norm_is_computed_once_and_only_when_it_is_read():
    x, calls = jnp.asarray(X, jnp.float32), []
    normed = Normed(x, lambda x: calls.append(x) or 2 * x)
    assert (normed.shape, normed.dtype, normed.ndim) == (x.shape, x.dtype, 2) and not calls
    np.testing.assert_array_equal(normed.value(), 2 * x)
    np.testing.assert_array_equal(value_of(normed), normed.astype(jnp.float32))
    assert len(calls) == 1 and value_of(x) is x


def test_a_kept_value_takes_the_norms_place():
    x = jnp.asarray(X, jnp.float32)
    normed = Normed(x, RMSNorm(64, jnp.float32, eps=1e-5))
    assert normed.row_norm == RowNorm(1e-5, "narrow")
    normed.keep(3 * x.reshape(-1))
    np.testing.assert_array_equal(normed.value(), 3 * x)
    assert normed.row_norm is None


def test_kernels_know_the_rms_norms_by_kind():
    x = jnp.asarray(X, jnp.float32)
    kinds = {norm: Normed(x, norm(64, jnp.float32, eps=1e-5)).row_norm for norm in (WideRMSNorm, ZeroCentredRMSNorm)}
    assert [row.kind for row in kinds.values()] == ["wide", "zero_centred"]
    assert Normed(x, LayerNorm(64, jnp.float32, eps=1e-5)).row_norm is None
