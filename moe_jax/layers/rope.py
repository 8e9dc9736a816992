"""Rotary position embedding: plain and YaRN frequencies, halves and pairs layouts."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclass(frozen=True)
class Yarn:
    """YaRN context extension (Peng et al. 2023), fields as in the rope dict of config.json.

    `attention_factor` None: derived from `mscale` and `mscale_all_dim`, see `table_factor`. `truncate` rounds the
    bounds of the ramp to whole components.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def magnitude(self, mscale: float) -> float:
        """0.1 mscale ln(factor) + 1, or 1 without extension (section 3.4 of the paper)."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    @property
    def table_factor(self) -> float:
        """Factor on cosines and sines: `attention_factor`, else the ratio of the two mscales, else that of mscale 1."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)
        return self.magnitude(1.0)

    @property
    def score_factor(self) -> float:
        """Factor on the attention scores of MLA: magnitude(mscale_all_dim)^2, or 1 without that field."""
        return self.magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


def rope_frequencies(rotary_dim: int, theta: float, yarn: Yarn | None = None) -> np.ndarray:
    """Angles per position as float32 [H/2]: theta^(-2i/H), i < H/2 (Su et al. 2021, section 3.2.2).

    With YaRN, component i turns `factor` times slower where it completes fewer than `beta_slow` turns over the original
    context, as before where it completes more than `beta_fast`, and in between by a linear ramp over i.
    """
    exponent = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    plain = (np.float32(1.0) / np.float32(theta) ** exponent).astype(np.float32)
    if yarn is None:
        return plain

    def component(turns: float) -> float:
        context = yarn.original_max_position_embeddings
        return rotary_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = component(yarn.beta_fast), component(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(rotary_dim // 2, dtype=np.float32) - low) / width, 0, 1).astype(np.float32)
    return (plain / np.float32(yarn.factor) * ramp + plain * (1 - ramp)).astype(np.float32)


def rope_tables(
    positions: Array, rotary_dim: int, theta: float, dtype, yarn: Yarn | None = None
) -> tuple[Array, Array]:
    """Cosines and sines [B, T, H/2] in `dtype` for positions [B, T]; angles are float32.

    The tables are rounded to the compute dtype before they are used, as transformers does.
    """
    angles = positions.astype(jnp.float32)[..., None] * rope_frequencies(rotary_dim, theta, yarn)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if yarn is not None and yarn.table_factor != 1.0:
        cos, sin = cos * yarn.table_factor, sin * yarn.table_factor
    return cos.astype(dtype), sin.astype(dtype)


def apply_rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate the first Hr components of heads x [B, T, N, H] by the tables cos, sin [B, T, Hr/2]; same shape and dtype.

    Halves layout: component i turns together with component i + Hr/2. Components from Hr on stay as they are.
    """
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim > x.shape[-1]:
        raise ValueError(f"rotary tables of width {rotary_dim} for heads of width {x.shape[-1]}: must not be wider")
    first, second, rest = jnp.split(x, (rotary_dim // 2, rotary_dim), axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def apply_rope_pairs(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate heads x [B, T, N, H] whose components 2i and 2i + 1 turn together; the result is in halves layout.

    Queries and keys come out in the same order, so their products are those of the pairs layout. The rotation is
    computed in the wider dtype of x and the tables and returned in x's.
    """
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    halves = jnp.concatenate([pairs[..., 0], pairs[..., 1]], axis=-1)
    return apply_rope(halves, cos, sin).astype(x.dtype)


@dataclass(frozen=True)
class Rope:
    """A rotary embedding of the last `dim` components of a head, 2i together with 2i + 1; what `rope_tables` needs."""

    dim: int
    theta: float
    yarn: Yarn | None = None

    def turn(self, x: Array, positions: Array, *, back: bool = False) -> Array:
        """Heads x [B, T, N, H] rotated by positions [B, T], or by their negatives with `back`; computed in float32."""
        cos, sin = rope_tables(positions, self.dim, self.theta, jnp.float32, self.yarn)
        cos, sin = cos[:, :, None, :], (-sin if back else sin)[:, :, None, :]  # [B, T, 1, dim / 2]
        still, turning = jnp.split(x, (x.shape[-1] - self.dim,), axis=-1)
        pairs = turning.astype(jnp.float32).reshape(*turning.shape[:-1], self.dim // 2, 2)
        first, second = pairs[..., 0], pairs[..., 1]
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return jnp.concatenate([still, turned.reshape(turning.shape).astype(x.dtype)], axis=-1)
