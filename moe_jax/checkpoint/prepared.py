"""Prepared checkpoints: expert rows and dense parameters as the engine holds them, in orbax checkpoints.

A prepared checkpoint is a directory that `moe_jax.conversion` writes and `MoE` loads like any other:

    prepared.json       version, dtype, formats of the experts, the rows' tensors, the parameters and all checksums
    rows/<i>            orbax checkpoint of MoE layer i: each row tensor of all experts, [E, *shape]
    params/<i>          orbax checkpoint of some dense parameters by dotted path, already decoded
    config.json, ...    of the source, as they are

Nothing is repacked or decoded while it is loaded. orbax writes the rows without compression, one file an array, so that
each row is read from its place in the file straight into the pool; any other program opens them through orbax. One
checkpoint a layer keeps memory to a layer at a time.
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
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from host_offload.store import RowSpec, copy_values, read_at
from moe_jax.checkpoint.reader import Checkpoint, listed, raise_problems, read_config
from moe_jax.errors import CheckpointError
from pallas_kernels.expert_ffn import ExpertSpec
from pallas_kernels.formats import FP8, INT4, MXFP4, Dense, Format

FORMAT, VERSION = "moe_jax prepared checkpoint", 1
HEADER = "prepared.json"
_FORMATS: dict[str, type[Format]] = {form.name: form for form in (Dense, FP8, INT4, MXFP4)}
_REMEDY = "it was damaged or belongs to another conversion: convert the checkpoint again"


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
        rows = [{name: len(checksums) for name, (_, checksums) in layer.items()} for layer in header["rows"]]
        params = [len(checksums) for checksums in header["params_crc32"]]
        every = dict.fromkeys(tensors, self.spec.E)
        if rows != [every] * self.spec.L or params != [len(group) for group in self._params]:
            raise ValueError("not a checksum for every array")
        files = [Path(file) for layer in header["rows"] for file, _ in layer.values()]
        if outside := [file for file in files if file.is_absolute() or ".." in file.parts]:
            raise ValueError(f"{outside[0]} is outside the directory")

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

    def row_file(self, layer: int, name: str) -> tuple[Path, list[int]]:
        """(file that holds this row tensor of all experts of a MoE layer, one after another, each row's CRC-32)."""
        file, checksums = self._header["rows"][layer][name]
        return self.directory / file, checksums

    def close(self) -> None:
        """Nothing stays open."""

    def __enter__(self) -> PreparedCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PreparedRows:
    """The rows of a prepared checkpoint as a `host_offload.store.RowSource`; thread-safe.

    A row tensor is read straight into the caller's memory from the file that orbax wrote, and its checksum compared.
    """

    def __init__(self, checkpoint: PreparedCheckpoint, compute_dtype: np.dtype):
        self._checkpoint, self._stored = checkpoint, checkpoint.spec
        packed = {
            name + suffix
            for name, form in (("gate_up", checkpoint.gate_up), ("down", checkpoint.down))
            for suffix in (() if isinstance(form, Dense) else form.suffixes)
        }
        tensors = {
            name: (shape, dtype if name in packed or dtype.itemsize <= compute_dtype.itemsize else compute_dtype)
            for name, (shape, dtype) in self._stored.tensors.items()
        }
        self.spec = RowSpec(tensors, L=self._stored.L, E=self._stored.E)

    def read(self, layer: int, e: int, name: str, out: np.ndarray) -> None:
        """Writes the tensor `name` of expert `e` in MoE layer `layer` into `out` [*shape], in place."""
        self.spec.check(layer, name, out, e=e)
        shape, dtype = self._stored.tensors[name]
        values = out if out.dtype == dtype else np.empty(shape, dtype)
        read_row(*self._checkpoint.row_file(layer, name), e, values)
        if values is not out:
            copy_values(out, values)

    def fill(self, layer: int, name: str, out: np.ndarray) -> None:
        """Writes that tensor of all E experts of MoE layer `layer` into `out` [E, *shape], in place."""
        for e in range(self.spec.E):
            self.read(layer, e, name, out[e, ...])

    def fingerprint(self) -> str:
        """The checkpoint's fingerprint."""
        return self._checkpoint.fingerprint()

    def close(self) -> None:
        """Nothing stays open."""


def read_row(path: Path, checksums: Sequence[int], e: int, out: np.ndarray) -> None:
    """Fills `out` with row `e` of a file of such rows; raises `CheckpointError` unless it has its checksum."""
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            read_at(file, e * out.nbytes, out)
        finally:
            os.close(file)
    except (OSError, EOFError) as error:
        raise CheckpointError(f"{path} cannot be read at byte {e * out.nbytes} ({error}): {_REMEDY}") from error
    if _crc32(out) != checksums[e]:
        raise CheckpointError(
            f"{path}: the values of expert {e}, at byte {e * out.nbytes}, are not those of {HEADER}: {_REMEDY}"
        )


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
            "rows": [],
            "params": [],
            "params_crc32": [],
        }

    def layer(self, arrays: Mapping[str, np.ndarray]) -> None:
        """The next MoE layer's row tensors [E, *shape], in the order of the spec."""
        rows = self._header["rows"]
        path = self._into / "rows" / str(len(rows))
        save_arrays(path, arrays)
        files = {name: _data_file(path, name, array.nbytes) for name, array in arrays.items()}
        checksums = {name: [_crc32(row) for row in array] for name, array in arrays.items()}
        for name, array in arrays.items():
            again = np.empty(array.shape[1:], array.dtype)
            for e in range(len(array)):
                read_row(files[name], checksums[name], e, again)
        rows.append({name: (files[name].relative_to(self._into).as_posix(), checksums[name]) for name in arrays})

    def params(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Some dense parameters by path."""
        shapes = {path: (list(array.shape), array.dtype.name) for path, array in arrays.items()}
        self._header["params"].append(shapes)
        checksums = self._header["params_crc32"]
        path = self._into / "params" / str(len(checksums))
        save_arrays(path, arrays)
        checksums.append([_crc32(array) for array in arrays.values()])
        load_arrays(path, {name: _like(array.shape, array.dtype) for name, array in arrays.items()}, checksums[-1])

    def finish(self, source: str, conversion: Mapping[str, Any]) -> None:
        """Writes the header. source: fingerprint of the source; conversion: what was done, for people."""
        content = self._header | {"source": source, "conversion": dict(conversion)}
        with open(self._into / HEADER, "x", encoding="utf-8") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes one orbax checkpoint, each array as it lies in memory. Raises OSError when the disk is full."""
    from orbax.checkpoint import v1 as ocp  # takes a second to import, which only prepared checkpoints should cost

    path.parent.mkdir(exist_ok=True)

    def save() -> None:
        context = ocp.Context()
        # One file an array with nothing but its values, whose rows can be read where they are needed.
        context.array.saving.use_compression = False
        context.array.saving.use_ocdbt = False
        context.array.saving.use_zarr3 = False
        with context, _quiet():
            ocp.save(Path(os.path.abspath(path)), dict(arrays))  # orbax refuses paths that lead up

    try:
        # In a thread that an interrupt waits for: orbax' own would go on writing into a directory that is removed.
        with ThreadPoolExecutor(1) as saver:
            saver.submit(save).result()
    except ValueError as error:
        if "No space left" in str(error) or "quota exceeded" in str(error).lower():  # as tensorstore says it
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise


def _data_file(path: Path, name: str, nbytes: int) -> Path:
    """The file of an orbax checkpoint that holds the values of the array `name` and nothing else."""
    found = [
        file
        for file in path.rglob("*")
        if name in file.relative_to(path).parts[:-1] and not file.name.startswith(".") and file.stat().st_size == nbytes
    ]
    if len(found) != 1:
        raise CheckpointError(
            f"{path}: orbax-checkpoint {metadata.version('orbax-checkpoint')} does not write {name} as one plain file: "
            "install orbax-checkpoint==0.12.8"
        )
    return found[0]


def load_arrays(path: Path, like: Mapping[str, np.ndarray], checksums: Sequence[int]) -> dict[str, np.ndarray]:
    """Reads an orbax checkpoint of arrays like these; raises `CheckpointError` if it has others or other values."""
    from orbax.checkpoint import v1 as ocp

    try:
        with _quiet():
            arrays = ocp.load(Path(os.path.abspath(path)), dict(like))
    except Exception as error:  # whatever orbax and tensorstore raise for files that are missing or damaged
        raise CheckpointError(
            f"{path} cannot be loaded ({(str(error) or repr(error)).splitlines()[0]}): {_REMEDY}"
        ) from error
    for (name, wanted), checksum in zip(like.items(), checksums, strict=True):
        array = arrays[name]
        if array.shape != wanted.shape or array.dtype != wanted.dtype or _crc32(array) != checksum:
            raise CheckpointError(f"{path}: the values of {name} are not those of {HEADER}: {_REMEDY}")
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
