"""Dense parameters from the files to the device; packed ones are decoded there."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
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
from pallas_kernels.formats import Dense, Format

logger = logging.getLogger(__name__)


def load_params(
    checkpoint: Checkpoint, weight_map: WeightMap, abstract: Mapping[str, Any], *, progress: bool | None = None
) -> dict[str, Any]:
    """Reads all dense parameters onto the default device.

    Args:
        abstract: nested dict whose leaves have `.shape` and `.dtype` (`jax.ShapeDtypeStruct`); the keys joined by dots
            are the paths of `weight_map.params`. Each leaf's dtype is what the parameter is cast to.
        progress: shows a bar of bytes on stderr; None: only when stderr is a terminal.

    Returns a nested dict like `abstract` of jax arrays. On its way to the device a parameter is copied on the host at
    most once, and not at all when it is one file tensor of the right dtype and the device is not the CPU. A packed
    tensor moves as it is and is decoded on the device.
    Raises `CheckpointError` when `abstract` and `weight_map` do not have the same parameters and shapes, or when an
    integer tensor would be cast to a floating parameter or the other way round.
    """
    leaves = dict(_leaves(abstract))
    _check(checkpoint, weight_map, leaves)
    arrays: dict[str, jax.Array] = {}
    files = {path: [file for tensor in weight_map.params[path] for file in tensor.files] for path in leaves}
    size = {path: sum(checkpoint.info(file).nbytes for file in names) for path, names in files.items()}
    with byte_bar("dense weights", sum(size.values()), progress) as advance:
        for path, leaf in leaves.items():
            # Waiting keeps one parameter at a time on the host and the bar truthful.
            loaded = load_parameter(checkpoint, weight_map.params[path], np.dtype(leaf.dtype))
            arrays[path] = jax.block_until_ready(loaded)
            advance(size[path])
    for conversion, count in conversions(weight_map, abstract).items():
        logger.info("dense weights: %s (%d of %d parameters)", conversion, count, len(leaves))
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


def conversions(weight_map: WeightMap, abstract: Mapping[str, Any]) -> dict[str, int]:
    """How many parameters are decoded while they are loaded, by what is done, such as "fp8 -> bfloat16"."""
    found = Counter()
    for path, leaf in _leaves(abstract):
        packed = sorted({t.format.name for t in weight_map.params[path] if not isinstance(t.format, Dense)})
        if packed:
            found[f"{', '.join(packed)} -> {np.dtype(leaf.dtype)}"] += 1
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


def _check(checkpoint: Checkpoint, weight_map: WeightMap, leaves: Mapping[str, Any]) -> None:
    problems = []
    if unknown := sorted(set(leaves) - set(weight_map.params)):
        problems.append(f"the weight map lacks these parameters of the model: {listed(unknown)}")
    if unused := sorted(set(weight_map.params) - set(leaves)):
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
