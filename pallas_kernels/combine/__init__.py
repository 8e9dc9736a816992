"""The sum of a token's expert outputs, by the router's weights, with the residual that it is added to.

`implementation` is "pallas" (compiled for an NVIDIA GPU), "interpret" or "xla".
"""

from pallas_kernels.combine import kernel, ref

__all__ = ["IMPLEMENTATIONS", "combine"]

IMPLEMENTATIONS = ("pallas", "interpret", "xla")


def combine(y, entry, weights, live, residual=None, *, feeds_kernels=False, implementation):
    """Weighted sum over each token's experts, in the order of its ids whatever slots they are in.

    Args:
      y: [U, B, D] f32, outputs of the distinct experts.
      entry: [B, K] i32, which of them are a token's; None: 0 to K - 1. weights: [B, K], any float dtype.
      live: [B] bool; the sum of a dead row is 0, whatever its entries hold.
      residual: [B, D] or None.
      feeds_kernels: see `_compat.call`.
      implementation: see the module.

    Returns:
      The sums [B, D] f32; with `residual` they are rounded to its dtype and added to it.

    Raises:
      ValueError: unknown implementation, or shapes that do not fit.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation = {implementation!r}: must be one of {', '.join(IMPLEMENTATIONS)}")
    rows = y.shape[1:]
    named = weights.shape if entry is None else entry.shape
    if named != weights.shape or weights.shape[0] != rows[0] or live.shape != rows[:1]:
        raise ValueError(
            f"entry {named}, weights {weights.shape}, live {live.shape}: must be two of [{rows[0]}, K] and "
            f"[{rows[0]}] for y {y.shape}"
        )
    if entry is None and weights.shape[1] > len(y):
        raise ValueError(f"weights {weights.shape}: without entry K is at most the {len(y)} experts of y {y.shape}")
    if residual is not None and residual.shape != rows:
        raise ValueError(f"residual {residual.shape}: must be {rows} for y {y.shape}")
    if implementation == "xla":
        return ref.combine(y, entry, weights, live, residual)
    interpret = implementation == "interpret"
    return kernel.combine(y, entry, weights, live, residual, feeds_kernels=feeds_kernels, interpret=interpret)
