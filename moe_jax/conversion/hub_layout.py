"""A checkpoint in another format in Hugging Face layout: safetensors that other engines read too.

Tensors keep their names, so experts must be stored one by one to be packed: `X.weight` becomes `X.weight` and
`X.weight_scale_inv` (FP8), or `X.weight_packed`, `X.weight_scale` and `X.weight_shape` (compressed-tensors).
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from moe_jax.checkpoint.loading import decoded
from moe_jax.checkpoint.logical import Faults, LogicalTensor, gather, group_names
from moe_jax.checkpoint.mapping import WeightMap
from moe_jax.checkpoint.new_directory import copy_companions, new_directory
from moe_jax.checkpoint.progress import byte_bar
from moe_jax.checkpoint.quantization import Quantization
from moe_jax.checkpoint.reader import Checkpoint, TensorInfo, listed, raise_problems
from moe_jax.checkpoint.writer import write_safetensors
from moe_jax.conversion.report import ErrorReport
from moe_jax.conversion.source import open_source
from moe_jax.conversion.weights import BF16, Target, convert
from moe_jax.engine.loading import map_weights, read_model_config
from moe_jax.errors import CheckpointError
from pallas_kernels.formats import FP8, INT4, Dense

_SHARD_BYTES = 5_000_000_000
_INDEX = "model.safetensors.index.json"
_F32 = np.dtype(np.float32)
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_REMEDY = "write prepared rows (--layout rows), which hold every family in every format"


def write_hub_layout(
    source: str | os.PathLike, destination: str | os.PathLike, target: Target, *, progress: bool | None = None
) -> tuple[Path, ErrorReport]:
    """Writes `source` with its experts in another format into the new directory `destination`, as safetensors.

    Args:
        target: FP8 and INT4 (symmetric) are packed, of a source that is not; every other tensor stays as it is. Dense:
            the experts are rounded to bfloat16, and everything that is packed is decoded to it.
        progress: shows a bar of bytes on stderr; None: only when stderr is a terminal.

    One matrix is in memory at a time, and all is read again when it is written. `destination` appears when all is
    complete. Returns it and the errors of the experts' weights.

    Raises:
        CheckpointError: as `prepare`; also for a layout or format that has no such files, with what does it.
    """
    source, destination = Path(source).expanduser(), Path(destination).expanduser()
    with open_source(source, destination) as checkpoint:
        weights = map_weights(checkpoint, cfg := read_model_config(checkpoint))
        quantization = Quantization.from_hf(checkpoint.config)
        faults: Faults = {}
        tensors = gather(checkpoint, group_names(checkpoint.names(), quantization, faults), quantization, faults)
        raise_problems(source, [f"{fault}: {listed(names)}" for fault, names in faults.items()])
        tensors = {name: tensor for name, tensor in tensors.items() if not _is_leftover(name, tensors, weights)}
        experts = _experts(weights, cfg.moe_layers)
        if isinstance(target.format, Dense):
            _require_floats(source, checkpoint, tensors, experts)
        else:
            _require_packable(source, target, quantization, weights, experts)
        config = {k: v for k, v in checkpoint.config.items() if k not in ("quantization_config", "compression_config")}
        if isinstance(config.get("text_config"), Mapping):
            config["text_config"] = {k: v for k, v in config["text_config"].items() if k != "quantization_config"}
        if described := _describe(target, tensors, experts):
            config["quantization_config"] = described
        report = ErrorReport(target.name)
        items = [_Item(checkpoint, tensor, experts, cfg.num_experts, target, report) for tensor in tensors.values()]
        total = sum(item.nbytes for item in items)
        with new_directory(destination, total) as partial, byte_bar("converting", total, progress) as advance:
            checksums = _write(partial, items, advance)
            copy_companions(source, partial, without=frozenset({_INDEX, "config.json"}))
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            report.write(partial)
            _verify(partial, checksums)
    return destination, report


# Decoder layer, expert (None: the tensor holds all of them).
_Place = tuple[int, int | None]


def _experts(weights: WeightMap, moe_layers: tuple[int, ...]) -> dict[str, _Place]:
    """File tensor of experts' weights -> whose it is. Biases are not among them."""
    found: dict[str, _Place] = {}
    for name, layers in weights.expert_sources.items():
        if name.endswith("_bias"):
            continue
        for number, rows in zip(moe_layers, layers, strict=True):
            for e, parts in enumerate(rows):
                for part in parts:
                    found |= dict.fromkeys((part.file, *part.beside), (number, e if part.index is None else None))
    return found


