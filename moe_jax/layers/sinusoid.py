"""Sinusoidal positions."""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array


def sinusoids(positions: Array, features: int, dtype) -> Array:
    """[sin(p f), cos(p f)] with f_i = 10000^(-i / (D/2 - 1)) for i < D/2: positions [...] int -> [..., D].

    Sines come first, as in tensor2tensor; Vaswani et al. 2017, "Attention Is All You Need", section 3.5, let them
    alternate. `features` is D, even and at least 4.
    """
    half = features // 2
    frequencies = np.exp(np.arange(half, dtype=np.float32) * np.float32(-math.log(10000) / (half - 1)))
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1).astype(dtype)
