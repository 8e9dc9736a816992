"""Where a row tensor lies in the files: which tensor, which share of it, seen in which way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

View = Callable[..., np.ndarray]


class ViewError(ValueError):
    """A file tensor does not have the shape or dtype that its layout needs."""


@dataclass(frozen=True)
class Part:
    """What one file tensor gives to a row tensor; several parts follow each other along axis 0 of the row.

    Args:
        file: name of the file tensor.
        index: None: all of it; an expert's number or its range of rows where several share the tensor.
        view: the same values in our layout: a function of that array, which should return a view of it. None: as it is.
        beside: names of further file tensors that `view` takes after the first, such as the order of its columns;
            `index` applies to each.
    """

    file: str
    index: int | slice | None = None
    view: View | None = None
    beside: tuple[str, ...] = ()

    def array(self, checkpoint: Any) -> np.ndarray:
        """The part as a read-only array [...] over the checkpoint's memory, or a new one if `view` makes one."""
        tensors = [checkpoint.view(name) for name in (self.file, *self.beside)]
        # What is not an array yet (`disk_reader.StoredTensors`) is read here: all of it, or the share alone.
        arrays = [np.asarray(tensor if self.index is None else tensor[self.index, ...]) for tensor in tensors]
        return arrays[0] if self.view is None else self.view(*arrays)

    def form(self, checkpoint: Any) -> tuple[tuple[int, ...], np.dtype]:
        """(shape, dtype) of `array`, without reading the file. Raises `ViewError` if the file tensor does not fit."""
        forms = [self._share(checkpoint.info(name)) for name in (self.file, *self.beside)]
        shape, dtype = forms[0]
        if self.view is None:
            return shape, dtype
        try:
            # Memory that is never touched takes no time; a view of several tensors needs values that make sense.
            seen = self.view(np.empty(shape, dtype), *(np.zeros(shape, dtype) for shape, dtype in forms[1:]))
        except (ValueError, IndexError) as error:
            raise ViewError(f"{self.file} is {dtype} {list(shape)}: {error}") from error
        return seen.shape, seen.dtype

    def _share(self, info: Any) -> tuple[tuple[int, ...], np.dtype]:
        """(shape, dtype) of what `index` selects of a file tensor."""
        shape = tuple(info.shape)
        if isinstance(self.index, slice):
            shape = (len(range(*self.index.indices(shape[0]))), *shape[1:])
        elif self.index is not None:
            shape = shape[1:]
        return shape, info.dtype


def transposed(w: np.ndarray) -> np.ndarray:
    """[in, out] -> [out, in]."""
    _need(w, 2)
    return w.T


def even(w: np.ndarray) -> np.ndarray:
    """Rows 0, 2, ... of axis 0: the gate where gate and up rows alternate."""
    _need_pairs(w)
    return w[0::2]


def odd(w: np.ndarray) -> np.ndarray:
    """Rows 1, 3, ... of axis 0: the up projection where gate and up rows alternate."""
    _need_pairs(w)
    return w[1::2]


def even_columns(w: np.ndarray) -> np.ndarray:
    """`even` of the transposed matrix: [in, 2 * out] -> [out, in]."""
    return even(transposed(w))


def odd_columns(w: np.ndarray) -> np.ndarray:
    """`odd` of the transposed matrix: [in, 2 * out] -> [out, in]."""
    return odd(transposed(w))


def padded(array: np.ndarray, *, axis: int, size: int) -> np.ndarray:
    """The array with zeros after it along `axis` up to `size`: experts of a smaller width among wider ones."""
    missing = size - array.shape[axis]
    if missing < 0:
        raise ValueError(f"axis {axis} must have at most {size} entries")
    return np.pad(array, [(0, missing if i == axis else 0) for i in range(array.ndim)])


def mxfp4_words(blocks: np.ndarray) -> np.ndarray:
    """MXFP4 blocks [out, in / 32, 16] uint8 -> words [out, in / 8] uint32 of `pallas_kernels.formats.MXFP4`."""
    _need(blocks, 3, np.uint8)
    if blocks.shape[2] != 16:
        raise ValueError("a block of 32 four-bit values must be 16 bytes")
    out, n, _ = blocks.shape
    return byte_words(blocks.reshape(out, n * 16))


def mxfp4_scales(scales: np.ndarray) -> np.ndarray:
    """Exponent bytes [out, in / 32] uint8 -> words [out, ceil(in / 128)] uint32, padded with the exponent of 1."""
    _need(scales, 2, np.uint8)
    padding = -scales.shape[1] % 4
    return byte_words(np.pad(scales, ((0, 0), (0, padding)), constant_values=127) if padding else scales)


def even_words(blocks: np.ndarray) -> np.ndarray:
    """`mxfp4_words` of the even rows."""
    return mxfp4_words(even(blocks))


def odd_words(blocks: np.ndarray) -> np.ndarray:
    """`mxfp4_words` of the odd rows."""
    return mxfp4_words(odd(blocks))


def even_scales(scales: np.ndarray) -> np.ndarray:
    """`mxfp4_scales` of the even rows."""
    return mxfp4_scales(even(scales))


def odd_scales(scales: np.ndarray) -> np.ndarray:
    """`mxfp4_scales` of the odd rows."""
    return mxfp4_scales(odd(scales))


def byte_words(array: np.ndarray) -> np.ndarray:
    """Bytes [rows, 4 n] as little-endian words [rows, n]."""
    return array.view(np.dtype("<u4"))


def _need(array: np.ndarray, axes: int, dtype: Any = None) -> None:
    if array.ndim != axes:
        raise ValueError(f"must have {axes} axes")
    if dtype is not None and array.dtype != dtype:
        raise ValueError(f"must be {np.dtype(dtype)}")


def _need_pairs(array: np.ndarray) -> None:
    if array.ndim < 1 or array.shape[0] % 2:
        raise ValueError("must hold gate and up in turn, so an even number of each")
