"""RMS and layer normalisation."""

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax


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

    def __init__(self, features: int, dtype, *, eps: float):
        self.weight = nnx.Param(jnp.ones((features,), dtype))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.weight[...], self.eps)


class WideRMSNorm(RMSNorm):
    """`RMSNorm` that scales in float32 and casts last, as in gpt-oss."""

    def __call__(self, x: Array) -> Array:
        wide = rms_norm(x.astype(jnp.float32), self.weight[...].astype(jnp.float32), self.eps)
        return wide.astype(x.dtype)


class ZeroCentredRMSNorm(nnx.Module):
    """`rms_norm` with the factor 1 + weight, in float32 and cast last, as in Qwen3.5; the weight starts at zero."""

    def __init__(self, features: int, dtype, *, eps: float):
        self.weight = nnx.Param(jnp.zeros((features,), dtype))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        return rms_norm(x.astype(jnp.float32), 1.0 + self.weight[...].astype(jnp.float32), self.eps).astype(x.dtype)


class Float32RMSNorm(WideRMSNorm):
    """`WideRMSNorm` with a float32 weight whatever the compute dtype `dtype` is, as in DeepSeek-V4."""

    def __init__(self, features: int, dtype, *, eps: float):
        super().__init__(features, jnp.float32, eps=eps)


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
