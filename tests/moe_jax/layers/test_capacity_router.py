"""The top-2 router with capacity against its definition, token by token in plain Python."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.layers.capacity_router import Top2Router

T, D, E = 14, 6, 4


def make(bias=True, **options):
    router = Top2Router(D, E, bias=bias, scale=0.8, std=1.0, rngs=nnx.Rngs(0), **options)
    if bias:
        router.gate.bias[...] = jnp.asarray([0.3, 0.0, -0.2, 0.1])
    return router


def by_definition(x, live, counted, router):
    """(first choice, second choice, their weights) of each token, in float64, an expert's places taken one by one."""
    logits = x.astype(np.float64) @ np.asarray(router.gate.weight[...], np.float64).T
    logits += np.asarray(router.gate.bias[...], np.float64)
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    choices = np.argsort(-p, axis=1, kind="stable")[:, :2]
    capacity = math.ceil(router.fraction * counted)
    order = sorted(range(len(x)), key=lambda t: -p[t].max()) if router.prioritized else range(len(x))
    taken, kept = [0] * E, np.zeros((len(x), 2), bool)
    for choice in range(2):  # all first choices come before any second one, also those that are dropped
        for t in order:
            if live[t]:
                kept[t, choice] = taken[choices[t, choice]] < capacity
                taken[choices[t, choice]] += 1
    weights = np.take_along_axis(p, choices, 1)
    total = weights.sum(1) if router.normalize_first else (weights * kept).sum(1)
    weights = np.where(kept, weights / np.maximum(total, np.finfo(np.float32).eps)[:, None], 0)
    return choices, 0.8 * weights, kept


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**16),
    fraction=st.sampled_from([0.05, 0.1, 0.3, 0.5, 0.75, 1.0]),
    prioritized=st.booleans(),
    normalize_first=st.booleans(),
    dead=st.integers(0, 5),
    padding=st.integers(0, 5),
)
def test_routing_equals_its_definition(seed, fraction, prioritized, normalize_first, dead, padding):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((T, D)).astype(np.float32) + 0.5  # a common direction: some experts are full
    live = rng.permutation(T) >= dead
    counted = T - dead + min(padding, dead)
    router = make(fraction=fraction, prioritized=prioritized, normalize_first=normalize_first)
    ids, weights, scores = router(jnp.asarray(x), jnp.asarray(live), jnp.int32(counted))
    choices, wanted, kept = by_definition(x, live, counted, router)
    assert ids.dtype == jnp.int32 and weights.dtype == scores.dtype == jnp.float32
    np.testing.assert_array_equal(ids, choices)
    np.testing.assert_allclose(np.asarray(weights)[live], wanted[live], atol=1e-6)
    np.testing.assert_allclose(scores.sum(1), np.ones(T), atol=1e-6)
    # What the engine relies on: dropping a pair never spares an expert.
    every, left = (set(choices[live][where].ravel().tolist()) for where in (np.ones_like(kept)[live], kept[live]))
    assert every == left


def test_a_capacity_of_all_tokens_never_drops():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((T, D)).astype(np.float32) * 0 + rng.standard_normal(D).astype(np.float32))
    router = make(fraction=1.0, prioritized=False, normalize_first=False)
    _, weights, _ = router(x, jnp.ones(T, bool), jnp.int32(T))
    np.testing.assert_allclose(weights.sum(1), np.full(T, 0.8), atol=1e-6)


@pytest.mark.parametrize("counted", (1, 10, 13, 30, 70))
def test_the_capacity_is_rounded_as_python_rounds_it(counted):
    """0.3 * 10 is 3 in float64 and more than 3 in float32: one token too many would stay."""
    router = make(bias=False, fraction=0.3, prioritized=False, normalize_first=False)
    x = jnp.ones((counted, D))
    _, weights, _ = jax.jit(lambda x, n: router(x, jnp.ones(len(x), bool), n))(x, jnp.int32(counted))
    assert int((weights[:, 0] > 0).sum()) == math.ceil(0.3 * counted)


def test_near_ties_fall_as_they_round_in_the_compute_dtype():
    router = make(bias=False, fraction=1.0, prioritized=False, normalize_first=False)
    router.gate.weight[...] = jnp.zeros((E, D)).at[:, 0].set(jnp.asarray([1.0, 1.001, 0.0, 0.0]))
    for dtype, first in ((jnp.float32, 1), (jnp.bfloat16, 0)):
        ids, weights, _ = router(jnp.ones((1, D), dtype), jnp.ones(1, bool), jnp.int32(1))
        assert ids.tolist() == [[first, 1 - first]]
        assert weights.dtype == jnp.float32 and abs(float(weights.sum()) - 0.8) < 1e-6
