"""Dense parameters from the files to the device; packed ones are decoded there."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.checkpoint.logical import LogicalTensor
from moe_jax.checkpoint.mapping import WeightMap
from moe_jax.checkpoint.prepared import PreparedCheckpoint
from moe_jax.checkpoint.progress import byte_bar
from moe_jax.checkpoint.reader import Checkpoint, listed, raise_problems
from pallas_kernels.dequant_gemm import without_kernel
from pallas_kernels.formats import FP8, Dense, Format

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackedMatrix:
    """How a dense weight is held that stays as the files have it. tensors: suffix -> (shape, dtype) of each part."""

    form: Format
    tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]]


def packed_matrices(checkpoint: Checkpoint, weight_map: WeightMap, paths: Iterable[str]) -> dict[str, PackedMatrix]:
    """Those parameters of `paths` that `dequant_gemm` multiplies with as the files hold them.

    The others are decoded: weights whose tensors have several formats, of a format without a kernel, and stacked FP8
    matrices of which one but the last ends within a block.
    """
    found = {}
    for path in paths:
        tensors = weight_map.params[path]
        form = tensors[0].format
        same = all(tensor.format == form for tensor in tensors)
        if not same or isinstance(form, Dense) or without_kernel(form) or getattr(form, "order", False):
            continue
        if isinstance(form, FP8) and any(tensor.shape[0] % form.block for tensor in tensors[:-1]):
            continue
        of = {suffix: {t.parts[suffix].form(checkpoint)[1] for t in tensors} for suffix in form.suffixes}
        if all(len(dtypes) == 1 for dtypes in of.values()):
            outs = sum(tensor.shape[0] for tensor in tensors)
            shapes = form.row_tensors((outs,), tensors[0].shape[1])
            parts = {suffix: (shape, dtype or of[suffix].pop()) for suffix, (shape, dtype) in shapes.items()}
            found[path] = PackedMatrix(form, parts)
    return found


def load_params(
    checkpoint: Checkpoint,
    weight_map: WeightMap,
    abstract: Mapping[str, Any],
    *,
    packed: Mapping[str, PackedMatrix] | None = None,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Reads all dense parameters onto the default device.

    Args:
        abstract: nested dict whose leaves have `.shape` and `.dtype` (`jax.ShapeDtypeStruct`); the keys joined by dots
            are the paths of `weight_map.params`. Each leaf's dtype is what the parameter is cast to.
        packed: parameters that stay as they are, whose parts `abstract` has (`registry.abstract_params`).
        progress: shows a bar of bytes on stderr; None: only when stderr is a terminal.

    Returns a nested dict like `abstract` of jax arrays. On its way to the device a parameter is copied on the host at
    most once, and not at all when it is one file tensor of the right dtype and the device is not the CPU. A packed
    tensor moves as it is and is decoded on the device.
    Raises `CheckpointError` when `abstract` and `weight_map` do not have the same parameters and shapes, or when an
    integer tensor would be cast to a floating parameter or the other way round.
    """
    packed = packed or {}
    parts = {path + suffix for path, matrix in packed.items() for suffix in matrix.tensors}
    leaves = {path: leaf for path, leaf in _leaves(abstract) if path not in parts}
    _check(checkpoint, weight_map, leaves, packed)
    arrays: dict[str, jax.Array] = {}
    paths = [*leaves, *packed]
    files = {path: [file for tensor in weight_map.params[path] for file in tensor.files] for path in paths}
    size = {path: sum(checkpoint.info(file).nbytes for file in names) for path, names in files.items()}
    with byte_bar("dense weights", sum(size.values()), progress) as advance:
        for path, leaf in leaves.items():
            # Waiting keeps one parameter at a time on the host and the bar truthful.
            loaded = load_parameter(checkpoint, weight_map.params[path], np.dtype(leaf.dtype))
            arrays[path] = jax.block_until_ready(loaded)
            advance(size[path])
        for path, matrix in packed.items():
            for suffix, (_, dtype) in matrix.tensors.items():
                views = [tensor.parts[suffix].array(checkpoint) for tensor in weight_map.params[path]]
                arrays[path + suffix] = jax.block_until_ready(_to_device(views, dtype))
            advance(size[path])
    for conversion, count in conversions(weight_map, abstract, packed).items():
        logger.info("dense weights: %s (%d of %d parameters)", conversion, count, len(paths))
    return _nest(abstract, arrays)


def load_prepared_params(
    checkpoint: PreparedCheckpoint, abstract: Mapping[str, Any], *, progress: bool | None = None
) -> dict[str, Any]:
    """The same from a prepared checkpoint, which must have been checked: nothing is decoded."""
    leaves = dict(_leaves(abstract))
    with byte_bar("dense weights", checkpoint.params_nbytes, progress) as advance:

        def put(path: str, array: np.ndarray) -> jax.Array:
            on_device = jax.block_until_ready(_to_device([array], np.dtype(leaves[path].dtype)))
            advance(array.nbytes)
            return on_device

        return _nest(abstract, checkpoint.load_params(put))