def _is_leftover(name: str, tensors: Mapping[str, LogicalTensor], weights: WeightMap) -> bool:
    """Whether this is a bias of zeros that only files of packed weights may have (see `WeightMap.ignored`)."""
    layer, _, kind = name.rpartition(".")
    packed = tensors.get(f"{layer}.weight")
    return kind == "bias" and name in weights.ignored and packed is not None and isinstance(packed.format, INT4)


def _require_floats(
    source: Path, checkpoint: Checkpoint, tensors: Mapping[str, LogicalTensor], experts: Mapping[str, _Place]
) -> None:
    plain = [t.files[0] for t in tensors.values() if isinstance(t.format, Dense) and t.files[0] in experts]
    if packed := [name for name in plain if checkpoint.info(name).dtype.kind in "iu"]:
        raise CheckpointError(
            f"{source} holds its experts' matrices packed together (such as {packed[0]}), which has no layout in bf16 "
            f"under the same names: {_REMEDY}"
        )


def _require_packable(
    source: Path,
    target: Target,
    quantization: Quantization | None,
    weights: WeightMap,
    experts: Mapping[str, _Place],
) -> None:
    if not isinstance(target.format, FP8 | INT4):
        raise CheckpointError(f"{target.name} has no Hugging Face layout for experts of any family: {_REMEDY}")
    if quantization is not None:
        raise CheckpointError(
            f"{source} is quantised already ({quantization.method}), and files have one quantisation only: convert it "
            f"to bf16 first, or {_REMEDY}"
        )
    views = {part.view for layers in weights.expert_sources.values() for row in layers for p in row for part in p}
    stacked = [name for name, (_, e) in experts.items() if e is None]
    if stacked or views != {None}:
        raise CheckpointError(
            f"{source} holds its experts' matrices stacked, transposed or padded (such as "
            f"{(stacked or list(experts))[0]}), and files of packed ones hold each by itself: {_REMEDY}"
        )


def _describe(
    target: Target, tensors: Mapping[str, LogicalTensor], experts: Mapping[str, _Place]
) -> dict[str, Any] | None:
    """`quantization_config` of the new config.json."""
    if isinstance(target.format, Dense):
        return None
    matrices = [t for t in tensors.values() if t.shape is not None and len(t.shape) == 2]
    dense = [tensor.name for tensor in matrices if tensor.files[0] not in experts]
    kept = [name.removesuffix(".weight") for name in dense if name.endswith(".weight")]
    if isinstance(target.format, FP8):
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [target.format.block] * 2,
            "modules_to_not_convert": kept,
        }
    scheme = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": target.format.group, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
        "ignore": kept,
    }


