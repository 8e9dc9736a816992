"""Group-limited routers against their definition, expert by expert in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from moe_jax.layers.group_router import BiasedSigmoidRouter, GroupMaxRouter, keep_best_groups

D, E, T = 6, 12, 5


def inputs(seed, bias=0.6):
    rng = np.random.default_rng(seed)
    x, weight = rng.standard_normal((T, D)), rng.standard_normal((E, D))
    return x.astype(np.float32), weight.astype(np.float32), bias * rng.standard_normal(E).astype(np.float32)


def chosen(choice, group_score, n, top, k):
    """The k best experts of the `top` best of n groups, for one token."""
    groups = sorted(range(n), key=lambda g: (-group_score(np.sort(choice.reshape(n, -1)[g])), g))[:top]
    allowed = [e for e in range(E) if e // (E // n) in groups]
    return sorted(allowed, key=lambda e: (-choice[e], e))[:k]


@given(seed=st.integers(0, 99), shape=st.sampled_from([(1, 1, 4), (4, 2, 4), (3, 1, 3), (6, 6, 5)]))
def test_group_max_router(seed, shape):
    n, top, k = shape
    x, weight, _ = inputs(seed)
    router = GroupMaxRouter(D, E, k, groups=n, top_groups=top, scale=3.0, std=1.0, rngs=nnx.Rngs(0))
    router.gate.weight[...] = jnp.asarray(weight)
    ids, weights, scores = map(np.asarray, router(jnp.asarray(x)))
    logits = x.astype(np.float64) @ weight.T
    want = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(scores, want, rtol=1e-5)
    for t in range(T):
        assert ids[t].tolist() == chosen(want[t], lambda group: group[-1], n, top, k)
    np.testing.assert_allclose(weights, 3 * np.take_along_axis(want, ids, -1), rtol=1e-5)


@given(
    seed=st.integers(0, 99),
    shape=st.sampled_from([(1, 1, 4), (4, 2, 4), (3, 1, 3), (6, 6, 5)]),
    normalize=st.booleans(),
)
def test_biased_sigmoid_router(seed, shape, normalize):
    n, top, k = shape
    x, weight, bias = inputs(seed)
    router = BiasedSigmoidRouter(
        D, E, k, groups=n, top_groups=top, normalize=normalize, scale=2.5, std=1.0, rngs=nnx.Rngs(0)
    )
    router.gate.weight[...], router.bias[...] = jnp.asarray(weight), jnp.asarray(bias)
    ids, weights, scores = map(np.asarray, router(jnp.asarray(x)))
    want = 1 / (1 + np.exp(-(x.astype(np.float64) @ weight.T)))
    np.testing.assert_allclose(scores, want, rtol=1e-5)  # without the bias
    for t in range(T):
        assert set(ids[t]) == set(chosen(want[t] + bias, lambda group: group[-2:].sum(), n, top, k))
    assert (np.diff(weights) <= 0).all(), "sorted by weight, though chosen by biased score"
    plain = np.take_along_axis(want, ids, -1)
    total = plain.sum(-1, keepdims=True) if normalize else 1
    np.testing.assert_allclose(weights, 2.5 * plain / total, rtol=1e-5)


def test_the_bias_changes_the_choice_and_not_the_weights():
    x, weight, _ = inputs(0)
    router = BiasedSigmoidRouter(D, E, 2, groups=1, top_groups=1, normalize=False, scale=1, std=1, rngs=nnx.Rngs(0))
    router.gate.weight[...] = jnp.asarray(weight)
    before, _, scores = router(jnp.asarray(x))
    worst = int(np.argmin(np.asarray(scores[0])))
    assert worst not in before[0].tolist()
    router.bias[...] = jnp.zeros(E).at[worst].set(10.0)
    ids, weights, _ = router(jnp.asarray(x))
    assert all(worst in row for row in ids.tolist())
    assert weights[0, ids[0].tolist().index(worst)] == scores[0, worst]


@pytest.mark.parametrize("cls", (GroupMaxRouter, BiasedSigmoidRouter))
def test_routers_compute_in_float32(cls):
    """Logits that bfloat16 products would round to a tie."""
    more = {"normalize": False} if cls is BiasedSigmoidRouter else {}
    router = cls(2, 2, 1, groups=1, top_groups=1, scale=1.0, std=1.0, rngs=nnx.Rngs(0), **more)
    assert router.gate.weight.dtype == jnp.float32
    router.gate.weight[...] = jnp.array([[1.0, 0.0], [1.0, 1e-4]])
    ids, weights, scores = router(jnp.ones((1, 2), jnp.bfloat16))
    assert ids.tolist() == [[1]] and weights.dtype == scores.dtype == jnp.float32


def test_keep_best_groups_breaks_ties_by_the_lower_group():
    kept = keep_best_groups(jnp.arange(1.0, 7.0)[None], jnp.array([[2.0, 3.0, 2.0]]), 2, -1.0)
    assert kept.tolist() == [[1, 2, 3, 4, -1, -1]]
