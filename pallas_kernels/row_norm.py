"""RMS norms that kernels compute on their way."""

import math
from dataclasses import dataclass

NORM_KINDS = ("narrow", "wide", "zero_centred")


@dataclass(frozen=True)
class RowNorm:
    """RMS norm of a row, r = x / sqrt(mean(x^2) + eps) in float32, times its weight w; hashable, a static argument.

    Args:
      eps: > 0.
      kind: "narrow": r is rounded to x's dtype and then multiplied by w in it. "wide": r * w in float32, rounded last.
        "zero_centred": r * (1 + w) in float32, rounded last.

    Raises:
      ValueError: an unknown kind, or an eps that is no positive number.
    """

    eps: float
    kind: str = "narrow"

    def __post_init__(self):
        if self.kind not in NORM_KINDS:
            raise ValueError(f"kind = {self.kind!r}: must be one of {', '.join(NORM_KINDS)}")
        if not 0 < self.eps < math.inf:
            raise ValueError(f"eps = {self.eps!r}: must be a positive number")

    def scaled(self, r, weight, dtype):
        """n in `dtype` of r in float32; arrays of one shape. Also traced inside the kernel."""
        if self.kind == "narrow":
            return (r.astype(dtype) * weight.astype(dtype)).astype(dtype)
        weight = weight.astype(r.dtype)
        return (r * (1 + weight if self.kind == "zero_centred" else weight)).astype(dtype)
