"""Norm, rope, linear, MLP and router against their formulas in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from moe_jax.layers.linear import Embedding, Linear, project
from moe_jax.layers.mlp import GatedMLP
from moe_jax.layers.norm import RMSNorm, rms_norm
from moe_jax.layers.rope import apply_rope, rope_tables
from moe_jax.layers.router import Router, top_k


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_rms_norm_scales_after_the_cast():
    x, weight = numbers(3, 8), numbers(8, seed=1)
    want = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(rms_norm(jnp.asarray(x), jnp.asarray(weight), 1e-5), want, rtol=1e-6)

    narrow, narrow_weight = jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16)
    wide = np.asarray(narrow, np.float32)
    normed = jnp.asarray(wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-5), jnp.bfloat16)
    got = rms_norm(narrow, narrow_weight, 1e-5)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, normed * narrow_weight)
    assert RMSNorm(8, jnp.float16, eps=1e-5).weight.dtype == jnp.float16


def test_rope_turns_halves_and_keeps_relative_positions():
    H, theta = 8, 1e4
    x = numbers(1, 2, 3, H)
    positions = np.array([[0, 37]])
    cos, sin = rope_tables(jnp.asarray(positions), H, theta, jnp.float32)
    got = np.asarray(apply_rope(jnp.asarray(x), cos, sin))
    angles = 37 * theta ** (-np.arange(0, H, 2) / H)
    pairs = x[0, 1, :, : H // 2] + 1j * x[0, 1, :, H // 2 :]
    turned = pairs * np.exp(1j * angles)
    np.testing.assert_array_equal(got[0, 0], x[0, 0])  # position 0 is the identity
    np.testing.assert_allclose(got[0, 1], np.concatenate([turned.real, turned.imag], axis=-1), atol=1e-5)


def test_products_accumulate_in_float32():
    """256 + 1 + 1 + ... in bfloat16 would stay 256: each 1 is less than half a unit in the last place."""
    x = jnp.ones((1, 257), jnp.bfloat16)
    weight = jnp.ones((1, 257), jnp.bfloat16).at[0, 0].set(256)
    assert project(x, weight)[0, 0] == 512
    assert project(x, weight).dtype == jnp.float32
    linear = Linear(4, 6, jnp.bfloat16, std=0.5, rngs=nnx.Rngs(0))
    assert linear.weight.shape == (6, 4) and linear(jnp.ones((2, 4), jnp.bfloat16)).dtype == jnp.bfloat16
    assert 0.2 < float(jnp.std(linear.weight[...].astype(jnp.float32))) < 0.8


def test_gated_mlp_and_embedding():
    mlp = GatedMLP(4, 3, jnp.float32, std=1.0, rngs=nnx.Rngs(0))
    x = numbers(2, 4)
    gate, up = np.split(x @ np.asarray(mlp.gate_up.weight[...]).T, 2, axis=-1)
    want = (gate / (1 + np.exp(-gate)) * up) @ np.asarray(mlp.down.weight[...]).T
    np.testing.assert_allclose(mlp(jnp.asarray(x)), want, rtol=1e-5, atol=1e-5)
    embedding = Embedding(5, 4, jnp.float32, std=1.0, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(embedding(jnp.array([[4, 0]]))[0], embedding.weight[...][jnp.array([4, 0])])


@given(st.lists(st.integers(0, 3), min_size=6, max_size=6), st.integers(1, 6))
def test_top_k_breaks_ties_by_the_lower_id(row, k):
    values, ids = top_k(jnp.asarray([row], jnp.float32), k)
    want = sorted(range(6), key=lambda e: (-row[e], e))[:k]
    assert ids[0].tolist() == want and ids.dtype == jnp.int32
    assert values[0].tolist() == [row[e] for e in want]


@pytest.mark.parametrize("normalize", (False, True))
@pytest.mark.parametrize("weights_dtype", (jnp.float32, jnp.bfloat16))
def test_router(normalize, weights_dtype):
    E, K = 6, 2
    router = Router(8, E, K, jnp.bfloat16, normalize=normalize, weights_dtype=weights_dtype, std=1.0, rngs=nnx.Rngs(0))
    x = jnp.asarray(numbers(5, 8), jnp.bfloat16)
    ids, weights, scores = router(x)
    logits = np.asarray(router.gate(x), np.float32)
    want = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(scores, want, rtol=1e-5)
    np.testing.assert_array_equal(ids, np.argsort(-want, axis=-1, kind="stable")[:, :K])
    chosen = np.take_along_axis(want, np.asarray(ids), axis=-1)
    if normalize:
        chosen = chosen / chosen.sum(axis=-1, keepdims=True)
    assert weights.dtype == weights_dtype and scores.dtype == jnp.float32
    np.testing.assert_allclose(
        np.asarray(weights, np.float32), chosen, rtol=1e-2 if weights_dtype != jnp.float32 else 1e-5
    )