class _Item:
    """One tensor of the model in the new files: `infos` before its values are made, then `make`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tensor: LogicalTensor,
        experts: Mapping[str, _Place],
        E: int,
        target: Target,
        report: ErrorReport,
    ):
        self._checkpoint, self._tensor, self._E, self._target, self._report = checkpoint, tensor, E, target, report
        self._place = next((experts[file] for file in tensor.files if file in experts), None)
        self._plain = isinstance(tensor.format, Dense)
        name, info = tensor.name, checkpoint.info(tensor.files[0])
        if self._plain and self._place is None:  # stays
            self.infos = {name: info}
        elif isinstance(target.format, Dense):
            self.infos = {name: _info(BF16, tensor.shape)}
        elif isinstance(target.format, FP8):
            blocks = tuple(-(-size // target.format.block) for size in tensor.shape)
            self.infos = {name: _info(_E4M3, tensor.shape), f"{name}_scale_inv": _info(np.float32, blocks)}
        else:
            N, K = tensor.shape
            scales = np.float32 if info.dtype == np.float64 else info.dtype
            self.infos = {
                f"{name}_packed": _info(np.int32, (N, K // 8)),
                f"{name}_scale": _info(scales, (N, K // target.format.group)),
                f"{name}_shape": _info(np.int64, (2,)),
            }

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.infos.values())

    def make(self) -> dict[str, np.ndarray]:
        """The values of all of `infos`; those of experts enter the report."""
        if self._plain and self._place is None:
            return {self._tensor.name: self._checkpoint.view(self._tensor.files[0])}
        if isinstance(self._target.format, Dense):
            values = np.concatenate([self._rounded(i, w) for i, w in enumerate(self._matrices())])
            return {self._tensor.name: values.reshape(self._tensor.shape)}
        (w,) = self._matrices()
        parts = self._convert(w, None)
        if isinstance(self._target.format, FP8):
            values = parts[""].view(np.uint8)[:, : w.shape[1]].view(_E4M3), parts["_scale"]
        else:
            values = parts[""].view(np.int32), parts["_scale"], np.array(w.shape, np.int64)
        return dict(zip(self.infos, values, strict=True))

    def _matrices(self) -> Iterator[np.ndarray]:
        """The tensor's matrices, an expert each where it holds all of them."""
        tensor = self._tensor
        if not self._plain:
            for index in range(tensor.shape[0]) if len(tensor.shape) == 3 else (None,):
                parts = {suffix: replace(part, index=index) for suffix, part in tensor.parts.items()}
                yield np.asarray(decoded(self._checkpoint, replace(tensor, shape=tensor.shape[-2:], parts=parts), _F32))
            return
        values = self._checkpoint.view(tensor.files[0])
        alone = self._place[1] is not None
        yield from values.reshape(1 if alone else self._E, -1, values.shape[-1])

    def _rounded(self, i: int, w: np.ndarray) -> np.ndarray:
        return self._convert(w, i)[""]

    def _convert(self, w: np.ndarray, i: int | None) -> dict[str, np.ndarray]:
        parts, errors = convert([w], self._target, self._tensor.name)
        if self._place is not None:
            layer, e = self._place
            self._report.add(layer, i if e is None else e, errors)
        return parts


def _info(dtype: Any, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(np.dtype(dtype), shape, math.prod(shape) * np.dtype(dtype).itemsize)


def _write(into: Path, items: list[_Item], advance: Callable[[int], None]) -> dict[str, int]:
    """Writes shards and their index; returns the CRC-32 of each tensor."""
    shards: list[list[_Item]] = [[]]
    size = 0
    for item in items:
        if shards[-1] and size + item.nbytes > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.nbytes
    checksums: dict[str, int] = {}
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        infos = {name: info for item in shard for name, info in item.infos.items()}
        weight_map |= dict.fromkeys(infos, file)
        write_safetensors(into / file, infos, _Reader(shard, checksums), done=advance)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(item.nbytes for item in items)}, "weight_map": weight_map}
        (into / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return checksums


class _Reader:
    """Gives tensors by name in the order of the items, each item made once; keeps their CRC-32."""

    def __init__(self, items: list[_Item], checksums: dict[str, int]):
        self._items, self._made, self._checksums = iter(items), {}, checksums

    def __call__(self, name: str) -> np.ndarray:
        if not self._made:
            self._made = next(self._items).make()
        array = np.ascontiguousarray(self._made.pop(name))
        self._checksums[name] = _crc32(array)
        return array


def _verify(directory: Path, checksums: Mapping[str, int]) -> None:
    """Raises CheckpointError unless the directory loads, its values those that were written."""
    with Checkpoint.open(directory) as written:
        map_weights(written, read_model_config(written))
        wrong = [name for name, checksum in checksums.items() if _crc32(written.view(name)) != checksum]
        raise_problems(directory, [f"not read as written, so the disk is faulty: {listed(wrong)}"] if wrong else [])


def _crc32(array: np.ndarray) -> int:
    return zlib.crc32(array.reshape(-1).view(np.uint8))
