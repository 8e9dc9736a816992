"""PyTorch checkpoints (`pytorch_model*.bin`) to safetensors, once: a directory beside the old one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from moe_jax.checkpoint.new_directory import copy_companions, new_directory, require_new
from moe_jax.checkpoint.progress import byte_bar
from moe_jax.checkpoint.reader import TensorInfo, listed, raise_problems, read_index
from moe_jax.checkpoint.torch_file import TorchFile
from moe_jax.checkpoint.writer import write_safetensors
from moe_jax.errors import CheckpointError

SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def convert_bin(source: str | os.PathLike, destination: str | os.PathLike, *, progress: bool | None = None) -> Path:
    """Writes the PyTorch checkpoint in `source` as safetensors into the new directory `destination`, and returns it.

    Tensors keep names, dtypes and the division into files; configuration and tokenizer files are copied. Nothing that a
    file holds is run (`torch_file`), and every byte is checked against the archive's checksums. One tensor is in memory
    at a time. `destination` appears when it is complete: a fault or an interrupt leaves nothing behind.

    Args:
        progress: shows a bar of bytes on stderr; None: only when stderr is a terminal.

    Raises:
        CheckpointError: no such checkpoint, one that is damaged, incomplete or malicious; `destination` exists; too
            little space on the disk (found out before anything is written).
    """
    source, destination = Path(source).expanduser(), Path(destination).expanduser()
    if not source.is_dir():
        raise CheckpointError(f"{source}: no such directory: give the one that holds {SINGLE} or {INDEX}")
    require_new(destination)
    paths, weight_map = _find_files(source)
    infos = {path.name: _infos(path) for path in paths}
    _check(source, infos, weight_map)
    total = sum(info.nbytes for tensors in infos.values() for info in tensors.values())
    with new_directory(destination, total) as partial:
        _write(source, partial, infos, total, progress)
    return destination


def _find_files(source: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The .bin files and, if there is an index, its map from tensor to file name."""
    if (source / SINGLE).exists():
        return [source / SINGLE], None
    if not (source / INDEX).exists():
        found = listed(sorted(path.name for path in source.iterdir())) or "nothing"
        raise CheckpointError(f"{source} holds {found}: there is neither {SINGLE} nor {INDEX} to convert")
    problems: list[str] = []
    weight_map = read_index(source, INDEX, problems)
    raise_problems(source, problems)
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not (source / file).is_file()]
    raise_problems(source, [f"{file} is missing: fetch this shard" for file in missing])
    return [source / file for file in files], weight_map


def _infos(path: Path) -> dict[str, TensorInfo]:
    with TorchFile(path) as file:
        return {name: file.info(name) for name in file.names()}


def _check(source: Path, infos: Mapping[str, Mapping[str, TensorInfo]], weight_map: dict[str, str] | None) -> None:
    """Raises CheckpointError for a tensor in two files and for an index that says something else than the files."""
    where: dict[str, str] = {}
    problems = []
    for file, tensors in infos.items():
        for name in tensors:
            if name in where:
                problems.append(f"{name} is in two shards, {where[name]} and {file}: remove one of them")
            where[name] = file
    if weight_map is not None:
        absent = sorted(name for name, file in weight_map.items() if where.get(name) != file)
        if absent:
            files = sorted({weight_map[name] for name in absent})
            problems.append(f"{INDEX} names tensors that {listed(files)} does not hold: {listed(absent)}")
    raise_problems(source, problems)


def _write(
    source: Path, into: Path, infos: Mapping[str, Mapping[str, TensorInfo]], total: int, progress: bool | None
) -> None:
    names = {file: _new_name(file) for file in infos}
    with byte_bar("safetensors", total, progress) as advance:
        for file, tensors in infos.items():
            with TorchFile(source / file) as torch_file:
                write_safetensors(into / names[file], tensors, torch_file.read, done=advance)
    if len(infos) > 1:
        weight_map = {name: names[file] for file, tensors in infos.items() for name in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (into / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    copy_companions(source, into, without=frozenset({INDEX}))


def _new_name(file: str) -> str:
    return file.removeprefix("pytorch_").removesuffix(".bin") + ".safetensors"
