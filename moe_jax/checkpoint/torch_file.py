"""Tensors of a `torch.save` file, read without torch; nothing that the file holds is ever run.

Such a file is a zip archive (since PyTorch 1.6): `<root>/data.pkl`, a pickle of the state dict, and for each storage
`<root>/data/<key>`, its raw values. A pickle names functions to call. Of these only the ones that put a tensor together
are known here, and they are our own: whatever else a file names is refused before it is looked up. Source of the
format: torch/serialization.py and torch/_utils.py of PyTorch.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from moe_jax.checkpoint.reader import TensorInfo, listed
from moe_jax.errors import CheckpointError

# Storage classes by their element type, and dtypes by their torch name.
_STORAGES = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
    "UntypedStorage": np.dtype(np.uint8),
}
_DTYPES = {
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "uint16": np.dtype(np.uint16),
    "uint32": np.dtype(np.uint32),
    "uint64": np.dtype(np.uint64),
}
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the pickled magic number that older files begin with


# What the pickle's objects become. Tuples, since a pickle may try to change the attributes of what it gets.
class _Kind(NamedTuple):
    dtype: np.dtype


class _Storage(NamedTuple):
    key: str
    dtype: np.dtype
    count: int


class _Tensor(NamedTuple):
    storage: _Storage
    dtype: np.dtype
    offset: int  # in elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _RefusedError(pickle.UnpicklingError):
    """The pickle names something that is no part of a tensor."""


class _Unpickler(pickle.Unpickler):
    """Builds `_Tensor`s; everything else that a pickle may call is refused."""

    def __init__(self, file):
        super().__init__(file, encoding="utf-8")

        # Made anew for each file: a pickle may set attributes of a function.
        def tensor(storage, offset, size, stride, requires_grad, hooks, metadata=None):
            return _tensor(storage, storage.dtype, offset, size, stride)

        def typed_tensor(storage, offset, size, stride, requires_grad, hooks, kind, metadata=None):
            return _tensor(storage, kind.dtype, offset, size, stride)

        def parameter(value, requires_grad, hooks):
            return value

        self._known: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): tensor,
            ("torch._utils", "_rebuild_tensor_v3"): typed_tensor,
            ("torch._utils", "_rebuild_parameter"): parameter,
            ("torch.storage", "UntypedStorage"): _Kind(_STORAGES["UntypedStorage"]),
        }
        self._known |= {("torch", name): _Kind(dtype) for name, dtype in (*_STORAGES.items(), *_DTYPES.items())}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._known:
            raise _RefusedError(f"{module}.{name}")
        return self._known[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        tag, kind, key, _, count = pid
        if tag != "storage" or not isinstance(kind, _Kind) or not isinstance(key, str) or not _is_count(count):
            raise ValueError(f"{pid!r} is no storage")
        return _Storage(key, kind.dtype, count)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tensor(storage: Any, dtype: np.dtype, offset: Any, size: Any, stride: Any) -> _Tensor:
    sizes = isinstance(size, tuple) and isinstance(stride, tuple) and len(size) == len(stride)
    if not isinstance(storage, _Storage) or not sizes or not all(map(_is_count, (offset, *size, *stride))):
        raise ValueError("a tensor with an impossible storage, shape or stride")
    held = storage.count * storage.dtype.itemsize // dtype.itemsize
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if math.prod(size) and last >= held:
        raise ValueError(f"a tensor of shape {size} that reaches past its storage of {held} elements")
    return _Tensor(storage, dtype, offset, size, stride)


class TorchFile:
    """An open `torch.save` file that holds one flat dict of tensors. Use as a context manager.

    Args:
        path: the file.

    Raises:
        CheckpointError: the file is damaged, of the format before PyTorch 1.6, holds something other than tensors, or
            asks to run code; it names the file, the fault and the remedy.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._archive = _open_archive(self.path)
        try:
            self._root = self._find_root()
            self._tensors = self._load_pickle()
            self._check_storages()
        except BaseException:
            self._archive.close()
            raise
        self._cached: tuple[str, bytes] = ("", b"")

    def names(self) -> list[str]:
        """Names of the tensors in the order of the file."""
        return list(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """(NumPy dtype, shape, nbytes) of a tensor."""
        tensor = self._tensors[name]
        return TensorInfo(tensor.dtype, tensor.shape, math.prod(tensor.shape) * tensor.dtype.itemsize)

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only array, strided as in the file. Raises CheckpointError if its bytes are damaged."""
        tensor = self._tensors[name]
        key = tensor.storage.key
        if self._cached[0] != key:  # tensors that share a storage follow one another
            try:
                self._cached = key, self._archive.read(f"{self._root}data/{key}")
            except (zipfile.BadZipFile, OSError, EOFError) as error:
                raise CheckpointError(f"{self.path}: {name} cannot be read ({error}): fetch the file again") from error
        if not math.prod(tensor.shape):
            return np.frombuffer(b"", tensor.dtype).reshape(tensor.shape)
        start = tensor.offset * tensor.dtype.itemsize
        count = len(self._cached[1]) // tensor.dtype.itemsize - tensor.offset
        values = np.frombuffer(self._cached[1], tensor.dtype, count=count, offset=start)
        strides = tuple(step * tensor.dtype.itemsize for step in tensor.stride)
        return np.lib.stride_tricks.as_strided(values, tensor.shape, strides, writeable=False)

    def close(self) -> None:
        """Closes the file."""
        self._archive.close()
        self._cached = ("", b"")

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find_root(self) -> str:
        roots = [name.removesuffix("data.pkl") for name in self._archive.namelist() if name.endswith("/data.pkl")]
        if len(roots) != 1:
            raise CheckpointError(
                f"{self.path}: a zip archive with {len(roots)} data.pkl, where torch.save writes one: this is no "
                "PyTorch checkpoint; fetch it again"
            )
        packed = [entry.filename for entry in self._archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise CheckpointError(
                f"{self.path}: {listed(packed)} is compressed, which torch.save never does: fetch the file again"
            )
        order = f"{roots[0]}byteorder"
        if order in self._archive.namelist() and self._archive.read(order) != b"little":
            raise CheckpointError(f"{self.path}: its numbers are big-endian: save it again on another machine")
        return roots[0]

    def _load_pickle(self) -> dict[str, _Tensor]:
        try:
            state = _Unpickler(io.BytesIO(self._archive.read(f"{self._root}data.pkl"))).load()
        except _RefusedError as error:
            raise CheckpointError(
                f"{self.path} asks to call {error}, which no weights need: the file may be malicious and was not run. "
                "Get safetensors from its author"
            ) from error
        except Exception as error:  # a damaged pickle raises a dozen unrelated types
            raise CheckpointError(f"{self.path}: its data.pkl is damaged ({error!r}): fetch the file again") from error
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{self.path} holds a {type(state).__name__}, where weights are a dict of tensors")
        others = [repr(name) for name, value in state.items() if not (isinstance(name, str) and _is_tensor(value))]
        if others:
            raise CheckpointError(
                f"{self.path}: {listed(others)} is no tensor: this is not a plain state dict; save the model's with "
                "torch.save(model.state_dict(), file)"
            )
        return dict(state)

    def _check_storages(self) -> None:
        sizes = {entry.filename: entry.file_size for entry in self._archive.infolist()}
        wrong = []
        for name, tensor in self._tensors.items():
            storage = tensor.storage
            if sizes.get(f"{self._root}data/{storage.key}") != storage.count * storage.dtype.itemsize:
                wrong.append(name)
        if wrong:
            raise CheckpointError(
                f"{self.path}: the values of {listed(wrong)} are missing or cut: fetch the file again"
            )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, _Tensor)


def _open_archive(path: Path) -> zipfile.ZipFile:
    try:
        with open(path, "rb") as file:
            start = file.read(16)
        if start.startswith(_LEGACY):
            raise CheckpointError(
                f"{path} was saved by a PyTorch before 1.6: load and save it with a newer one, as in "
                "torch.save(torch.load(file, weights_only=True), file)"
            )
        if start.startswith(b"version https://"):
            raise CheckpointError(f"{path} is a git-lfs pointer, not the weights: run `git lfs pull`")
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{path} is cut off or no PyTorch checkpoint ({error}): fetch it again") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}): check the file") from error
