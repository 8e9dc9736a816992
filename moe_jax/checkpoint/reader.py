"""Reading a Hugging Face checkpoint directory: configuration and safetensors, by mmap and without torch.

The safetensors format (https://github.com/huggingface/safetensors, "Format"): 8 bytes little-endian length n, then n
bytes of JSON `{name: {"dtype", "shape", "data_offsets"}}`, then the data; offsets count from the end of the header. The
header is parsed here since the safetensors package copies a tensor when it is asked for NumPy.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from moe_jax.errors import CheckpointError

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors package
_LISTED = 8  # names spelled out in an error before "and n more"
_SAMPLE = 256  # bytes of each tensor that enter the fingerprint


class TensorInfo(NamedTuple):
    """What a file's header says of one tensor."""

    dtype: np.dtype
    shape: tuple[int, ...]
    nbytes: int


class Place(NamedTuple):
    """Where a tensor lies: `info` says what it is, `offset` counts bytes from the start of the file at `path`, which
    was as `stat` says when the checkpoint was opened."""

    path: Path
    offset: int
    info: TensorInfo
    stat: os.stat_result


@dataclass(frozen=True)
class _Shard:
    path: Path
    header: bytes
    data: mmap.mmap
    stat: os.stat_result


@dataclass(frozen=True)
class _Entry:
    info: TensorInfo
    shard: _Shard
    offset: int  # bytes from the start of the file


