"""Expert rows at rest: read from the checkpoint's own tensors, or from a directory of packed rows.

`ExpertStore` and `PackedRows` have one interface: `spec`, `read(layer, e, name, out)` and `fill(layer, name, out)`
write expert rows in place into memory that the caller owns (the NumPy view of a pinned slab), from as many threads as
the caller likes. This module knows nothing of model families: a checkpoint is anything with `info(name)`, `view(name)`
and `fingerprint()`, and a weight map anything with `expert_sources`, `expert_shapes` and `packed`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from host_offload.parts import Part

logger = logging.getLogger(__name__)

# The parts of one row tensor, concatenated along axis 0.
Parts = tuple[Part, ...]


class StoreError(RuntimeError):
    """Packed rows cannot be written or read: no space, a file that cannot be used, a read that ended early."""


@dataclass(frozen=True)
class RowSpec:
    """The tensors of one expert row and how many rows there are.

    `tensors[name]`: (shape, NumPy dtype) of a row tensor; `L` MoE layers of `E` experts each. `row_bytes` counts one
    row, all tensors, without padding.
    """

    tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]]
    L: int
    E: int

    def __post_init__(self):
        tensors = {name: (tuple(shape), np.dtype(dtype)) for name, (shape, dtype) in self.tensors.items()}
        object.__setattr__(self, "tensors", tensors)

    def nbytes(self, name: str) -> int:
        """Bytes of the tensor `name` of one row."""
        shape, dtype = self.tensors[name]
        return math.prod(shape) * dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return sum(self.nbytes(name) for name in self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """The same in plain JSON types."""
        tensors = {name: {"shape": list(shape), "dtype": dtype.name} for name, (shape, dtype) in self.tensors.items()}
        return {"tensors": tensors, "L": self.L, "E": self.E}

    def check(self, layer: int, name: str, out: np.ndarray, rows: int | None = None, e: int = 0) -> None:
        """Raises `ValueError` unless layer, expert and tensor exist and `out` is a writable array for it.

        `rows` None: `out` is one row tensor; else it has a leading axis of that many rows.
        """
        if name not in self.tensors:
            raise ValueError(f"no row tensor named {name!r}; there are {', '.join(self.tensors)}")
        if not (0 <= layer < self.L and 0 <= e < self.E):
            raise ValueError(f"MoE layer {layer}, expert {e} is outside the {self.L} MoE layers of {self.E} experts")
        shape, dtype = self.tensors[name]
        shape = shape if rows is None else (rows, *shape)
        if out.shape != shape or out.dtype != dtype or not out.flags.writeable or not out.flags.c_contiguous:
            raise ValueError(
                f"out for {name!r} must be a writable C-contiguous {dtype} array of shape {shape}, "
                f"not {out.dtype} {out.shape} ({'writable' if out.flags.writeable else 'read-only'})"
            )


class RowSource(Protocol):
    """What a pool is filled from."""

    spec: RowSpec

    def read(self, layer: int, e: int, name: str, out: np.ndarray) -> None:
        """Writes the tensor `name` of expert `e` in MoE layer `layer` into `out` [*shape]."""

    def fill(self, layer: int, name: str, out: np.ndarray) -> None:
        """Writes that tensor of all E experts of MoE layer `layer` into `out` [E, *shape]."""

    def close(self) -> None:
        """Releases files."""


class ExpertStore:
    """Expert rows straight from the checkpoint's tensors (memory-mapped): nothing is held, nothing is inflated.

    A row keeps the dtype of the file unless that is a floating type wider than `compute_dtype` (more bytes an element);
    then it is rounded while it is copied. The tensors of packed formats stay as they are. Reading is thread-safe: each
    call writes only its own `out`.
    """

    def __init__(self, checkpoint: Any, sources: Mapping[str, Sequence[Sequence[Parts]]], spec: RowSpec):
        self.spec = spec
        self._checkpoint = checkpoint
        self._sources = sources

    @classmethod
    def from_checkpoint(cls, checkpoint: Any, weight_map: Any, compute_dtype: Any) -> ExpertStore:
        """A store over an open checkpoint, which must stay open as long as the store is used.

        `weight_map.expert_sources[name][layer][e]`: the `Parts` of each row tensor; `weight_map.expert_shapes[name]`:
        its shape; `weight_map.packed`: names of the tensors that belong to packed formats. `compute_dtype`: anything
        NumPy takes as a dtype, ml_dtypes included. Raises `StoreError` when a row tensor comes in dtypes that have no
        common one.
        """
        sources = weight_map.expert_sources
        tensors = {}
        for name, layers in sources.items():
            # What a view makes of a file's dtype does not depend on the expert.
            every = (part for rows in layers for parts in rows for part in parts)
            examples = {(checkpoint.info(part.file).dtype, part.view): part for part in every}
            dtypes = {part.form(checkpoint)[1] for part in examples.values()}
            widest = None if name in weight_map.packed else np.dtype(compute_dtype)
            tensors[name] = (weight_map.expert_shapes[name], _row_dtype(name, dtypes, widest))
        first = next(iter(sources.values()))
        return cls(checkpoint, sources, RowSpec(tensors, L=len(first), E=len(first[0])))

    def read(self, layer: int, e: int, name: str, out: np.ndarray) -> None:
        """Writes the tensor `name` of expert `e` in MoE layer `layer` into `out` [*shape], in place."""
        self.spec.check(layer, name, out, e=e)
        self._read(layer, e, name, out)

    def fill(self, layer: int, name: str, out: np.ndarray) -> None:
        """Writes that tensor of all E experts of MoE layer `layer` into `out` [E, *shape], in place."""
        self.spec.check(layer, name, out, rows=self.spec.E)
        for e in range(self.spec.E):
            self._read(layer, e, name, out[e, ...])  # an array even when a row is a scalar

    def fingerprint(self) -> str:
        """The checkpoint's fingerprint."""
        return self._checkpoint.fingerprint()

    def places(self) -> dict[str, Any]:
        """{file tensor: where it lies, as `checkpoint.place` says} of all that the rows are made of."""
        parts = (part for layers in self._sources.values() for rows in layers for parts in rows for part in parts)
        return {name: self._checkpoint.place(name) for part in parts for name in (part.file, *part.beside)}

    def over(self, checkpoint: Any) -> ExpertStore:
        """The same rows from another way to read the same tensors."""
        return ExpertStore(checkpoint, self._sources, self.spec)

    def close(self) -> None:
        """Closes the checkpoint."""
        self._checkpoint.close()

    def _read(self, layer: int, e: int, name: str, out: np.ndarray) -> None:
        start = 0
        parts = self._sources[name][layer][e]
        for part in parts:
            part = part.array(self._checkpoint)
            # A row of one part may be a scalar or any shape; several parts share axis 0 of the row.
            into = out if len(parts) == 1 else out[start : start + part.shape[0]]
            copy_values(into, part)
            start += into.shape[0] if into.ndim else 0


