"""How a disk tier reads expert rows: whole packed rows straight into pinned memory, or tensor by tensor.

A reader fills rows of the tier, `row_stride(spec)` bytes each and aligned to `ALIGNMENT`. Every fault is a `StoreError`
(or what the source raises, such as a prepared checkpoint's `CheckpointError`) that names file, place and remedy; a
memory map, which answers a fault by ending the process, is not read here.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from host_offload.store import (
    ExpertStore,
    PackedRows,
    RowSource,
    StoreError,
    read_at,
    row_stride,
    row_views,
)

logger = logging.getLogger(__name__)

# Rows that are neighbours in a file are read by one system call up to this size; larger reads would leave threads idle.
JOB_BYTES = 4 << 20
# Most buffers of one preadv call: IOV_MAX of Linux.
MOST_BUFFERS = 1024

_CHANGED = "it was changed while it was in use: put the file back as it was, or load the model again"


class RowReader(Protocol):
    """What a tier reads with; thread-safe.

    how: "direct" (past the page cache) or "buffered". rows_a_job: most neighbouring rows that one call should read.
    """

    how: str
    rows_a_job: int

    def read(self, layer: int, experts: Sequence[int], rows: Sequence[np.ndarray]) -> None:
        """Fills `rows` (uint8 [stride] each) with these experts, whose numbers follow each other."""

    def close(self) -> None:
        """Releases files."""


def make_reader(source: RowSource, probe: np.ndarray) -> RowReader:
    """The reader of a row source, for rows in the kind of memory that `probe` (uint8 [stride]) is.

    It holds files of its own, so that a checkpoint may be closed afterwards; packed rows belong to the reader, which
    closes them. Raises StoreError for files that changed since the checkpoint was opened.
    """
    if isinstance(source, PackedRows):
        return PackedReader(source, probe)
    if isinstance(source, ExpertStore):
        return TensorReader(source.over(StoredTensors(source.places())))
    return TensorReader(source)


class TensorReader:
    """Rows of any `RowSource`, one tensor after the other by its `read`."""

    how, rows_a_job = "buffered", 1

    def __init__(self, source: RowSource):
        self._source = source

    def read(self, layer: int, experts: Sequence[int], rows: Sequence[np.ndarray]) -> None:
        """As `RowReader.read`."""
        for expert, row in zip(experts, rows, strict=True):
            for name, view in row_views(self._source.spec, row).items():
                self._source.read(layer, expert, name, view)

    def close(self) -> None:
        """Closes the source."""
        self._source.close()


class PackedReader:
    """Rows of `PackedRows`, each in one piece, past the page cache where the file system can; checksums are compared.

    The checksum is the judge of what was read, so a file that another process replaced stays readable as it was opened.
    Whether direct reads are possible is tried once, into `probe`: file systems and kinds of memory may refuse them.
    """

    def __init__(self, packed: PackedRows, probe: np.ndarray):
        self._packed, self._spec, self._stride = packed, packed.spec, row_stride(packed.spec)
        self.rows_a_job = min(MOST_BUFFERS, max(1, JOB_BYTES // self._stride))
        self._direct: list[int] = []
        try:
            for layer in range(packed.spec.L):
                path, file, _ = packed.row_file(layer)
                self._direct.append(os.open(path, os.O_RDONLY | os.O_DIRECT))
                if not os.path.samestat(os.fstat(self._direct[-1]), os.fstat(file)):
                    raise StoreError(f"{path} was replaced while the model was loading: load it again")
            read_at(self._direct[0], 0, probe)
        except OSError as error:
            self._close_direct()
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT):
                raise StoreError(f"{packed.directory} cannot be read ({error}): load the model again") from error
            logger.info("%s: no direct reads here (%s), so they go through the page cache", path, error.strerror)
        except BaseException:
            self._close_direct()
            raise

    @property
    def how(self) -> str:
        """ "direct", or "buffered" where the file system refuses direct reads."""
        return "direct" if self._direct else "buffered"

    def read(self, layer: int, experts: Sequence[int], rows: Sequence[np.ndarray]) -> None:
        """As `RowReader.read`: one system call."""
        path, file, checksums = self._packed.row_file(layer)
        offset = experts[0] * self._stride
        where = f"{path}: {len(rows) * self._stride} bytes at byte {offset}"
        try:
            read_at(self._direct[layer] if self._direct else file, offset, *rows)
        except EOFError as error:
            raise StoreError(f"{where} cannot be read ({error}): {_CHANGED}") from error
        except OSError as error:
            raise StoreError(f"{where} cannot be read ({error.strerror}): check the disk, then call again") from error
        for expert, row in zip(experts, rows, strict=True):
            if zlib.crc32(row[: self._spec.row_bytes]) != checksums[expert]:
                raise StoreError(
                    f"{path}: the row at byte {expert * self._stride}, expert {expert} of MoE layer {layer}, differs "
                    f"from its checksum: remove {self._packed.directory} and load the model again, which writes it anew"
                )

    def close(self) -> None:
        """Closes the files. Calling it twice is fine."""
        self._close_direct()
        self._packed.close()

    def _close_direct(self) -> None:
        files, self._direct = self._direct, []
        for file in files:
            os.close(file)


class StoredTensors:
    """File tensors of a checkpoint, read when they are asked for: what `Part.array` takes in the place of a checkpoint.

    There are no checksums, so after each read the file must be as it was when the checkpoint was opened: the same
    device, inode, size and modification time.

    Args:
        places: {name: path, offset, info (dtype, shape) and stat of the opened file}, see `ExpertStore.places`.
    """

    def __init__(self, places: Mapping[str, Any]):
        self._places = places
        self._files: dict[Any, int] = {}
        try:
            for place in places.values():
                if place.path not in self._files:
                    self._files[place.path] = os.open(place.path, os.O_RDONLY)
                    self._check(place)
        except OSError as error:
            self.close()
            raise StoreError(f"{error.filename} cannot be opened ({error.strerror}): {_CHANGED}") from error
        except StoreError:
            self.close()
            raise

    def view(self, name: str) -> StoredTensor:
        """The tensor, not read yet."""
        return StoredTensor(self, self._places[name])

    def read(self, place: Any, start: int, shape: tuple[int, ...]) -> np.ndarray:
        """A new array [*shape] from `start` bytes after the tensor's first. Raises StoreError."""
        out = np.empty(shape, place.info.dtype)
        offset = place.offset + start
        where = f"{place.path}: {out.nbytes} bytes at byte {offset}"
        try:
            read_at(self._files[place.path], offset, out)
        except EOFError as error:
            raise StoreError(f"{where} cannot be read ({error}): {_CHANGED}") from error
        except OSError as error:
            raise StoreError(f"{where} cannot be read ({error.strerror}): check the disk, then call again") from error
        self._check(place, where)
        return out

    def close(self) -> None:
        """Closes the files. Calling it twice is fine."""
        files, self._files = self._files, {}
        for file in files.values():
            os.close(file)

    def _check(self, place: Any, where: str = "") -> None:
        try:
            now = os.stat(place.path)
        except OSError as error:
            raise StoreError(f"{where or place.path}: the file is gone ({error.strerror}): {_CHANGED}") from error
        for field in ("st_dev", "st_ino", "st_size", "st_mtime_ns"):
            before, after = getattr(place.stat, field), getattr(now, field)
            if before != after:
                what = field.removeprefix("st_").removesuffix("_ns")
                raise StoreError(f"{where or place.path}: the file's {what} was {before} and is {after}: {_CHANGED}")


class StoredTensor:
    """A file tensor that is read when it becomes an array, whole or the share `tensor[index, ...]` of its axis 0."""

    def __init__(self, tensors: StoredTensors, place: Any):
        self._tensors, self._place = tensors, place

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._tensors.read(self._place, 0, self._place.info.shape)

    def __getitem__(self, key: tuple[Any, ...]) -> np.ndarray:
        index, _ = key  # (an int or a slice of consecutive rows, Ellipsis)
        dtype, (length, *inner) = self._place.info.dtype, self._place.info.shape
        nbytes = math.prod(inner) * dtype.itemsize
        if isinstance(index, slice):
            rows = range(length)[index]
            if rows.step != 1:
                raise ValueError(f"a share of a file tensor must be consecutive rows, not {index}")
            return self._tensors.read(self._place, rows.start * nbytes, (len(rows), *inner))
        return self._tensors.read(self._place, range(length)[index] * nbytes, tuple(inner))