def listed(names: Sequence[str]) -> str:
    """The names in order, a long list shortened with its count."""
    names = list(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def raise_problems(where: object, problems: Sequence[str]) -> None:
    """Raises one `CheckpointError` with all `problems`, none if there are none."""
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise CheckpointError("\n  - ".join([f"{where}: {count} with this checkpoint", *problems]))


class Checkpoint:
    """An open checkpoint directory. Tensors are views of the files; nothing is read until a view is touched.

    Read-only and safe to use from several threads. The files must not change while it is open. `close()` forgets the
    files; views handed out before stay valid, and the memory map goes when the last of them does.
    """

    def __init__(self, directory: Path, config: dict, generation_config: dict, entries: dict[str, _Entry]):
        self.directory = directory
        self.config = config
        self.generation_config = generation_config
        self._entries = entries
        self._closed = False

    @classmethod
    def open(cls, directory: str | os.PathLike) -> Checkpoint:
        """Opens `directory`: config.json and model.safetensors, or shards with or without an index.

        As in transformers, model.safetensors wins over an index. Raises `CheckpointError` with every problem found:
        missing folder or file, damaged header, truncated data, a tensor in two shards, an index that does not fit.
        """
        directory = Path(directory).expanduser()
        if not directory.is_dir():
            what = "is a file, not a directory: give the folder it lies in" if directory.exists() else "does not exist"
            raise CheckpointError(f"{directory}: checkpoint directory {what}")
        problems: list[str] = []
        config, generation_config = _read_configs(directory, problems)
        paths, weight_map = _find_shards(directory, problems)
        entries: dict[str, _Entry] = {}
        for path in paths:
            _read_shard(path, entries, problems)
        damaged = bool(problems)  # then tensors are missing because their shard is: say that once only
        if weight_map is not None and not damaged:
            _check_index(weight_map, entries, problems)
        raise_problems(directory, problems)
        return cls(directory, config, generation_config, entries)

    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._entries)

    def info(self, name: str) -> TensorInfo:
        """(NumPy dtype, shape, nbytes) of a tensor. Raises `CheckpointError` if there is none of that name."""
        return self._entry(name).info

    @property
    def dtype(self) -> str:
        """Name of the first tensor's dtype: the checkpoint's, where config.json says none."""
        return self.info(self.names()[0]).dtype.name

    def view(self, name: str) -> np.ndarray:
        """The tensor as a read-only array over the mapped file: no copy; only what is touched is read."""
        entry = self._entry(name)
        dtype, shape, nbytes = entry.info
        if nbytes == 0:
            return np.empty(shape, dtype)
        flat = np.frombuffer(entry.shard.data, dtype, count=nbytes // dtype.itemsize, offset=entry.offset)
        return flat.reshape(shape)

    def place(self, name: str) -> Place:
        """Where the tensor lies in the files."""
        entry = self._entry(name)
        return Place(entry.shard.path, entry.offset, entry.info, entry.shard.stat)

    def fingerprint(self) -> str:
        """SHA-256 (hex) that tells this checkpoint from another one, without reading all of it.

        Covers config.json, each file's name, size and header, and 256 bytes from the middle of every tensor. Neither
        the directory's path nor file times enter, so a copy has the same fingerprint.
        """
        self._check_open()
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        shards = {entry.shard.path.name: entry.shard for entry in self._entries.values()}
        for name in sorted(shards):
            shard = shards[name]
            digest.update(f"\n{name} {len(shard.data)}\n".encode())
            digest.update(shard.header)
            shard.data.madvise(mmap.MADV_RANDOM)  # else the kernel reads 128 KiB ahead of each sample
        for entry in sorted(self._entries.values(), key=lambda e: (e.shard.path.name, e.offset)):
            middle = entry.offset + max(0, entry.info.nbytes - _SAMPLE) // 2
            digest.update(entry.shard.data[middle : middle + min(_SAMPLE, entry.info.nbytes)])
        for shard in shards.values():
            shard.data.madvise(mmap.MADV_NORMAL)
        return digest.hexdigest()

    def close(self) -> None:
        """Forgets the files. Views handed out before stay valid."""
        self._closed = True
        self._entries = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError(f"{self.directory}: this checkpoint was closed; open it again")

    def _entry(self, name: str) -> _Entry:
        self._check_open()
        if name not in self._entries:
            raise CheckpointError(f"{self.directory}: no tensor named {name!r} among its {len(self._entries)} tensors")
        return self._entries[name]


def read_config(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(config.json, generation_config.json or {}) of a checkpoint directory. Raises `CheckpointError`."""
    problems: list[str] = []
    found = _read_configs(directory, problems)
    raise_problems(directory, problems)
    return found


def _read_configs(directory: Path, problems: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    config = _read_json(directory / "config.json", problems)
    return config, _read_json(directory / "generation_config.json", problems, optional=True)


def _read_json(path: Path, problems: list[str], optional: bool = False) -> dict[str, Any]:
    if not path.exists():
        if not optional:
            problems.append(f"{path.name} is missing: copy it from the model's repository")
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:  # UnicodeDecodeError is a ValueError
        problems.append(f"{path.name} is not readable JSON ({error}): fetch it again")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} holds a {type(value).__name__}, not a JSON object: fetch it again")
        return {}
    return value


def read_index(directory: Path, name: str, problems: list[str]) -> dict[str, str] | None:
    """The map from tensor to file name of an index file; None and an entry in `problems` if it has none."""
    known = len(problems)
    weight_map = _read_json(directory / name, problems).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        if len(problems) == known:
            problems.append(f'{name} has no "weight_map" from tensor to file name: fetch it again')
        return None
    outside = sorted({file for file in weight_map.values() if Path(file).name != file})
    if outside:
        problems.append(f"{name} names files outside the directory ({listed(outside)}): fetch it again")
        return None
    return weight_map


def _find_shards(directory: Path, problems: list[str]) -> tuple[list[Path], dict[str, str] | None]:
    """The safetensors files to read and, if there is an index, its map from tensor to file name."""
    if (directory / _SINGLE).exists():
        return [directory / _SINGLE], None
    if (directory / _INDEX).exists():
        weight_map = read_index(directory, _INDEX, problems)
        if weight_map is None:
            return [], None
        return [directory / file for file in sorted(set(weight_map.values()))], weight_map
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        problems.append(_no_weights(directory))
    present = {path.name for path in paths}
    for stem, width, total in {(m[1], len(m[3]), int(m[3])) for m in map(_SHARD.fullmatch, present) if m}:
        wanted = [f"{stem}-{i:0{width}d}-of-{total:0{width}d}.safetensors" for i in range(1, total + 1)]
        paths += [directory / name for name in wanted if name not in present]  # reported as missing when read
    return sorted(paths), None


def _no_weights(directory: Path) -> str:
    """What is wrong with a directory without safetensors, and what to do with what it holds instead."""
    others = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".gguf"))
    if not others:
        return "no *.safetensors file here: download the model's weights or give another directory"
    only = f"no *.safetensors file here, only {listed(others)}"
    if any(name.startswith("pytorch_model") and name.endswith(".bin") for name in others):
        return f"{only}: convert it once with `{convert_command(directory)}` and load the new directory"
    return (
        f"{only}, which moe_jax does not read: load the model with transformers and save it with save_pretrained, "
        "which writes safetensors"
    )


def convert_command(directory: Path) -> str:
    """The command line that converts a PyTorch checkpoint to safetensors."""
    source = str(directory)
    return f"python -m moe_jax.convert {shlex.quote(source)} {shlex.quote(source + '-safetensors')}"


def _read_shard(path: Path, entries: dict[str, _Entry], problems: list[str]) -> None:
    """Adds the tensors of one file to `entries`, and what is wrong with it to `problems`."""
    if not path.is_file():
        problems.append(f"{path.name} is missing: fetch this shard")
        return
    with open(path, "rb") as file:
        stat = os.fstat(file.fileno())
        size = stat.st_size
        start = file.read(8)
        if start == b"version ":
            problems.append(f"{path.name} is a git-lfs pointer, not the weights: run `git lfs pull`")
            return
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, _MAX_HEADER):
            problems.append(
                f"{path.name} is cut off or no safetensors file ({size} bytes, header of {length}): fetch it again"
            )
            return
        header = file.read(length)
        try:
            tensors = json.loads(header)
            if not isinstance(tensors, dict):
                raise ValueError(f"a {type(tensors).__name__} instead of an object")
        except (ValueError, RecursionError) as error:
            problems.append(f"{path.name}: its header is not JSON ({error}): fetch it again")
            return
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    shard = _Shard(path, header, data, stat)
    tensors.pop("__metadata__", None)
    too_long: list[str] = []
    for name, fields in tensors.items():
        try:
            info, begin, end = _parse_entry(fields)
        except (TypeError, ValueError) as error:
            problems.append(f"{path.name}: header entry of {name}: {error}")
            continue
        if 8 + length + end > size:
            too_long.append(name)
        elif name in entries:
            problems.append(
                f"{name} is in two shards, {entries[name].shard.path.name} and {path.name}: remove one of them"
            )
        else:
            entries[name] = _Entry(info, shard, 8 + length + begin)
    if too_long:
        problems.append(f"{path.name} ends at byte {size}, before the data of {listed(too_long)}: fetch it again")


def _parse_entry(fields: dict) -> tuple[TensorInfo, int, int]:
    """(info, begin, end) of a header entry, with begin and end in bytes after the header."""
    missing = [key for key in ("dtype", "shape", "data_offsets") if key not in fields]
    if missing:
        raise ValueError(f"lacks {listed(missing)}")
    if fields["dtype"] not in DTYPES:
        raise ValueError(f"dtype {fields['dtype']!r} is not supported; known are {', '.join(DTYPES)}")
    dtype, shape, (begin, end) = DTYPES[fields["dtype"]], tuple(fields["shape"]), fields["data_offsets"]
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"shape {shape} and offsets {(begin, end)} must be whole numbers >= 0")
    nbytes = math.prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        raise ValueError(f"offsets {(begin, end)} do not hold {fields['dtype']} {list(shape)} ({nbytes} bytes)")
    return TensorInfo(dtype, shape, nbytes), begin, end


def _check_index(weight_map: dict[str, str], entries: dict[str, _Entry], problems: list[str]) -> None:
    absent = sorted(name for name, file in weight_map.items() if name not in entries)
    if absent:
        files = sorted({weight_map[name] for name in absent})
        problems.append(f"{_INDEX} names tensors that {listed(files)} does not hold: {listed(absent)}")
    moved = [n for n, file in weight_map.items() if n in entries and entries[n].shard.path.name != file]
    if moved:
        problems.append(
            f"{_INDEX} gives the wrong file for {listed(sorted(moved))}: fetch index and shards of one revision"
        )
