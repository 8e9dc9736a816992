"""Matrix product with a weight in file orientation, plain or packed, and the token embedding."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from moe_jax.layers.norm import Normed, value_of
from pallas_kernels import _compat, kernels_run_compiled
from pallas_kernels.dequant_gemm import dequant_gemm
from pallas_kernels.formats import Format
from pallas_kernels.row_linear import row_linear


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


def contract(spec: str, a: Array, b: Array) -> Array:
    """einsum of a and b, which have one dtype, accumulated and returned in float32."""
    precision = matmul_precision(a.dtype)
    if not kernels_run_compiled():
        # XLA's CPU backend refuses some of these products of narrow numbers; in float32 they are exact.
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


def row_implementation(rows: int) -> str:
    """What `Linear` runs for `rows` rows: an implementation of `row_linear`, which takes one row; else "xla"."""
    return _compat.default_implementation() if rows == 1 else "xla"


class Linear(nnx.Module):
    """y = x @ W.T (+ b), W [out, in], b [out] only with `bias`; the result has x's dtype.

    `packs` False: other modules read `weight` itself, so that it is never `pack`ed.
    """

    def __init__(
        self, features_in: int, features_out: int, dtype, *, bias=False, packs=True, std: float, rngs: nnx.Rngs
    ):  # fmt: skip
        shape = (features_out, features_in)
        self.weight = nnx.Param(nnx.initializers.normal(std)(rngs.params(), shape, dtype))
        self.bias = nnx.Param(jnp.zeros((features_out,), dtype)) if bias else None
        self.packs, self.form = packs, None

    def pack(self, form: Format, parts: Mapping[str, Array]):
        """From now on W is held as it is stored: `parts`, {suffix: array} of `form`, as `weight` and `weight<suffix>`.

        Raises ValueError where `packs` is False.
        """
        if not self.packs:
            raise ValueError(f"a weight that others read as a matrix cannot be held as {form.name}")
        self.form = form
        for suffix, part in parts.items():
            setattr(self, f"weight{suffix}", nnx.Param(part))

    def __call__(self, x: Array | Normed, *, residual: Array | None = None, feeds_kernels: bool = False) -> Array:
        """x [..., in] -> [..., out], added to `residual` [..., out] if there is one.

        One row is a kernel on a GPU, which also computes the norm of a `Normed` and adds bias and residual.
        feeds_kernels: a promise about who reads the result of that kernel, see `_compat.call`.
        """
        if (y := self._one_row(x, residual, feeds_kernels=feeds_kernels)) is not None:
            return y
        x = value_of(x)
        if self.form is not None:
            y = self._packed(x)
            return y if residual is None else residual + y
        y = project(x, self.weight[...])
        y = (y if self.bias is None else y + self.bias[...].astype(jnp.float32)).astype(x.dtype)
        return y if residual is None else residual + y

    def _packed(self, x: Array) -> Array:
        """As `__call__` with W packed: [..., out]."""
        y = dequant_gemm(
            x.reshape(-1, x.shape[-1]),
            {suffix: getattr(self, f"weight{suffix}")[...] for suffix in self.form.suffixes},
            self.form,
            bias=None if self.bias is None else self.bias[...],
            implementation=_compat.default_implementation(),
        )
        return y.reshape(*x.shape[:-1], -1)

    def _one_row(
        self, x: Array | Normed, residual: Array | None = None, *, gated: bool = False, feeds_kernels: bool
    ) -> Array | None:
        """As `__call__` by the kernel, or None where it is not for x; `gated` as of `row_linear`."""
        implementation = row_implementation(math.prod(x.shape[:-1]))
        if implementation == "xla" or self.form is not None:
            return None
        norm = x.row_norm if isinstance(x, Normed) else None
        row = x.x if norm else value_of(x)
        y, normed = row_linear(
            row.reshape(-1),
            self.weight[...],
            norm=norm,
            norm_weight=x.norm.weight[...] if norm else None,
            bias=None if self.bias is None else self.bias[...],
            residual=None if residual is None else residual.reshape(-1),
            gated=gated,
            feeds_kernels=feeds_kernels,
            implementation=implementation,
        )
        if norm:
            x.keep(normed)
        return y.reshape(*x.shape[:-1], -1)

    def swiglu(self, x: Array | Normed, *, feeds_kernels: bool = False) -> Array:
        """silu(gate) * up of x [..., in], with gate and up the two halves of the outputs: [..., out / 2].

        feeds_kernels: as of `__call__`.
        """
        y = self._one_row(x, gated=True, feeds_kernels=feeds_kernels)
        return silu_product(self(x)) if y is None else y


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
