"""A linear layer of one row with what stands before and after it: norm, bias, SwiGLU and residual in one launch.

A decode step of one sequence is bound by reading weights once and by the number of its launches. `implementation` is
"pallas" (compiled for an NVIDIA GPU), "interpret" or "xla".
"""

from pallas_kernels.row_linear import kernel, ref

__all__ = ["IMPLEMENTATIONS", "row_linear"]

IMPLEMENTATIONS = ("pallas", "interpret", "xla")


def row_linear(
    x, weight, *, norm=None, norm_weight=None, bias=None, residual=None, gated=False, feeds_kernels=False,
    implementation,
):  # fmt: skip
    """y = [residual +] act(n weight^T [+ bias]), n = x or norm(x); sums and norm in float32.

    Products and bias are summed in float32 and rounded to x's dtype, then comes `gated`, then the residual, as in the
    layers that this takes the place of.

    Args:
      x: [D], float32, bfloat16 or float16.
      weight: [N, D] as files store it (each output's row is contiguous), of any of these dtypes.
      norm: `RowNorm` or None; norm_weight: [D], needed with it.
      bias: [N] or None.
      residual: [N], [N / 2] with `gated`, in x's dtype, or None.
      gated: the rows of weight are those of a gate and of as many ups: y = silu(gate) * up.
      feeds_kernels: see `_compat.call`.
      implementation: see the module.

    Returns:
      (y [N], or [N / 2] with `gated`, in x's dtype; n [D] in x's dtype, which is x without a norm).

    Raises:
      ValueError: unknown implementation, shapes that do not fit, a norm without weight or a weight without norm.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation = {implementation!r}: must be one of {', '.join(IMPLEMENTATIONS)}")
    if x.ndim != 1 or weight.shape[1:] != x.shape:
        raise ValueError(f"x {x.shape}, weight {weight.shape}: must be [D] and [N, D]")
    if gated and weight.shape[0] % 2:
        raise ValueError(f"weight {weight.shape}: gated needs as many rows of gates as of ups")
    n_out = weight.shape[0] // 2 if gated else weight.shape[0]
    wanted = {"norm_weight": x.shape if norm else None, "bias": weight.shape[:1], "residual": (n_out,)}
    for name, value in (("norm_weight", norm_weight), ("bias", bias), ("residual", residual)):
        missing = name == "norm_weight" and norm is not None and value is None
        if missing or (value is not None and value.shape != wanted[name]):
            raise ValueError(f"{name} {getattr(value, 'shape', None)}: must be {wanted[name]}")
    if implementation == "xla":
        return ref.row_linear(x, weight, norm, norm_weight, bias, residual, gated)
    interpret = implementation == "interpret"
    operands = x, weight, norm, norm_weight, bias, residual, gated
    return kernel.row_linear(*operands, feeds_kernels=feeds_kernels, interpret=interpret)
