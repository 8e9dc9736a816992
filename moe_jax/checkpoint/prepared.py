"""Prepared checkpoints: expert rows and dense parameters as the engine holds them, in orbax checkpoints.

A prepared checkpoint is a directory that `moe_jax.conversion` writes and `MoE` loads like any other:

    prepared.json       version, dtype, formats of the experts, the rows' tensors, the parameters and all checksums
    rows/<i>            orbax checkpoint of MoE layer i: each row tensor of all experts, [E, *shape]
    params/<i>          orbax checkpoint of some dense parameters by dotted path, already decoded
    config.json, ...    of the source, as they are

Nothing is repacked or decoded while it is loaded: a layer is read as it lies on the disk and copied into the pool. One
checkpoint a layer keeps memory to a layer at a time, in writing and in reading.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import math
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from host_offload.store import RowSpec, copy_values
from moe_jax.checkpoint.reader import Checkpoint, listed, raise_problems, read_config
from moe_jax.errors import CheckpointError
from pallas_kernels.expert_ffn import ExpertSpec
from pallas_kernels.formats import FP8, INT4, MXFP4, Dense, Format

FORMAT, VERSION = "moe_jax prepared checkpoint", 1
HEADER = "prepared.json"
_FORMATS: dict[str, type[Format]] = {form.name: form for form in (Dense, FP8, INT4, MXFP4)}
# Chunks of an array, so that one is written and read by several threads.
_CHUNK_BYTES = 64 << 20
# As many threads may fill a pool at once: of so many experts the layers are kept.
_MOST_THREADS = 32


def is_prepared(directory: str | os.PathLike) -> bool:
    """Whether `directory` is a prepared checkpoint."""
    return (Path(directory) / HEADER).is_file()


def open_checkpoint(directory: str | os.PathLike) -> Checkpoint | PreparedCheckpoint:
    """Opens a directory in Hugging Face layout or a prepared one. Raises `CheckpointError` as these do."""
    return PreparedCheckpoint.open(directory) if is_prepared(directory) else Checkpoint.open(directory)


class PreparedCheckpoint:
    """An open prepared checkpoint.

    Attributes:
        directory: where it lies. config, generation_config: the JSON files' contents.
        spec: the rows as they are stored. dtype: the dtype that the source's config gives, which dense weights have.
        gate_up, down: formats of the experts' weights.
    """

    def __init__(self, directory: Path, config: dict, generation_config: dict, header: Mapping[str, Any]):
        self.directory, self.config, self.generation_config = directory, config, generation_config
        tensors = {name: (tuple(t["shape"]), jnp.dtype(t["dtype"])) for name, t in header["spec"]["tensors"].items()}
        self.spec = RowSpec(tensors, L=header["spec"]["L"], E=header["spec"]["E"])
        self.dtype: str = header["dtype"]
        self.gate_up, self.down = (_format_of(header["formats"][name]) for name in ("gate_up", "down"))
        self._header = header
        self._params = [
            {path: (tuple(shape), jnp.dtype(dtype)) for path, (shape, dtype) in group.items()}
            for group in header["params"]
        ]
        counts = [len(found) for key in ("rows_crc32", "params_crc32") for found in header[key]]
        if counts != [len(tensors)] * self.spec.L + [len(group) for group in self._params]:
            raise ValueError("not a checksum for every array")

    @classmethod
    def open(cls, directory: str | os.PathLike) -> PreparedCheckpoint:
        """Opens `directory`. Raises `CheckpointError` for a header that is damaged or of another version."""
        directory = Path(directory).expanduser()
        path = directory / HEADER
        try:
            header = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}): convert the checkpoint again") from error
        if not isinstance(header, dict) or (header.get("format"), header.get("version")) != (FORMAT, VERSION):
            raise CheckpointError(f"{path} is not version {VERSION} of a {FORMAT}: convert the checkpoint again")
        configs = read_config(directory)
        try:
            return cls(directory, *configs, header)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged ({error!r}): convert the checkpoint again") from error

    def fingerprint(self) -> str:
        """SHA-256 (hex) that tells this checkpoint from another one: of config.json and of the header, which holds a
        checksum of everything else."""
        return hashlib.sha256(json.dumps([self.config, self._header], sort_keys=True).encode()).hexdigest()

    def experts(self, spec: ExpertSpec) -> ExpertSpec:
        """`spec`, the model's, with the formats that the rows have."""
        return dataclasses.replace(spec, gate_up=self.gate_up, down=self.down)

    def check(self, cfg: Any, targets: Mapping[str, tuple[int, ...]]) -> None:
        """Raises `CheckpointError` with all that does not fit the model of `cfg`.

        targets: shape of each dense parameter by path.
        """
        L, E, model = len(cfg.moe_layers), cfg.num_experts, cfg.expert_row_shapes()["down"][0]
        problems = []
        try:
            tensors = self.experts(cfg.expert_spec()).row_tensors(cfg.expert_width, model)
        except ValueError as error:
            problems.append(str(error))
        else:
            wanted = {name: shape for name, (shape, _) in tensors.items()}
            found = {name: shape for name, (shape, _) in self.spec.tensors.items()}
            if (L, E, wanted) != (self.spec.L, self.spec.E, found):
                problems.append(
                    f"{self.spec.L} MoE layers of {self.spec.E} experts {found}, but config.json describes {L} of {E}, "
                    f"{wanted}"
                )
        stored = {path: shape for group in self._params for path, (shape, _) in group.items()}
        if odd := sorted(path for path in stored.keys() | targets.keys() if stored.get(path) != targets.get(path)):
            problems.append(f"parameters that config.json describes otherwise: {listed(odd)}")
        if problems:
            problems.append(f"config.json was changed after the conversion, or {HEADER} is another model's")
        raise_problems(self.directory, problems)

    def store(self, compute_dtype: np.dtype) -> PreparedRows:
        """The rows; floating parts that are no packed format's are rounded to a narrower `compute_dtype`."""
        return PreparedRows(self, compute_dtype)

    def load_params(self, put: Callable[[str, np.ndarray], Any]) -> dict[str, Any]:
        """{dotted path: what `put(path, array)` makes of it} of all dense parameters, some at a time."""
        loaded = {}
        for i, group in enumerate(self._params):
            like = {path: _like(shape, dtype) for path, (shape, dtype) in group.items()}
            arrays = load_arrays(self.directory / "params" / str(i), like, self._header["params_crc32"][i])
            loaded |= {path: put(path, array) for path, array in arrays.items()}
        return loaded

    @property
    def params_nbytes(self) -> int:
        """Bytes of all dense parameters, as stored."""
        return sum(math.prod(shape) * dtype.itemsize for group in self._params for shape, dtype in group.values())

    def layer(self, i: int) -> dict[str, np.ndarray]:
        """The row tensors [E, *shape] of MoE layer i, as stored, checked against their checksums."""
        like = {name: _like((self.spec.E, *shape), dtype) for name, (shape, dtype) in self.spec.tensors.items()}
        return load_arrays(self.directory / "rows" / str(i), like, self._header["rows_crc32"][i])

    def close(self) -> None:
        """Nothing stays open."""

    def __enter__(self) -> PreparedCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PreparedRows:
    """The rows of a prepared checkpoint as a `host_offload.store.RowSource`; thread-safe.

    A layer is read whole when the first of its rows is asked for, and forgotten with the last.
    """

    def __init__(self, checkpoint: PreparedCheckpoint, compute_dtype: np.dtype):
        stored, self._checkpoint = checkpoint.spec, checkpoint
        words = {
            name + suffix
            for name, form in (("gate_up", checkpoint.gate_up), ("down", checkpoint.down))
            for suffix in (() if isinstance(form, Dense) else form.suffixes)
        }
        tensors = {
            name: (shape, dtype if name in words or dtype.itemsize <= compute_dtype.itemsize else compute_dtype)
            for name, (shape, dtype) in stored.tensors.items()
        }
        self.spec = RowSpec(tensors, L=stored.L, E=stored.E)
        self._kept = -(-_MOST_THREADS // stored.E) + 1
        self._layers: OrderedDict[int, Future] = OrderedDict()
        self._unread: dict[int, int] = {}
        self._lock = threading.Lock()

    def read(self, layer: int, e: int, name: str, out: np.ndarray) -> None:
        """Writes the tensor `name` of expert `e` in MoE layer `layer` into `out` [*shape], in place."""
        self.spec.check(layer, name, out, e=e)
        copy_values(out, self._of(layer)[name][e, ...])
        self._served(layer, 1)

    def fill(self, layer: int, name: str, out: np.ndarray) -> None:
        """Writes that tensor of all E experts of MoE layer `layer` into `out` [E, *shape], in place."""
        self.spec.check(layer, name, out, rows=self.spec.E)
        copy_values(out, self._of(layer)[name])
        self._served(layer, self.spec.E)

    def fingerprint(self) -> str:
        """The checkpoint's fingerprint."""
        return self._checkpoint.fingerprint()

    def close(self) -> None:
        """Forgets what was read."""
        with self._lock:
            self._layers.clear()

    def _of(self, layer: int) -> Mapping[str, np.ndarray]:
        with self._lock:
            future = self._layers.get(layer)
            ours = future is None
            if ours:
                while len(self._layers) >= self._kept:
                    self._layers.popitem(last=False)
                future = self._layers[layer] = Future()
                self._unread[layer] = self.spec.E * len(self.spec.tensors)
        if ours:
            try:
                future.set_result(self._checkpoint.layer(layer))
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    def _served(self, layer: int, rows: int) -> None:
        with self._lock:
            self._unread[layer] -= rows
            if self._unread[layer] <= 0:
                self._layers.pop(layer, None)


# ----------------------------------------------------------------------------------------------------------- writing


class PreparedWriter:
    """Writes a prepared checkpoint into the directory `into`: layers in order, parameters, and last the header."""

    def __init__(self, into: Path, spec: RowSpec, dtype: str, experts: ExpertSpec):
        self._into = into
        self._header: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": dtype,
            "formats": {name: _format_dict(getattr(experts, name)) for name in ("gate_up", "down")},
            "spec": spec.to_dict(),
            "rows_crc32": [],
            "params": [],
            "params_crc32": [],
        }

    def layer(self, arrays: Mapping[str, np.ndarray]) -> None:
        """The next MoE layer's row tensors [E, *shape], in the order of the spec."""
        checksums = self._header["rows_crc32"]
        checksums.append(_save(self._into / "rows" / str(len(checksums)), arrays))

    def params(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Some dense parameters by path."""
        shapes = {path: (list(array.shape), array.dtype.name) for path, array in arrays.items()}
        self._header["params"].append(shapes)
        checksums = self._header["params_crc32"]
        checksums.append(_save(self._into / "params" / str(len(checksums)), arrays))

    def finish(self, source: str, conversion: Mapping[str, Any]) -> None:
        """Writes the header. source: fingerprint of the source; conversion: what was done, for people."""
        content = self._header | {"source": source, "conversion": dict(conversion)}
        with open(self._into / HEADER, "x", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())


def _save(path: Path, arrays: Mapping[str, np.ndarray]) -> list[int]:
    """Writes one orbax checkpoint, reads it again and returns the CRC-32 of each array."""
    from orbax.checkpoint import v1 as ocp  # takes a second to import, which only prepared checkpoints should cost

    path.parent.mkdir(exist_ok=True)

    def save() -> None:
        context = ocp.Context()
        context.array.saving.use_compression = False  # of random bits it would only cost time
        context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
        with context, _quiet():
            ocp.save(path, dict(arrays))

    try:
        # In a thread that an interrupt waits for: orbax' own would go on writing into a directory that is removed.
        with ThreadPoolExecutor(1) as saver:
            saver.submit(save).result()
    except ValueError as error:
        if "No space left" in str(error) or "quota exceeded" in str(error).lower():  # as tensorstore says it
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise
    checksums = [_crc32(array) for array in arrays.values()]
    load_arrays(path, {name: _like(array.shape, array.dtype) for name, array in arrays.items()}, checksums)
    return checksums


def load_arrays(path: Path, like: Mapping[str, np.ndarray], checksums: Sequence[int]) -> dict[str, np.ndarray]:
    """Reads an orbax checkpoint of arrays like these; raises `CheckpointError` if it has others or other values."""
    from orbax.checkpoint import v1 as ocp

    remedy = "it was damaged or belongs to another conversion: convert the checkpoint again"
    try:
        with _quiet():
            arrays = ocp.load(path, dict(like))
    except Exception as error:  # whatever orbax and tensorstore raise for files that are missing or damaged
        raise CheckpointError(f"{path} cannot be loaded ({str(error).splitlines()[0]}): {remedy}") from error
    for (name, wanted), checksum in zip(like.items(), checksums, strict=True):
        array = arrays[name]
        if array.shape != wanted.shape or array.dtype != wanted.dtype or _crc32(array) != checksum:
            raise CheckpointError(f"{path}: the values of {name} are not those of {HEADER}: {remedy}")
    return {name: arrays[name] for name in like}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the log of orbax, whose threads write every fault that is raised anyway, with pages of traceback."""

    def drop(record: logging.LogRecord) -> bool:
        return False

    log = logging.getLogger("absl")
    log.addFilter(drop)
    try:
        yield
    finally:
        log.removeFilter(drop)


def _crc32(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _like(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """What orbax needs to know of an array, without its memory: pages that are never touched."""
    return np.empty(tuple(shape), jnp.dtype(dtype))


def _format_dict(form: Format) -> dict[str, Any]:
    return {"name": form.name, **dataclasses.asdict(form)}


def _format_of(content: Mapping[str, Any]) -> Format:
    options = dict(content)
    return _FORMATS[options.pop("name")](**options)
