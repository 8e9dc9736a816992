"""Rotary position embedding, halves layout: component i turns together with component i + H/2."""

import jax.numpy as jnp
import numpy as np
from jax import Array


def rope_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """Angles per position theta^(-2i/H), i < H/2, as float32 [H/2] (Su et al. 2021, section 3.2.2)."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (np.float32(1.0) / np.float32(theta) ** exponent).astype(np.float32)


def rope_tables(positions: Array, head_dim: int, theta: float, dtype) -> tuple[Array, Array]:
    """Cosines and sines [B, T, H/2] in `dtype` for positions [B, T]; angles are float32.

    The tables are rounded to the compute dtype before they are used, as transformers does.
    """
    angles = positions.astype(jnp.float32)[..., None] * rope_frequencies(head_dim, theta)
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def apply_rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate heads x [B, T, N, H] by the tables cos, sin [B, T, H/2]; same shape and dtype."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
