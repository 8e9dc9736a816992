"""A checkpoint of any family as a prepared one, its experts in the format of the files or another."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from host_offload.store import ExpertStore, RowSpec, StoreError
from moe_jax.checkpoint.loading import load_parameter
from moe_jax.checkpoint.mapping import WeightMap
from moe_jax.checkpoint.new_directory import copy_companions, new_directory
from moe_jax.checkpoint.prepared import PreparedCheckpoint, PreparedWriter
from moe_jax.checkpoint.progress import byte_bar
from moe_jax.checkpoint.reader import Checkpoint
from moe_jax.config import OffloadConfig
from moe_jax.conversion.report import ErrorReport
from moe_jax.conversion.source import open_source
from moe_jax.conversion.weights import BF16, OTHER_FORM, Errors, Target, convert, decoded
from moe_jax.engine.loading import compute_dtype, map_weights, read_model_config
from moe_jax.errors import CheckpointError
from moe_jax.models.registry import abstract_params
from pallas_kernels.expert_ffn import ExpertSpec
from pallas_kernels.formats import Dense

_MOST_THREADS = 16
_PARAMS_BYTES = 1 << 30  # of dense parameters in one orbax checkpoint, and so in memory


def prepare(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    target: Target | None = None,
    *,
    progress: bool | None = None,
) -> tuple[Path, ErrorReport | None]:
    """Writes the prepared checkpoint (`checkpoint.prepared`) of a model into the new directory `destination`.

    Args:
        source: directory in Hugging Face layout, of any family and format.
        target: format of the experts' weights, each value rounded to the nearest; None: that of the files. Biases keep
            theirs. Dense parameters are stored as they are used: decoded, in the dtype of config.json.
        progress: shows a bar of bytes on stderr; None: only when stderr is a terminal.

    A layer is in memory at a time and is read again after it was written. `destination` appears when all is complete: a
    fault or an interrupt leaves nothing behind. Returns it and the errors of the experts' weights, None without target.

    Raises:
        CheckpointError: `source` is none, damaged, prepared already, or has weights that are not finite or that do not
            fit the format; `destination` exists; too little space on the disk.
    """
    source, destination = Path(source).expanduser(), Path(destination).expanduser()
    with open_source(source, destination) as checkpoint:
        cfg = read_model_config(checkpoint)
        weights = map_weights(checkpoint, cfg)
        dtype = compute_dtype(OffloadConfig(), checkpoint)
        try:
            # What is converted is rounded once, from the values of the file.
            store = ExpertStore.from_checkpoint(checkpoint, weights, np.dtype(np.float32) if target else dtype)
        except StoreError as error:
            raise CheckpointError(str(error)) from error
        rows = _Rows(store, weights.experts, target, cfg.expert_width, cfg.expert_row_shapes()["down"][0])
        leaves = _leaves(abstract_params(cfg, dtype)[1])
        dense = sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in leaves.values())
        total = rows.spec.L * rows.spec.E * rows.spec.row_bytes + dense
        report = ErrorReport(target.name) if target else None
        with new_directory(destination, total) as partial, byte_bar("converting", total, progress) as advance:
            writer = PreparedWriter(partial, rows.spec, dtype.name, rows.experts)
            with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
                for layer, number in enumerate(cfg.moe_layers):
                    arrays, errors = rows.layer(layer, number, threads)
                    writer.layer(arrays)
                    for e, found in enumerate(errors):
                        report.add(number, e, found)
                    advance(rows.spec.E * rows.spec.row_bytes)
            for params in _params(checkpoint, weights, leaves):
                writer.params(params)
                advance(sum(array.nbytes for array in params.values()))
            copy_companions(source, partial, without=frozenset({"model.safetensors.index.json"}))
            if report:
                report.write(partial)
            writer.finish(checkpoint.fingerprint(), {"experts": target.name if target else "as in the source"})
            _verify(partial, cfg, leaves)
    return destination, report


class _Rows:
    """The rows of a store with their weights in another format.

    spec, experts: of the rows that `layer` gives.
    """

    def __init__(self, store: ExpertStore, source: ExpertSpec, target: Target | None, width: int, model: int):
        self._store, self._source, self._target = store, source, target
        self._shapes = {"gate_up": (2 * width if source.gated else width, model), "down": (model, width)}
        self.spec, self.experts = store.spec, source
        if target is None:
            return
        self.experts = dataclasses.replace(source, gate_up=target.format, down=target.format)
        try:
            tensors = self.experts.row_tensors(width, model)
        except ValueError as error:
            raise CheckpointError(f"the experts have no form in {target.name}: {error}; {OTHER_FORM}") from error
        self.spec = RowSpec(
            {name: (shape, self._dtype(name) if dtype is None else dtype) for name, (shape, dtype) in tensors.items()},
            L=store.spec.L,
            E=store.spec.E,
        )

    def _dtype(self, name: str) -> np.dtype:
        """Of a floating tensor of the row: biases keep theirs, scales get that of the weights (see `Format.encode`)."""
        if name.endswith("_bias"):
            return self._store.spec.tensors[name][1]
        if isinstance(self._target.format, Dense):
            return BF16
        weight = "gate_up" if name.startswith("gate_up") else "down"
        dense = isinstance(getattr(self._source, weight), Dense)
        return self._store.spec.tensors[weight][1] if dense else np.dtype(np.float32)

    def layer(self, layer: int, number: int, threads: ThreadPoolExecutor) -> tuple[dict[str, np.ndarray], list[Errors]]:
        """Row tensors [E, *shape] of MoE layer `layer`, decoder layer `number`, and each expert's errors if any."""
        spec = self.spec
        arrays = {name: np.empty((spec.E, *shape), dtype) for name, (shape, dtype) in spec.tensors.items()}
        if self._target is None:
            list(threads.map(lambda name: self._store.fill(layer, name, arrays[name]), arrays))
            return arrays, []

        def one(e: int) -> Errors:
            return self._expert(layer, number, e, arrays)

        return arrays, list(threads.map(one, range(spec.E)))

    def _expert(self, layer: int, number: int, e: int, arrays: Mapping[str, np.ndarray]) -> Errors:
        stored = self._store.spec.tensors
        row = {name: np.empty(shape, dtype) for name, (shape, dtype) in stored.items()}
        for name, out in row.items():
            self._store.read(layer, e, name, out)
        total = Errors()
        for weight, (size, width) in self._shapes.items():
            form, outs = getattr(self._source, weight), self._source.outs(weight, size)
            w = row[weight]
            if not isinstance(form, Dense):
                w = decoded({suffix: row[weight + suffix] for suffix in form.suffixes}, form, outs, width)
            matrices = np.split(w, np.cumsum(outs)[:-1])
            parts, errors = convert(matrices, self._target, f"{weight} of expert {e} in decoder layer {number}")
            total.add(errors)
            for suffix, part in parts.items():
                arrays[weight + suffix][e] = part
            if self._source.biases:
                arrays[f"{weight}_bias"][e] = row[f"{weight}_bias"]
        return total


def _params(checkpoint: Checkpoint, weights: WeightMap, leaves: Mapping[str, Any]) -> Iterator[dict[str, np.ndarray]]:
    """The dense parameters by path, about `_PARAMS_BYTES` at a time."""
    group: dict[str, np.ndarray] = {}
    for path, leaf in leaves.items():
        group[path] = np.asarray(load_parameter(checkpoint, weights.params[path], np.dtype(leaf.dtype)))
        if sum(array.nbytes for array in group.values()) >= _PARAMS_BYTES:
            yield group
            group = {}
    if group:
        yield group


def _leaves(abstract: Mapping[str, Any]) -> dict[str, Any]:
    found = jax.tree_util.tree_leaves_with_path(abstract)
    return {".".join(str(key.key) for key in path): leaf for path, leaf in found}


def _verify(directory: Path, cfg: Any, leaves: Mapping[str, Any]) -> None:
    """The directory as a user would load it; values were read again when they were written."""
    with PreparedCheckpoint.open(directory) as written:
        written.check(cfg, {path: leaf.shape for path, leaf in leaves.items()})
