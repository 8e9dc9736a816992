"""Matrix product with a weight in file orientation, and the token embedding."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from pallas_kernels import kernels_run_compiled


def matmul_precision(dtype) -> lax.Precision | None:
    """Precision for products of `dtype`: float32 means float32 (GPUs would use TF32), narrower types need no care."""
    return lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


def project(x: Array, weight: Array) -> Array:
    """x [..., in] times weight [out, in] transposed, accumulated and returned in float32: [..., out]."""
    if math.prod(x.shape[:-1]) == 1 and kernels_run_compiled():
        # One row is bound by reading the weight. XLA's matrix product of one row reached a third of the memory rate on
        # an H200 (16 us for 21 MB), the same product as a reduction does better (docs/measurements.md).
        row = x.reshape(-1).astype(jnp.float32)
        return jnp.sum(weight.astype(jnp.float32) * row, axis=1).reshape(*x.shape[:-1], weight.shape[0])
    return lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=matmul_precision(weight.dtype),
        preferred_element_type=jnp.float32,
    )


class Linear(nnx.Module):
    """y = x @ W.T (+ b), W [out, in], b [out] only with `bias`; the result has x's dtype."""

    def __init__(self, features_in: int, features_out: int, dtype, *, bias: bool = False, std: float, rngs: nnx.Rngs):
        shape = (features_out, features_in)
        self.weight = nnx.Param(nnx.initializers.normal(std)(rngs.params(), shape, dtype))
        self.bias = nnx.Param(jnp.zeros((features_out,), dtype)) if bias else None

    def __call__(self, x: Array) -> Array:
        y = project(x, self.weight[...])
        return (y if self.bias is None else y + self.bias[...].astype(jnp.float32)).astype(x.dtype)


class Embedding(nnx.Module):
    """Token table [V, D]: lookup on the way in, logits on the way out when the head is tied."""

    def __init__(self, vocab_size: int, features: int, dtype, *, std: float, rngs: nnx.Rngs):
        self.weight = nnx.Param(nnx.initializers.normal(std)(rngs.params(), (vocab_size, features), dtype))

    def __call__(self, tokens: Array) -> Array:
        """tokens [...] int -> [..., D]. Ids are validated on the host before any work, so none is out of range."""
        return jnp.take(self.weight[...], tokens, axis=0, mode="clip")


def silu_product(gate_up: Array) -> Array:
    """SwiGLU's gate: silu(gate) * up for gate_up [..., 2F] whose first half is the gate; [..., F], same dtype."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up