def _row_dtype(name: str, dtypes: set[np.dtype], widest: np.dtype | None) -> np.dtype:
    # Floats of 16 bits and more mix. Integers and floats of one byte mean nothing without their scales, whatever NumPy
    # and the installed ml_dtypes make of them together.
    if len(dtypes) > 1 and any(dtype.itemsize == 1 or dtype.kind in "iub" for dtype in dtypes):
        kinds = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise StoreError(f"row tensor {name!r} is stored as {kinds}, which have no common dtype: convert them")
    dtype = np.dtype(np.result_type(*dtypes))
    if widest is None or dtype.kind in "iu":  # integers: packed tensors that a weight table knows by name
        return dtype
    return widest if widest.itemsize < dtype.itemsize else dtype


def copy_values(into: np.ndarray, source: np.ndarray) -> None:
    """Copies or rounds `source` into `into`; a plain copy of bits never holds the interpreter's lock."""
    if into.dtype == source.dtype:
        # NumPy copies extension dtypes (bfloat16, float8) element by element; as integers it is one memcpy.
        bits = np.dtype(f"u{into.dtype.itemsize}")
        into, source = into.view(bits), source.view(bits)
    np.copyto(into, source, casting="unsafe")


FORMAT = "moe_jax packed rows"
VERSION = 1
ALIGNMENT = 4096  # bytes: the unit of direct reads on every common disk and file system
HEADER = "rows.json"
_LOCK = "rows.lock"
_ROWS = "layer-*.rows"
# Rows whose checksum is verified on open: at least and at most so many, and in between no more than these bytes.
_SAMPLED_ROWS, _SAMPLED_BYTES = (4, 32), 256 << 20


