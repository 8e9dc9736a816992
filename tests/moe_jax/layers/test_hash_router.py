"""Routers of DeepSeek-V4: the choice, and the weights of what was chosen."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.layers.hash_router import BiasedSqrtSoftplusRouter, HashRouter

D, E, K = 6, 8, 3


def scores_of(router, x):
    return np.sqrt(np.log1p(np.exp(np.asarray(x) @ np.asarray(router.gate.weight[...]).T)))


def check(result, scores, chosen):
    """Weights of the chosen ids [T, K], by descending score, divided by their sum and times 1.5."""
    ids, weights, given = result
    np.testing.assert_allclose(given, scores, atol=1e-6)
    assert ids.dtype == jnp.int32
    for t, expected in enumerate(chosen):
        order = sorted(expected, key=lambda e: -scores[t, e])
        np.testing.assert_array_equal(ids[t], order)
        np.testing.assert_allclose(weights[t], scores[t, order] / scores[t, order].sum() * 1.5, atol=1e-6)


def test_bias_chooses_and_does_not_weigh():
    router = BiasedSqrtSoftplusRouter(D, E, K, jnp.float32, scale=1.5, std=1.0, rngs=nnx.Rngs(0))
    router.bias[...] = jnp.where(jnp.arange(E) == 5, 10.0, 0.0)
    x = jax.random.normal(jax.random.key(0), (7, D))
    scores = scores_of(router, x)
    chosen = np.argsort(-(scores + np.asarray(router.bias[...])), axis=1)[:, :K]
    assert np.all(chosen[:, 0] == 5) and np.any(np.argmax(scores, axis=1) != 5)
    check(router(x), scores, chosen)
    assert router(x.astype(jnp.bfloat16))[1].dtype == jnp.bfloat16


def test_hash_router_follows_the_token():
    router = HashRouter(D, E, K, jnp.float32, vocab_size=4, scale=1.5, std=1.0, rngs=nnx.Rngs(0))
    table = np.random.default_rng(0).permuted(np.tile(np.arange(E), (4, 1)), axis=1)[:, :K]
    router.table[...] = jnp.asarray(table, jnp.int32)
    x, tokens = jax.random.normal(jax.random.key(0), (7, D)), np.array([3, 0, 1, 3, 2, 2, 0])
    check(router(x, jnp.asarray(tokens)), scores_of(router, x), table[tokens])
