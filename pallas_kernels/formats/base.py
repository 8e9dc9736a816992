"""The interface of a weight format."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np


class Format(ABC):
    """How matrices [out, in] are stored: frozen, hashable and comparable, so that it can be a static argument.

    One or several matrices of the same width (gate and up) are stacked along the output dimension. They are held as
    named parts: the part of suffix "" takes the name of the weight itself, the others that name with their suffix
    ("down", "down_scale"). The first axis of every part belongs to the matrices' outputs, in their order, so stacking
    two matrices is concatenating their parts.
    """

    name: ClassVar[str]

    @property
    @abstractmethod
    def suffixes(self) -> tuple[str, ...]:
        """Suffixes of the parts, "" first."""

    @abstractmethod
    def row_tensors(self, outs: tuple[int, ...], width: int) -> dict[str, tuple[tuple[int, ...], np.dtype | None]]:
        """{suffix: (shape, dtype)} of the parts of stacked matrices [out, width], `outs` their output sizes.

        dtype None: a floating dtype that the file chooses. Keys are `suffixes`, in that order.

        Raises:
          ValueError: the format cannot hold rows of `width` values.
        """

    @abstractmethod
    def decode(self, parts: Mapping[str, Any], outs: tuple[int, ...], width: int, dtype) -> jax.Array:
        """The stacked matrices [..., sum(outs), width] in `dtype`.

        Values are formed in float32 and rounded once. Traceable; `parts` are {suffix: array [..., *shape]} of
        `row_tensors(outs, width)`, all with the same leading axes.
        """

    @abstractmethod
    def encode(self, w: np.ndarray) -> dict[str, np.ndarray]:
        """Parts {suffix: array} of one matrix `w` [out, in] of floats, each value rounded to the nearest.

        Raises:
          ValueError: `w` has NaN or infinite values (packed formats), or a width that `row_tensors` refuses.
        """


def finite_float64(w: np.ndarray) -> np.ndarray:
    """`w` [out, in] in float64, which holds every value of the floating dtypes of checkpoints.

    Raises:
      ValueError: `w` is no matrix, or has values that are not finite.
    """
    if w.ndim != 2:
        raise ValueError(f"weights of shape {w.shape}: encode one matrix [out, in] at a time")
    w = w.astype(np.float64)
    if bad := w.size - np.isfinite(w).sum():
        raise ValueError(f"{bad} of {w.size} weights are NaN or infinite: they have no packed form, keep them dense")
    return w