class PackedRows:
    """Expert rows in a directory of their own: one file a MoE layer, each row contiguous and 4096-aligned.

    A row's tensors follow each other in the order of `spec.tensors`; row `e` starts at byte `e * stride`. `rows.json`
    holds format version, fingerprint of the checkpoint, `RowSpec`, file names and a CRC-32 of each row, and is renamed
    into place after the data is on disk: a directory with a header is complete. Files are named for the build that
    wrote them, so a process that still reads an older build keeps what it opened. Reading is thread-safe.
    """

    def __init__(
        self, paths: Sequence[Path], spec: RowSpec, files: Sequence[int], checksums: Sequence[Sequence[int]]
    ):  # fmt: skip
        self.directory = paths[0].parent
        self.spec = spec
        self._paths, self._files = list(paths), list(files)  # a file and its descriptor a layer
        self._checksums = checksums
        self._stride = row_stride(spec)
        self._offset = row_offsets(spec)

    @classmethod
    def open_or_build(
        cls,
        directory: str | os.PathLike,
        store: ExpertStore,
        *,
        threads: int = 4,
        progress: Callable[[int], None] | None = None,
    ) -> PackedRows:
        """Opens the rows in `directory` if they are those of `store`, else writes them first.

        A directory that is stale (other checkpoint, dtype or format) or damaged is rebuilt, with the reason in the log.
        Only files of this format are ever removed. Several processes may ask at once: one builds, the others wait.
        `progress(n)` is called after every n bytes written, from the `threads` that write. Raises `StoreError` with the
        figures when the disk is too small, before anything is removed.
        """
        directory = Path(directory).expanduser()
        if directory.exists() and not directory.is_dir():
            raise StoreError(f"offload_path {directory} is a file: give a directory")
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / _LOCK):
            fingerprint = store.fingerprint()
            reason = None
            if (directory / HEADER).exists():
                try:
                    return cls.open(directory, store.spec, fingerprint)
                except StoreError as error:
                    reason = str(error)
            if reason:
                logger.warning("rebuilding the packed rows: %s", reason)
            _build(directory, store, fingerprint, threads, progress or (lambda n: None))
            return cls.open(directory, store.spec, fingerprint)

    @classmethod
    def open(cls, directory: str | os.PathLike, spec: RowSpec, fingerprint: str) -> PackedRows:
        """Opens packed rows that must be `spec` of the checkpoint with `fingerprint`.

        Verifies header, file sizes and the checksums of a spread of rows; raises `StoreError` naming what is wrong.
        """
        directory = Path(directory)
        header = _read_header(directory / HEADER)
        if header["fingerprint"] != fingerprint:
            found = str(header["fingerprint"])[:12]
            raise StoreError(f"{directory} holds rows of another checkpoint (fingerprint {found})")
        # Compared as lists of items too: the order of the tensors is the order of their bytes in a row.
        wanted = spec.to_dict()
        if header["spec"] != wanted or list(header["spec"]["tensors"]) != list(wanted["tensors"]):
            raise StoreError(f"{directory} holds rows of another shape or dtype: {header['spec']}, not {wanted}")
        _check_lists(directory / HEADER, header, spec)
        size = spec.E * row_stride(spec)
        with contextlib.ExitStack() as opened:
            files = []
            for name in header["files"]:
                try:
                    file = os.open(directory / name, os.O_RDONLY)
                except OSError as error:
                    raise StoreError(f"{directory / name} cannot be opened ({error.strerror})") from error
                opened.callback(os.close, file)
                files.append(file)
                if os.fstat(file).st_size != size:
                    raise StoreError(f"{directory / name} has {os.fstat(file).st_size} bytes instead of {size}")
            rows = cls([directory / name for name in header["files"]], spec, files, header["crc32"])
            rows.verify(_sample(spec))
            opened.pop_all()  # all is well: the descriptors now belong to `rows`
        return rows

    def read(self, layer: int, e: int, name: str, out: np.ndarray) -> None:
        """Writes the tensor `name` of expert `e` in MoE layer `layer` into `out` [*shape], in place."""
        self.spec.check(layer, name, out, e=e)
        self._read(layer, e * self._stride + self._offset[name], out)

    def fill(self, layer: int, name: str, out: np.ndarray) -> None:
        """Writes that tensor of all E experts of MoE layer `layer` into `out` [E, *shape], in place."""
        self.spec.check(layer, name, out, rows=self.spec.E)
        for e in range(self.spec.E):
            self._read(layer, e * self._stride + self._offset[name], out[e, ...])

    def verify(self, rows: Sequence[tuple[int, int]] | None = None) -> None:
        """Compares the checksums of these (layer, expert) rows, default all; `StoreError` names the first damaged."""
        every = ((layer, e) for layer in range(self.spec.L) for e in range(self.spec.E))
        buffer = np.empty(self.spec.row_bytes, np.uint8)
        for layer, e in every if rows is None else rows:
            self._read(layer, e * self._stride, buffer)
            if zlib.crc32(buffer) != self._checksums[layer][e]:
                raise StoreError(f"{self.directory}: expert {e} of MoE layer {layer} is damaged (checksum differs)")

    def row_file(self, layer: int) -> tuple[Path, int, Sequence[int]]:
        """(file of a MoE layer's rows, a descriptor of it that is open until `close`, each row's CRC-32)."""
        return self._paths[layer], self._files[layer], self._checksums[layer]

    def close(self) -> None:
        """Closes the files. Calling it twice is fine; reading afterwards is an error."""
        files, self._files = self._files, []
        for file in files:
            os.close(file)

    def _read(self, layer: int, offset: int, out: np.ndarray) -> None:
        if not self._files:
            raise StoreError(f"{self.directory}: these packed rows were closed")
        try:
            read_at(self._files[layer], offset, out)
        except EOFError as error:
            raise StoreError(
                f"{self.directory}: the file of MoE layer {layer} ends early: it was changed while open"
            ) from error


