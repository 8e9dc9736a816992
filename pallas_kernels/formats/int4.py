"""INT4: 4-bit integers with a scale, and maybe a zero point, for `group` neighbours along the input dimension.

The weight-only formats of GPTQ, AWQ and compressed-tensors ("W4A16"), brought into one layout.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats.base import Format, finite_float64
from pallas_kernels.formats.words import halves, pack, unpack

MIDDLE = 8  # the zero point of a format without zero points


@dataclass(frozen=True)
class INT4(Format):
    """Matrices [out, in], `in` a multiple of 8 and of `group`, as

    * "" uint32 [out, in / 8]: q of column 8 w + i of a row is in bits 4 i .. 4 i + 3 of its word w;
    * "_scale" [out, in / group] of a floating dtype;
    * with `zeros` "_zero" uint32 [out, ceil(in / group / 8)]: the zero points, packed as q; else they are 8;
    * with `order` "_order" int32 [matrices, in]: stored column j of matrix m is column order[m, j] of the true matrix.
      Every row of it is a permutation. GPTQ's act-order: the columns are stored sorted by group.

    W = (q - zero) * scale.

    Args:
      group: columns a scale; equal to the width for one scale a row.
      zeros, order: whether these parts exist.

    Raises:
      ValueError: group below 1.
    """

    name: ClassVar[str] = "int4"
    group: int
    zeros: bool = False
    order: bool = False

    def __post_init__(self):
        if self.group < 1:
            raise ValueError(f"group = {self.group!r}: at least 1; for one scale a row give the width")

    @property
    def suffixes(self) -> tuple[str, ...]:
        return ("", "_scale", *(("_zero",) if self.zeros else ()), *(("_order",) if self.order else ()))

    def row_tensors(self, outs: tuple[int, ...], width: int) -> dict[str, tuple[tuple[int, ...], np.dtype | None]]:
        if width % 8 or width % self.group:
            raise ValueError(f"an INT4 row of {width} values: must be a multiple of 8 and of the group, {self.group}")
        out, groups, word = sum(outs), width // self.group, np.dtype(np.uint32)
        tensors = {"": ((out, width // 8), word), "_scale": ((out, groups), None)}
        if self.zeros:
            tensors["_zero"] = ((out, -(-groups // 8)), word)
        if self.order:
            tensors["_order"] = ((len(outs), width), np.dtype(np.int32))
        return tensors

    def decode(self, parts: Mapping[str, Any], outs: tuple[int, ...], width: int, dtype) -> jax.Array:
        groups = width // self.group
        q = unpack(parts[""], 4).astype(jnp.int32)
        q = q.reshape(*q.shape[:-1], groups, self.group)
        zero = unpack(parts["_zero"], 4)[..., :groups, None].astype(jnp.int32) if self.zeros else MIDDLE
        w = (q - zero).astype(jnp.float32) * parts["_scale"].astype(jnp.float32)[..., None]
        w = w.reshape(*w.shape[:-2], width).astype(dtype)
        return _in_true_order(w, parts["_order"], outs) if self.order else w

    def encode(self, w: np.ndarray) -> dict[str, np.ndarray]:
        """Symmetric without `zeros`: scale = largest magnitude of the group / 7, q - 8 within +-7. With `zeros`: scale
        = (highest - lowest) / 15 of the group's range extended to 0, zero = -lowest / scale rounded. Scales have the
        dtype of `w` (float32 for float64) and are 1 for a group of zeros; the order is that of the columns."""
        dtype = np.float32 if w.dtype == np.float64 else w.dtype
        w = finite_float64(w)
        self.row_tensors(w.shape[:1], w.shape[1])
        groups = w.reshape(len(w), -1, self.group)
        low, high = np.minimum(groups.min(axis=-1), 0), np.maximum(groups.max(axis=-1), 0)
        exact = (high - low) / 15 if self.zeros else np.maximum(high, -low) / 7
        scale = exact.astype(dtype)
        scale[scale == 0] = 1
        step = scale.astype(np.float64)
        zero = np.clip(np.rint(-low / step), 0, 15) if self.zeros else np.full(scale.shape, MIDDLE)
        q = np.clip(np.rint(groups / step[..., None]) + zero[..., None], 0 if self.zeros else 1, 15)
        parts = {"": pack(q.reshape(w.shape), 4), "_scale": scale}
        if self.zeros:
            parts["_zero"] = pack(zero, 4)
        if self.order:
            parts["_order"] = np.arange(w.shape[1], dtype=np.int32)[None]
        return parts


def _in_true_order(w, order, outs):
    """w [..., sum(outs), in] with column j of matrix m at order[..., m, j]."""
    columns = jnp.broadcast_to(jnp.arange(w.shape[-1], dtype=order.dtype), order.shape)
    stored_at = jnp.put_along_axis(jnp.zeros_like(order), order, columns, axis=-1, inplace=False)
    matrices, first = [], 0
    for m, out in enumerate(outs):
        matrix = w[..., first : first + out, :]
        matrices.append(jnp.take_along_axis(matrix, stored_at[..., m, None, :], axis=-1))
        first += out
    return jnp.concatenate(matrices, axis=-2)


def pairs(words: jax.Array) -> Iterator[jax.Array]:
    """q of columns 8 w + i and 8 w + i + 4 of each word w, for i = 0 .. 3: the first in the lower half of a word.

    For kernels: two nibbles an operation.
    """
    for i in range(4):
        yield (words >> 4 * i) & np.uint32(0x000F000F)


def lane_values(words: jax.Array, zero: jax.Array) -> list[jax.Array]:
    """q - zero of columns 8 w + i of each word w, float32, for i = 0 .. 7. For kernels.

    `zero`: uint32 like `words`, or a number.
    """
    # A float16 with these bits is 1024 + q.
    offset = (zero + np.uint32(1024)).astype(jnp.float32)
    values = [
        half.astype(jnp.float32) - offset
        for pair in pairs(words)
        for half in halves(pair | np.uint32(0x64006400), jnp.float16)
    ]
    return values[0::2] + values[1::2]
