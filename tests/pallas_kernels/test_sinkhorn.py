"""Sinkhorn: kernel and XLA against the definition in float64, and what the matrices are for."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sinkhorn import sinkhorn, sinkhorn_kernel, sinkhorn_ref


def definition(logits, iterations, eps):
    z = logits.astype(np.float64)
    m = np.exp(z - z.max(-1, keepdims=True))
    m = m / m.sum(-1, keepdims=True) + eps
    m = m / (m.sum(-2, keepdims=True) + eps)
    for _ in range(iterations - 1):
        m = m / (m.sum(-1, keepdims=True) + eps)
        m = m / (m.sum(-2, keepdims=True) + eps)
    return m


@pytest.mark.parametrize(
    "run", (sinkhorn_ref, functools.partial(sinkhorn_kernel, interpret=True)), ids=("xla", "kernel")
)
@pytest.mark.parametrize(("rows", "n", "iterations", "eps"), ((1, 4, 20, 1e-6), (45, 4, 3, 1e-2), (5, 3, 1, 1e-6)))
def test_it_is_the_definition(run, rows, n, iterations, eps):
    logits = np.random.default_rng(rows).normal(scale=3, size=(rows, n, n)).astype(np.float32)
    got = run(jnp.asarray(logits), iterations=iterations, eps=eps)
    np.testing.assert_allclose(got, definition(logits, iterations, eps), rtol=2e-6, atol=1e-7)


def test_rows_and_columns_sum_to_one():
    logits = np.random.default_rng(0).normal(size=(2, 3, 4, 4)).astype(np.float32)
    matrix = sinkhorn(jnp.asarray(logits), 20, 1e-6)
    assert matrix.shape == logits.shape
    np.testing.assert_allclose(matrix.sum(-1), 1, atol=1e-3)
    np.testing.assert_allclose(matrix.sum(-2), 1, atol=1e-5)


def test_sizes_are_checked():
    with pytest.raises(ValueError, match=r"\(3, 4\): must be square"):
        sinkhorn(jnp.zeros((3, 4)), 20, 1e-6)
    with pytest.raises(ValueError, match="iterations = 0"):
        sinkhorn(jnp.zeros((4, 4)), 0, 1e-6)