def read_at(file: int, offset: int, *outs: np.ndarray) -> None:
    """Fills `outs`, of any shape and C-contiguous, one after the other with a file's bytes from `offset` on.

    One system call if the system gives all at once. Raises EOFError if the file ends before, OSError as preadv does.
    """
    left = [memoryview(out.reshape(-1).view(np.uint8)) for out in outs if out.size]
    while left:  # one system call moves at most 2 GiB
        try:
            got = os.preadv(file, left, offset)
        except OSError:
            # Direct reads that come to an end which is not a block's refuse to go on from there.
            if offset < os.fstat(file).st_size:
                raise
            got = 0
        if got == 0:
            raise EOFError(f"the file ends {sum(map(len, left))} bytes early, at byte {offset}")
        offset += got
        while left and got >= len(left[0]):
            got -= len(left.pop(0))
        if got:
            left[0] = left[0][got:]


def row_stride(spec: RowSpec) -> int:
    """Bytes from one packed row to the next: `row_bytes` rounded up to `ALIGNMENT`."""
    return -(-spec.row_bytes // ALIGNMENT) * ALIGNMENT


def row_offsets(spec: RowSpec) -> dict[str, int]:
    """Byte offset of each tensor in its packed row."""
    sizes = [spec.nbytes(name) for name in spec.tensors]
    return {name: sum(sizes[:i]) for i, name in enumerate(spec.tensors)}


def row_views(spec: RowSpec, row: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of one packed row: views of its bytes [row_stride] uint8, by name."""
    offsets = row_offsets(spec)
    return {
        name: row[offsets[name] : offsets[name] + spec.nbytes(name)].view(dtype).reshape(shape)
        for name, (shape, dtype) in spec.tensors.items()
    }


def _sample(spec: RowSpec) -> list[tuple[int, int]]:
    """The (layer, expert) pairs to verify on open, evenly spread, the first and the last row among them."""
    fewest, most = _SAMPLED_ROWS
    count = min(most, max(fewest, _SAMPLED_BYTES // max(1, spec.row_bytes)))
    total = spec.L * spec.E
    picked = sorted({int(i) for i in np.linspace(0, total - 1, min(count, total))})
    return [divmod(i, spec.E) for i in picked]


def _read_header(path: Path) -> dict[str, Any]:
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read ({error})") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT or header.get("version") != VERSION:
        raise StoreError(f"{path} is not version {VERSION} of the format {FORMAT!r}")
    missing = [key for key in ("fingerprint", "spec", "files", "crc32") if key not in header]
    if missing:
        raise StoreError(f"{path} lacks {', '.join(missing)}")
    return header


def _check_lists(path: Path, header: dict[str, Any], spec: RowSpec) -> None:
    """Raises `StoreError` unless there is a file name a layer and a checksum a row."""
    files, checksums = header["files"], header["crc32"]
    if not isinstance(files, list) or not all(isinstance(name, str) and Path(name).name == name for name in files):
        raise StoreError(f"{path} is damaged: its files are {files!r}")
    if len(files) != spec.L:
        raise StoreError(f"{path} names {len(files)} files for {spec.L} MoE layers")
    rows = checksums if isinstance(checksums, list) else []
    if [len(row) if isinstance(row, list) else 0 for row in rows] != [spec.E] * spec.L:
        raise StoreError(f"{path} is damaged: its checksums are not {spec.L} lists of {spec.E}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an advisory lock on `path`, so that of several processes one builds and the others wait."""
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock


def _build(
    directory: Path, store: ExpertStore, fingerprint: str, threads: int, progress: Callable[[int], None]
) -> None:
    """Writes all rows, then the header. On any error the directory is left without files of this build."""
    spec = store.spec
    old = [path for path in directory.glob(_ROWS) if path.is_file()]
    needed = spec.L * spec.E * row_stride(spec)
    free = shutil.disk_usage(directory).free + sum(path.stat().st_size for path in old)
    if needed > free:
        raise StoreError(
            f"packed rows need {needed / 1e9:.2f} GB, but {directory} has room for {free / 1e9:.2f} GB: free space, "
            "set offload_path to a larger disk, or leave it out to read the checkpoint itself"
        )
    # The header goes first: from here on a crash leaves a directory that the next run rebuilds.
    (directory / HEADER).unlink(missing_ok=True)
    for path in (*old, *directory.glob(f"{HEADER}.*.tmp")):
        path.unlink()
    build = uuid.uuid4().hex[:8]
    paths = [directory / f"layer-{layer:04d}-{build}.rows" for layer in range(spec.L)]
    temporary = directory / f"{HEADER}.{build}.tmp"
    try:
        checksums = [_write_layer(path, store, layer, threads, progress) for layer, path in enumerate(paths)]
        header = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": fingerprint,
            "spec": spec.to_dict(),
            "alignment": ALIGNMENT,
            "stride": row_stride(spec),
            "files": [path.name for path in paths],
            "crc32": checksums,
        }
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(header, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, directory / HEADER)
    except BaseException as error:
        for path in (*paths, temporary):
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise StoreError(f"writing packed rows to {directory} failed ({error.strerror or error})") from error
        raise


def _write_layer(
    path: Path, store: ExpertStore, layer: int, threads: int, progress: Callable[[int], None]
) -> list[int]:
    """Writes one layer's rows and returns the CRC-32 of each (of its `row_bytes`, without the padding)."""
    spec, stride = store.spec, row_stride(store.spec)

    def write(e: int) -> int:
        row = np.zeros(stride, np.uint8)
        for name, view in row_views(spec, row).items():
            store.read(layer, e, name, view)
        data, done = memoryview(row), 0
        while done < stride:
            done += os.pwrite(file, data[done:], e * stride + done)
        progress(stride)
        return zlib.crc32(row[: spec.row_bytes])

    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with ThreadPoolExecutor(threads) as pool:
            checksums = list(pool.map(write, range(spec.E)))
        os.fsync(file)
    finally:
        os.close(file)
    return checksums
