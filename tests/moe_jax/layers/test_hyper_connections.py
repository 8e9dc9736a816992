"""Hyper-connections against their formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.layers.hyper_connections import HyperConnection, HyperHead
from pallas_kernels.sinkhorn import sinkhorn

D, n = 5, 4


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def mixed(module, X):
    """fn times the token's streams as one vector of root mean square 1, float64."""
    flat = X.reshape(-1).astype(np.float64)
    return np.asarray(module.fn[...], np.float64) @ (flat / np.sqrt(np.mean(flat**2) + 1e-6))


def test_a_block_reads_and_writes_all_streams():
    hyper = HyperConnection(D, n, iterations=3, eps=1e-2, norm_eps=1e-6, std=0.4, rngs=nnx.Rngs(0))
    hyper.base[...], hyper.scale[...] = jnp.asarray(numbers(1, 24)), jnp.array([0.5, 2.0, 1.5])
    X, y = numbers(2, 1, 3, n, D), numbers(3, 1, 3, D)
    x, post, matrix = jax.jit(hyper.read)(X)
    new = jax.jit(hyper.write)(X, y, post, matrix)
    base = np.asarray(hyper.base[...])
    for t in range(3):
        z = mixed(hyper, X[0, t])
        pre = sigmoid(0.5 * z[:n] + base[:n]) + 1e-2
        np.testing.assert_allclose(x[0, t], pre @ X[0, t], atol=1e-5)
        np.testing.assert_allclose(post[0, t], 2 * sigmoid(2 * z[n : 2 * n] + base[n : 2 * n]), atol=1e-5)
        logits = (1.5 * z[2 * n :] + base[2 * n :]).reshape(n, n)
        C = np.asarray(sinkhorn(jnp.asarray(logits, jnp.float32), 3, 1e-2))
        np.testing.assert_allclose(matrix[0, t], C, atol=1e-5)
        for k in range(n):
            want = np.asarray(post[0, t, k]) * y[0, t] + sum(C[j, k] * X[0, t, j] for j in range(n))
            np.testing.assert_allclose(new[0, t, k], want, atol=1e-5)


def test_the_head_joins_the_streams():
    head = HyperHead(D, n, eps=1e-2, norm_eps=1e-6, std=0.4, rngs=nnx.Rngs(0))
    head.base[...], head.scale[...] = jnp.asarray(numbers(1, n)), jnp.array([1.5])
    X = numbers(2, 1, 2, n, D)
    out = head(jnp.asarray(X))
    for t in range(2):
        weights = sigmoid(1.5 * mixed(head, X[0, t]) + np.asarray(head.base[...])) + 1e-2
        np.testing.assert_allclose(out[0, t], weights @ X[0, t], atol=1e-5)
    assert head(jnp.asarray(X, jnp.bfloat16)).dtype == jnp.bfloat16