def conversions(
    weight_map: WeightMap, abstract: Mapping[str, Any], packed: Mapping[str, PackedMatrix] | None = None
) -> dict[str, int]:
    """How many parameters are decoded while they are loaded or stay packed, by what is done, such as "fp8 -> bfloat16"
    or "fp8 as stored"."""
    found = Counter(f"{matrix.form.name} as stored" for matrix in (packed or {}).values())
    parts = {path + suffix for path, matrix in (packed or {}).items() for suffix in matrix.tensors}
    for path, leaf in _leaves(abstract):
        if path in parts:
            continue
        formats = sorted({t.format.name for t in weight_map.params[path] if not isinstance(t.format, Dense)})
        if formats:
            found[f"{', '.join(formats)} -> {np.dtype(leaf.dtype)}"] += 1
    return dict(found)


def load_parameter(checkpoint: Checkpoint, tensors: tuple[LogicalTensor, ...], dtype: np.dtype) -> jax.Array:
    """One parameter in `dtype` on the device: its tensors concatenated along axis 0."""
    if all(isinstance(tensor.format, Dense) for tensor in tensors):
        return _to_device([tensor.parts[""].array(checkpoint) for tensor in tensors], dtype)
    return jnp.concatenate([decoded(checkpoint, tensor, dtype) for tensor in tensors])


def decoded(checkpoint: Checkpoint, tensor: LogicalTensor, dtype: np.dtype) -> jax.Array:
    """The values of a packed tensor in `dtype` on the device."""
    parts = {suffix: tensor.parts[suffix].array(checkpoint) for suffix in tensor.format.suffixes}
    return _decode(parts, form=tensor.format, shape=tensor.shape, dtype=dtype)


@partial(jax.jit, static_argnames=("form", "shape", "dtype"))
def _decode(parts: Mapping[str, jax.Array], *, form: Format, shape: tuple[int, int], dtype: np.dtype) -> jax.Array:
    out, width = shape
    return form.decode(parts, (out,), width, dtype)


def _to_device(views: list[np.ndarray], dtype: np.dtype) -> jax.Array:
    if len(views) == 1:
        view = views[0]
        # The CPU backend keeps using NumPy's memory where it can (jax 0.11: also with may_alias=False), and a parameter
        # must not depend on the checkpoint's file for as long as the model lives. Other devices copy anyway.
        alone = view.dtype == dtype and jax.default_backend() != "cpu"
        return jax.device_put(view if alone else view.astype(dtype))
    whole = np.empty((sum(view.shape[0] for view in views), *views[0].shape[1:]), dtype)
    np.concatenate(views, out=whole, casting="unsafe")
    return jax.device_put(whole)


def _check(checkpoint: Checkpoint, weight_map: WeightMap, leaves: Mapping[str, Any], packed: Iterable[str]) -> None:
    problems = []
    if unknown := sorted(set(leaves) - set(weight_map.params)):
        problems.append(f"the weight map lacks these parameters of the model: {listed(unknown)}")
    if unused := sorted(set(weight_map.params) - set(leaves) - set(packed)):
        problems.append(f"the weight map fills parameters that the model does not have: {listed(unused)}")
    for path in sorted(leaves.keys() & weight_map.params.keys()):
        wanted = np.dtype(leaves[path].dtype)
        tensors = weight_map.params[path]
        shapes = [tensor.shape for tensor in tensors]
        shape = shapes[0] if len(shapes) == 1 else (sum(s[0] for s in shapes), *shapes[0][1:])
        if shape != tuple(leaves[path].shape):
            problems.append(f"{path} has shape {list(leaves[path].shape)} in the model, but {list(shape)} in the file")
        for tensor in tensors:
            if len(tensor.shape) != 2 and not isinstance(tensor.format, Dense):
                problems.append(f"{tensor.name} is packed as {tensor.format.name}: {path} must be a matrix for that")
            dtype = checkpoint.info(tensor.files[0]).dtype if isinstance(tensor.format, Dense) else np.float32
            if jnp.issubdtype(dtype, jnp.floating) != jnp.issubdtype(wanted, jnp.floating):
                problems.append(
                    f"{tensor.name} is {dtype} in the file, but {path} is {wanted}: this is a quantised format "
                    "that the weight table does not know"
                )
    raise_problems(checkpoint.directory, problems)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _nest(tree: Mapping[str, Any], arrays: Mapping[str, jax.Array], prefix: str = "") -> dict[str, Any]:
    return {
        key: _nest(value, arrays, f"{prefix}{key}.") if isinstance(value, Mapping) else arrays[f"{prefix}{key}"]
        for key, value in tree.items()
    }
