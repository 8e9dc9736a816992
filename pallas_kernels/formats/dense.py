"""Dense matrices: an array [out, in] of a floating dtype."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np

from pallas_kernels.formats.base import Format


@dataclass(frozen=True)
class Dense(Format):
    """An array [out, in] of a floating dtype, as the file has it."""

    name: ClassVar[str] = "dense"

    @property
    def suffixes(self) -> tuple[str, ...]:
        return ("",)

    def row_tensors(self, outs: tuple[int, ...], width: int) -> dict[str, tuple[tuple[int, ...], np.dtype | None]]:
        return {"": ((sum(outs), width), None)}

    def decode(self, parts: Mapping[str, Any], outs: tuple[int, ...], width: int, dtype) -> jax.Array:
        return parts[""].astype(dtype)

    def encode(self, w: np.ndarray) -> dict[str, np.ndarray]:
        return {"": w}
