"""The native trace as a parquet file: one row a token, one column an array, the header in the file's metadata.

A column of `phase`, `request` or `step` holds plain integers; every other column a list of fixed size, the token's part
of the array in C order. The metadata key `moe_jax.trace` holds the header, `moe_jax.shapes` the shape of each array
without T, both as UTF-8 JSON; `moe_jax.crc32` is the checksum of all of it, as parquet itself has none by default. Any
parquet reader can query the file:

    duckdb: SELECT request, count(*) FROM 'run.parquet' WHERE phase = 1 GROUP BY request
"""

import json
import math
import zlib
from pathlib import Path

import numpy as np

from ..trace import TraceError, parse_header

HEADER_KEY, SHAPES_KEY, CHECKSUM_KEY = b"moe_jax.trace", b"moe_jax.shapes", b"moe_jax.crc32"


def write(file, arrays: dict[str, np.ndarray], header: dict) -> None:
    """Writes `arrays` [T, ...] and the header to an open binary file. Raises ImportError without pyarrow."""
    pa, pq = _pyarrow()
    columns = {}
    for name, array in arrays.items():
        flat = pa.array(np.ascontiguousarray(array).reshape(-1))
        columns[name] = flat if array.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, math.prod(array.shape[1:]))
    shapes = {name: list(array.shape[1:]) for name, array in arrays.items()}
    metadata = {
        HEADER_KEY: json.dumps(header, ensure_ascii=False).encode(),
        SHAPES_KEY: json.dumps(shapes).encode(),
    }
    metadata[CHECKSUM_KEY] = _checksum(metadata, arrays)
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), file, compression="zstd")


def read(path: Path) -> tuple[dict[str, np.ndarray], dict]:
    """Arrays by name and the header. Raises FileNotFoundError, ImportError, or TraceError naming file and column."""
    pa, pq = _pyarrow()
    with path.open("rb") as file:
        # Damage makes pyarrow raise whatever it stumbles over (ArrowException, OSError, UnicodeDecodeError, ...).
        try:
            table = pq.read_table(file)
            columns = {name: table.column(name).combine_chunks() for name in table.column_names}
            metadata = dict(table.schema.metadata or {})
        except Exception as error:
            raise TraceError(f"{path}: not a readable parquet file, perhaps truncated: {error}") from error
    for key in (HEADER_KEY, SHAPES_KEY, CHECKSUM_KEY):
        if key not in metadata:
            raise TraceError(f"{path}: no metadata {key.decode()!r}: not a native trace")
    header = parse_header(metadata[HEADER_KEY], path)
    shapes = parse_header(metadata[SHAPES_KEY], path)
    if not isinstance(shapes, dict) or set(shapes) != set(columns):
        raise TraceError(f"{path}: the metadata {SHAPES_KEY.decode()!r} names other columns than the file holds")
    arrays = {}
    for name, column in columns.items():
        if column.null_count or (pa.types.is_fixed_size_list(column.type) and column.flatten().null_count):
            raise TraceError(f"{path}: {name}: holds empty cells")
        flat = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
        try:
            arrays[name] = flat.to_numpy(zero_copy_only=False).reshape(len(table), *shapes[name])
        except (ValueError, TypeError, pa.ArrowException) as error:
            raise TraceError(f"{path}: {name}: {column.type} has not the shape {shapes[name]}: {error}") from error
    if metadata[CHECKSUM_KEY] != _checksum(metadata, arrays):
        raise TraceError(f"{path}: damaged: the content does not have the checksum that was written with it")
    return arrays, header


def _checksum(metadata, arrays):
    crc = zlib.crc32(metadata[HEADER_KEY] + metadata[SHAPES_KEY])
    for name, array in sorted(arrays.items()):
        crc = zlib.crc32(np.ascontiguousarray(array), zlib.crc32(f"{name} {array.dtype}".encode(), crc))
    return str(crc).encode()


def _pyarrow():
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            "parquet traces need pyarrow: install it (pip install pyarrow), or use an .npz file, which needs NumPy only"
        ) from error
    return pyarrow, pyarrow.parquet
