"""The native trace as a parquet file: one row a token, one column an array, the header in the file's metadata.

A column of `phase`, `request` or `step` holds plain integers; every other column a list of fixed size, the token's part
of the array in C order. The metadata key `moe_jax.trace` holds the header, `moe_jax.shapes` the shape of each array
without T, both as UTF-8 JSON. Any parquet reader can query it:

    duckdb: SELECT request, count(*) FROM 'run.parquet' WHERE phase = 1 GROUP BY request
"""

import json
import math
from pathlib import Path

import numpy as np

from ..trace import TraceError, parse_header

HEADER_KEY, SHAPES_KEY = b"moe_jax.trace", b"moe_jax.shapes"


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
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), file, compression="zstd")


def read(path: Path) -> tuple[dict[str, np.ndarray], dict]:
    """Arrays by name and the header. Raises FileNotFoundError, ImportError, or TraceError naming file and column."""
    pa, pq = _pyarrow()
    with path.open("rb") as file:
        # pyarrow raises ArrowException or OSError for damage, by what it stumbles over; the file is open already, so
        # neither means that it is absent.
        try:
            table = pq.read_table(file)
        except (pa.ArrowException, OSError) as error:
            raise TraceError(f"{path}: not a readable parquet file, perhaps truncated: {error}") from error
    metadata = table.schema.metadata or {}
    if HEADER_KEY not in metadata or SHAPES_KEY not in metadata:
        raise TraceError(f"{path}: no metadata {HEADER_KEY.decode()!r}: not a native trace")
    header = parse_header(metadata[HEADER_KEY], path)
    shapes = parse_header(metadata[SHAPES_KEY], path)
    if not isinstance(shapes, dict) or set(shapes) != set(table.column_names):
        raise TraceError(f"{path}: the metadata {SHAPES_KEY.decode()!r} names other columns than the file holds")
    arrays = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if column.null_count or (pa.types.is_fixed_size_list(column.type) and column.flatten().null_count):
            raise TraceError(f"{path}: {name}: holds empty cells")
        flat = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
        try:
            arrays[name] = flat.to_numpy(zero_copy_only=False).reshape(len(table), *shapes[name])
        except (ValueError, TypeError) as error:
            raise TraceError(f"{path}: {name}: {column.type} has not the shape {shapes[name]}: {error}") from error
    return arrays, header


def _pyarrow():
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            "parquet traces need pyarrow: install it (pip install pyarrow), or use an .npz file, which needs NumPy only"
        ) from error
    return pyarrow, pyarrow.parquet
