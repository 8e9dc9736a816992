"""Writing a safetensors file tensor by tensor: complete under its name, or not there at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from moe_jax.checkpoint.reader import DTYPES, TensorInfo
from moe_jax.errors import CheckpointError

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_safetensors(
    path: Path,
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str], np.ndarray],
    *,
    done: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Writes `path` with one tensor in memory at a time (format: see `reader`).

    Args:
        tensors: dtype and shape of each tensor, in the order of the file.
        read: gives the values of one, of any strides.
        done: told the bytes of each tensor when it is written.

    The file appears under its name when it is complete and on the disk; a fault leaves nothing behind.
    Raises CheckpointError for a dtype that safetensors does not have, and when the disk is full.
    """
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, nbytes) in tensors.items():
        if dtype not in _NAMES:
            raise CheckpointError(f"{name} is {dtype}, which safetensors does not know: convert the tensor")
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with _complete_or_nothing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, info in tensors.items():
            values = np.ascontiguousarray(read(name))
            if values.dtype != info.dtype or values.nbytes != info.nbytes:
                raise ValueError(f"{name}: read {values.dtype} {values.shape}, announced {info.dtype} {info.shape}")
            file.write(values.reshape(-1).view(np.uint8).data)
            done(info.nbytes)


@contextlib.contextmanager
def _complete_or_nothing(path: Path) -> Iterator:
    """A file open for writing that becomes `path` if the block ends well."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(f"the disk is full while {path} is written: free space and start again") from error
        raise
    finally:
        partial.unlink(missing_ok=True)
