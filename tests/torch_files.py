"""Files as `torch.save` writes them, made without torch, and the real one that the tests keep.

python tests/torch_files.py     # writes tests/data/torch_state.bin again (torch)
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

REAL = Path(__file__).resolve().parent / "data" / "torch_state.bin"
STORAGES = {
    np.dtype(np.float32): "FloatStorage",
    np.dtype(np.float16): "HalfStorage",
    np.dtype(ml_dtypes.bfloat16): "BFloat16Storage",
    np.dtype(np.int64): "LongStorage",
}


def real_values() -> dict[str, np.ndarray]:
    """What tests/data/torch_state.bin holds."""
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4) - 5.5
    return {
        "matrix": matrix,
        "transposed": matrix.T,
        "rows.of.it": matrix[1:],
        "parameter": matrix[:, 2] * 2,
        "half": (matrix * 0.1).astype(np.float16),
        "bfloat": (matrix * 0.1).astype(ml_dtypes.bfloat16),
        "float8": matrix.astype(ml_dtypes.float8_e4m3fn),
        "scalar": np.array(7, np.int64),
        "empty": np.zeros((0, 3), np.float32),
        "mask": matrix > 0,
    }


def write_real() -> None:
    """Saves `real_values` with torch: views share a storage, one value is a Parameter, and there is metadata."""
    import torch

    matrix = torch.from_numpy(real_values()["matrix"].copy())
    state = torch.nn.Module().state_dict()  # an OrderedDict with _metadata
    state |= {
        "matrix": matrix,
        "transposed": matrix.T,
        "rows.of.it": matrix[1:],
        "parameter": torch.nn.Parameter(matrix[:, 2] * 2),
        "half": (matrix * 0.1).to(torch.float16),
        "bfloat": (matrix * 0.1).to(torch.bfloat16),
        "float8": matrix.to(torch.float8_e4m3fn),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "mask": matrix > 0,
    }
    torch.save(state, REAL)


def text(value: str) -> bytes:
    """Opcode for a string."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value: int) -> bytes:
    """Opcode for a non-negative integer."""
    return b"\x8a\x08" + struct.pack("<q", value)


def call(name: str, *arguments: bytes) -> bytes:
    """Opcodes that call the global `module name` with arguments."""
    module, _, function = name.rpartition(".")
    return f"c{module}\n{function}\n".encode() + b"(" + b"".join(arguments) + b"tR"


def tensor(key: str, shape, stride, *, storage: str = "FloatStorage", count: int, offset: int = 0) -> bytes:
    """Opcodes of a tensor over the storage `key` of `count` elements."""
    kind = f"ctorch\n{storage}\n".encode()
    place = b"(" + text("storage") + kind + text(key) + text("cpu") + number(count) + b"tQ"
    sizes = (b"(" + b"".join(map(number, each)) + b"t" for each in (shape, stride))
    hooks = call("collections.OrderedDict")
    return call("torch._utils._rebuild_tensor_v2", place, number(offset), *sizes, b"\x89", hooks)


def state_pickle(items: Mapping[str, bytes]) -> bytes:
    """The pickle of a dict: name -> opcodes of the value."""
    return b"\x80\x02}(" + b"".join(text(name) + value for name, value in items.items()) + b"u."


def write_archive(path: Path, pickled: bytes, storages: Mapping[str, bytes], compression=zipfile.ZIP_STORED) -> Path:
    """The zip file of a pickle and its storages."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", "little")
        for key, values in storages.items():
            archive.writestr(f"archive/data/{key}", values)
    return path


def write_state(path: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    """A file of these tensors, each with a storage of its own."""
    items, storages = {}, {}
    for key, (name, value) in enumerate(tensors.items()):
        stride = np.array(value.strides) // value.itemsize
        storages[str(key)] = value.tobytes()
        items[name] = tensor(
            str(key), value.shape, map(int, stride), storage=STORAGES[value.dtype], count=int(value.size)
        )
    return write_archive(path, state_pickle(items), storages)


if __name__ == "__main__":
    write_real()
