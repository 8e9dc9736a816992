"""Attention to a whole source, sinusoidal positions and the dense block with ReLU, against their definitions."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.layers.mlp import ReluMLP
from moe_jax.layers.norm import LayerNorm
from moe_jax.layers.sinusoid import sinusoids
from moe_jax.layers.source_attention import CrossAttention, SourceAttention

B, S, T, D, N = 2, 7, 3, 8, 2
LENGTHS = (7, 4)
RNG = np.random.default_rng(0)


def with_biases(module):
    """The module with biases that are not zero."""
    for _, part in nnx.iter_modules(module):
        if getattr(part, "bias", None) is not None:
            part.bias[...] = jnp.asarray(RNG.standard_normal(part.bias.shape), jnp.float32)
    return module


def linear(x, part, rows=slice(None)):
    return x @ np.asarray(part.weight[...], np.float64).T[:, rows] + np.asarray(part.bias[...], np.float64)[rows]


def attend(q, k, v):
    """One sequence: q [T, D], k and v [S, D] -> [T, D], head by head."""
    out = []
    for head in range(N):
        part = slice(head * D // N, (head + 1) * D // N)
        scores = q[:, part] @ k[:, part].T / np.sqrt(D // N)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        out.append(weights / weights.sum(1, keepdims=True) @ v[:, part])
    return np.concatenate(out, axis=1)


def live():
    return jnp.arange(S) < jnp.asarray(LENGTHS)[:, None]


def test_a_source_attends_to_itself_in_both_directions_and_not_to_padding():
    layer = with_biases(SourceAttention(D, N, jnp.float32, std=0.5, rngs=nnx.Rngs(0)))
    x = RNG.standard_normal((B, S, D)).astype(np.float32)
    out = np.asarray(layer(jnp.asarray(x), live()))
    for row, length in enumerate(LENGTHS):
        q, k, v = (linear(x[row, :length], layer.qkv, slice(i * D, (i + 1) * D)) for i in range(3))
        np.testing.assert_allclose(out[row, :length], linear(attend(q, k, v), layer.out), atol=1e-5)
    x[1, 4:] = 1e3
    np.testing.assert_array_equal(layer(jnp.asarray(x), live())[1, :4], out[1, :4])


def test_a_target_attends_to_what_is_remembered_of_its_source():
    layer = with_biases(CrossAttention(D, N, jnp.float32, std=0.5, rngs=nnx.Rngs(1)))
    source = RNG.standard_normal((B, S, D)).astype(np.float32)
    x = RNG.standard_normal((B, T, D)).astype(np.float32)
    memory = layer.remember(jnp.asarray(source))
    assert {name: value.shape for name, value in memory.items()} == dict.fromkeys(
        ("source_k", "source_v"), (B, S, N, D // N)
    )
    out = np.asarray(layer(jnp.asarray(x), memory, live()))
    for row, length in enumerate(LENGTHS):
        k, v = (linear(source[row, :length], layer.kv, slice(i * D, (i + 1) * D)) for i in range(2))
        wanted = linear(attend(linear(x[row], layer.q), k, v), layer.out)
        np.testing.assert_allclose(out[row], wanted, atol=1e-5)


def test_sinusoids():
    positions = jnp.asarray([[0, 1, 5], [2, 100, 1023]])
    out = np.asarray(sinusoids(positions, 8, jnp.float32))
    assert out.shape == (2, 3, 8)
    frequencies = 10000.0 ** (-np.arange(4) / 3)
    angles = np.asarray(positions)[..., None] * frequencies
    np.testing.assert_allclose(out, np.concatenate([np.sin(angles), np.cos(angles)], -1), atol=1e-4)
    assert sinusoids(positions, 4, jnp.bfloat16).dtype == jnp.bfloat16


def test_relu_block_and_layer_norm_with_bias():
    x = RNG.standard_normal((T, D)).astype(np.float32)
    mlp = with_biases(ReluMLP(D, 5, jnp.float32, std=0.5, rngs=nnx.Rngs(2)))
    np.testing.assert_allclose(mlp(jnp.asarray(x)), linear(np.maximum(linear(x, mlp.up), 0), mlp.down), atol=1e-5)
    norm = LayerNorm(D, jnp.float32, eps=1e-5, bias=True)
    norm.weight[...], norm.bias[...] = jnp.arange(D, dtype=jnp.float32), jnp.arange(D, dtype=jnp.float32) - 3
    wide = x.astype(np.float64)
    normed = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(norm(jnp.asarray(x)), normed * np.arange(D) + np.arange(D) - 3, atol=1e-5)
