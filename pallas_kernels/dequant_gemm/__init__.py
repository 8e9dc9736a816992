"""Products with the dense weights of quantised checkpoints: y = x W^T + b, W read as it is stored.

For projections, shared experts and output heads, from one row of x to thousands. `implementation` is

* "pallas": the kernel, compiled for an NVIDIA GPU;
* "interpret": the same kernel in Pallas' interpreter (tests on CPU);
* "xla": W decoded to the dtype of x, then a plain product; any platform, every format.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from pallas_kernels.dequant_gemm import kernel, ref
from pallas_kernels.dequant_gemm.weights import without_kernel
from pallas_kernels.formats import Format

__all__ = ["IMPLEMENTATIONS", "dequant_gemm", "without_kernel"]

IMPLEMENTATIONS = ("pallas", "interpret", "xla")
_COMPUTE = ("bfloat16", "float16", "float32")


def dequant_gemm(
    x: jax.Array,
    parts: Mapping[str, jax.Array],
    form: Format,
    *,
    bias: jax.Array | None = None,
    out_dtype=None,
    implementation: str,
) -> jax.Array:
    """y = x W^T + b, summed in float32.

    Rows of x in one class of row counts (up to 16, 32, 64, .. of them) get the same bits whatever the number of rows,
    and whatever is in the others. The kernel multiplies with the exact values of FP8 and INT4 codes and applies the
    scale to sums; other weights, and all of "xla", are rounded to the dtype of x first.

    Args:
      x: [M, D], bfloat16, float16 or float32.
      parts: {suffix: array} of W [N, D] in `form`, shapes and dtypes as `form.row_tensors((N,), D)` says. Several
        matrices of one format are stacked by concatenating their parts; those of FP8 only where all but the last
        have whole blocks, those with a column order not at all.
      form: `Format` of W; the kernel takes those without `without_kernel`.
      bias: [N] of a floating dtype, or None.
      out_dtype: that of x (None) or float32.

    Returns:
      [M, N] in `out_dtype`.

    Raises:
      ValueError: unknown implementation; a format that it does not serve; operands that do not fit together.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation = {implementation!r}: must be one of {', '.join(IMPLEMENTATIONS)}")
    _check(x, parts, form, bias)
    out_dtype = x.dtype if out_dtype is None else jnp.dtype(out_dtype)
    if out_dtype not in (x.dtype, jnp.float32):
        raise ValueError(f"out_dtype = {out_dtype}: must be {x.dtype}, as x, or float32")
    if implementation == "xla":
        return ref.dequant_gemm(x, parts, form, bias, out_dtype)
    if reason := without_kernel(form):
        raise ValueError(f"implementation = {implementation!r}: {reason}; use implementation='xla'")
    return kernel.dequant_gemm(x, parts, form, bias, out_dtype, interpret=implementation == "interpret")


def _check(x, parts, form, bias):
    if x.ndim != 2 or x.dtype not in _COMPUTE or not x.size:
        raise ValueError(f"x of shape {x.shape} and dtype {x.dtype}: must be [M, D], one of {', '.join(_COMPUTE)}")
    if set(parts) != set(form.suffixes):
        raise ValueError(f"parts {sorted(parts)}: {form.name} weights have {sorted(form.suffixes)}")
    D, N = x.shape[1], parts[""].shape[0]
    for suffix, (shape, dtype) in form.row_tensors((N,), D).items():
        part = parts[suffix]
        fits = part.dtype == dtype if dtype is not None else jnp.issubdtype(part.dtype, jnp.floating)
        if part.shape != shape or not fits:
            raise ValueError(
                f"parts[{suffix!r}] of shape {part.shape} and dtype {part.dtype}: {form.name} weights [{N}, {D}] have "
                f"{shape} and {dtype or 'a floating dtype'}"
            )
    if bias is not None and (bias.shape != (N,) or not jnp.issubdtype(bias.dtype, jnp.floating)):
        raise ValueError(f"bias of shape {bias.shape} and dtype {bias.dtype}: must be [{N}] of a floating dtype")
