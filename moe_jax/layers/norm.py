"""RMS and layer normalisation."""

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from pallas_kernels.row_norm import RowNorm


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) over the last axis, in float32, cast to x's dtype and then scaled by `weight`.

    The cast comes before the scale, as in the Hugging Face modules of Mixtral, Qwen3-MoE and OLMoE.
    Formula: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
    """
    wide = x.astype(jnp.float32)
    inverse_rms = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * inverse_rms).astype(x.dtype) * weight


class RMSNorm(nnx.Module):
    """`rms_norm` with a weight [features] that starts at one."""

    kind = "narrow"  # of `RowNorm`, where a kernel computes it

    def __init__(self, features: int, dtype, *, eps: float):
        self.weight = nnx.Param(jnp.ones((features,), dtype))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.weight[...], self.eps)


class WideRMSNorm(RMSNorm):
    """`RMSNorm` that scales in float32 and casts last, as in gpt-oss."""

    kind = "wide"

    def __call__(self, x: Array) -> Array:
        wide = rms_norm(x.astype(jnp.float32), self.weight[...].astype(jnp.float32), self.eps)
        return wide.astype(x.dtype)


class ZeroCentredRMSNorm(nnx.Module):
    """`rms_norm` with the factor 1 + weight, in float32 and cast last, as in Qwen3.5; the weight starts at zero."""

    kind = "zero_centred"

    def __init__(self, features: int, dtype, *, eps: float):
        self.weight = nnx.Param(jnp.zeros((features,), dtype))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        return rms_norm(x.astype(jnp.float32), 1.0 + self.weight[...].astype(jnp.float32), self.eps).astype(x.dtype)


class Float32RMSNorm(WideRMSNorm):
    """`WideRMSNorm` with a float32 weight whatever the compute dtype `dtype` is, as in DeepSeek-V4."""

    def __init__(self, features: int, dtype, *, eps: float):
        super().__init__(features, jnp.float32, eps=eps)


class Normed:
    """norm(x), computed when it is needed: by `value`, or by a `Linear` of one row inside its kernel.

    A linear layer that computes it gives it back by `keep`, so that who asks for the value later gets it for nothing.
    An object of one trace, in which it is made and used up.

    Args:
        x: [..., D]; norm: a module of this file.
    """

    def __init__(self, x: Array, norm: nnx.Module):
        self.x, self.norm = x, norm
        self._value = None
        self.shape, self.dtype, self.ndim = x.shape, x.dtype, x.ndim

    @property
    def row_norm(self) -> RowNorm | None:
        """What a kernel must know of the norm; None: it computes no such norm, or need not as the value is there."""
        kind = getattr(self.norm, "kind", None)
        return None if kind is None or self._value is not None else RowNorm(self.norm.eps, kind)

    def keep(self, value: Array) -> None:
        """Takes norm(x), of any shape with its size, from who computed it."""
        self._value = value.reshape(self.shape)

    def astype(self, dtype) -> Array:
        """norm(x) [..., D] in another dtype."""
        return self.value().astype(dtype)

    def value(self) -> Array:
        """norm(x) [..., D]."""
        if self._value is None:
            self._value = self.norm(self.x)
        return self._value


def value_of(x: Array | Normed) -> Array:
    """The array itself, or what a `Normed` stands for."""
    return x.value() if isinstance(x, Normed) else x


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(variance + eps) * weight (+ bias) over the last axis, in float32; x's dtype.

    Formula: Ba et al. 2016, "Layer Normalization". The weight [features] starts at one, the bias, if any, at zero.
    """

    def __init__(self, features: int, dtype, *, eps: float, bias: bool = False):
        self.weight = nnx.Param(jnp.ones((features,), dtype))
        self.bias = nnx.Param(jnp.zeros((features,), dtype)) if bias else None
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        inverse = lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.eps)
        normed = centred * inverse * self.weight[...].astype(jnp.float32)
        return (normed if self.bias is None else normed + self.bias[...].astype(jnp.float32)).astype(x.dtype)
