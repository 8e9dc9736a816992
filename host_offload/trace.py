"""Routing traces: which experts each processed token was sent to, and the native formats `.npz` and `.parquet`.

One row is one input token that went through the model (prompt tokens and all generated ones but the last; no padding).
The `.npz` file holds plain NumPy arrays and needs no library of ours to read:

    with np.load("run.npz") as z:
        experts, weights, step = z["experts"], z["weights"], z["step"]      # [T, L, K], [T, L, K], [T]
        header = json.loads(z["header"].tobytes())

`load_trace` also reads what other systems record (docs/traces.md), `bundled_trace` the one that comes with the package.

Shape letters: T rows, L MoE layers, E experts a layer, K experts a token.
"""

import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

PREFILL, DECODE = 0, 1
PHASES = {"prefill": PREFILL, "decode": DECODE}
SCOPES = ("layer", "global")
CONTRACTS = ("atomic-bypass", "atomic-forced-admit", "sequential")

# Required header fields and what each must be. A header may hold more (revision, seeds, timings, ...): they are kept.
HEADER_FIELDS = {
    "moe_layers": "list of L integers, the model's layer index of each MoE layer, rising",
    "E": "integer, experts a layer",
    "K": "integer, experts a token",
    "chunk": "integer, tokens of the longest prefill step",
    "scope": f"one of {', '.join(SCOPES)}",
    "slots": "integer, slots of all layers together, or a list of L quotas",
    "contract": f"one of {', '.join(CONTRACTS)}",
    "policy": "string, the cache policy",
    "model": "string, the model",
    "dtype": "string, the compute dtype",
}

_ARRAYS = {
    "experts": (np.int16, "T,L,K"),
    "weights": (np.float16, "T,L,K"),
    "phase": (np.uint8, "T"),
    "request": (np.int32, "T"),
    "step": (np.int32, "T"),
    "scores": (np.float16, "T,L,E"),
}


# What `pred/<name>` may hold: ids of experts, or scores.
PRED_DTYPES = (np.dtype(np.int16), np.dtype(np.float16))
_PRED_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class TraceError(ValueError):
    """A trace, or a trace file, breaks the format; the message names file, field and row."""


@dataclasses.dataclass(eq=False)
class Trace:
    """The routing of a run.

    experts: [T, L, K] int16, the experts of each token by falling weight, ties by rising id.
    weights: [T, L, K] float16, the router's weights that the experts' outputs were scaled by.
    phase: [T] uint8, 0 prefill, 1 decode.
    request: [T] int32, the sequence that the token belongs to.
    step: [T] int32, the step of the engine; rows of one step were served together. Never falls within a request.
    header: dict with at least `HEADER_FIELDS`, anything that JSON can hold.
    scores: [T, L, E] float16 or None, the router's scores of all experts.
    pred: predictions recorded beside the routing, by name; each [T, L, ...], int16 (ids of experts) or float16
        (scores).
        `[t, l]` is what was predicted for layer l of row t, whenever that was. In files the array is `pred/<name>`.
    """

    experts: np.ndarray
    weights: np.ndarray
    phase: np.ndarray
    request: np.ndarray
    step: np.ndarray
    header: dict
    scores: np.ndarray | None = None
    pred: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_rows(cls, experts, weights, phase, request, step, header, scores=None, pred=None):
        """Builds a valid trace from arrays of any numeric dtype, with the K experts of a token in any order.

        Casts to the dtypes of the format and brings every token's experts into its order; `pred` is taken as it is.
        Raises TraceError.
        """
        columns = {"experts": experts, "phase": phase, "request": request, "step": step}
        for name, values in columns.items():
            values, dtype = np.asarray(values), _ARRAYS[name][0]
            if values.dtype.kind not in "iu":
                raise TraceError(f"trace: {name}: expected integers, got {values.dtype}")
            if values.size and (values.min() < np.iinfo(dtype).min or values.max() > np.iinfo(dtype).max):
                raise TraceError(f"trace: {name}: values {values.min()}..{values.max()} do not fit {np.dtype(dtype)}")
            columns[name] = values.astype(dtype)
        weights = np.asarray(weights).astype(np.float16)
        if columns["experts"].shape != weights.shape:
            raise TraceError(f"trace: weights: shape {weights.shape} differs from experts {columns['experts'].shape}")
        order = np.lexsort((columns["experts"], -weights), axis=-1)
        columns["experts"] = np.take_along_axis(columns["experts"], order, -1)
        scores = None if scores is None else np.asarray(scores).astype(np.float16)
        trace = cls(
            weights=np.take_along_axis(weights, order, -1),
            scores=scores,
            header=dict(header),
            pred=dict(pred or {}),
            **columns,
        )
        trace.validate()
        return trace

    def validate(self, source="trace"):
        """Raises TraceError, beginning with `source` and naming field and row, unless the trace obeys the format."""
        _validate_header(self.header, source)
        L, E, K = len(self.header["moe_layers"]), self.header["E"], self.header["K"]
        sizes = {"L": L, "E": E, "K": K, "T": len(self.experts)}
        for name, (dtype, letters) in _ARRAYS.items():
            array = getattr(self, name)
            if array is None and name == "scores":
                continue
            expected = tuple(sizes[letter] for letter in letters.split(","))
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != expected:
                found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
                raise TraceError(f"{source}: {name}: expected {np.dtype(dtype)} [{letters}] = {expected}, got {found}")

        self._validate_pred(source, L)

        def check(bad, name, problem):
            bad = np.asarray(bad)
            if bad.any():
                at = tuple(int(i) for i in np.argwhere(bad)[0])
                where = f"row {at[0]}" + (f" layer {at[1]}" if len(at) > 1 else "")
                raise TraceError(f"{source}: {name}: {where}: {problem(at)}")

        experts, weights = self.experts, self.weights
        check((experts < 0) | (experts >= E), "experts", lambda at: f"expert {experts[at]} is outside 0..{E - 1}")
        in_order = np.sort(experts, axis=-1)
        repeated = (in_order[..., 1:] == in_order[..., :-1]).any(-1)
        check(repeated, "experts", lambda at: f"an expert occurs twice in {experts[at].tolist()}")
        check(~np.isfinite(weights), "weights", lambda at: f"{weights[at]} is not finite")
        falling = weights[..., 1:] < weights[..., :-1]
        tied_rising = (weights[..., 1:] == weights[..., :-1]) & (experts[..., 1:] > experts[..., :-1])
        disordered = ~(falling | tied_rising).all(-1)
        check(
            disordered,
            "experts",
            lambda at: (
                f"experts {experts[at].tolist()} are not by falling weight {weights[at].tolist()}, then rising id; "
                "Trace.from_rows puts them in order"
            ),
        )
        check(self.phase > DECODE, "phase", lambda at: f"{self.phase[at]} is neither 0 (prefill) nor 1 (decode)")
        check(self.request < 0, "request", lambda at: f"{self.request[at]} is negative")
        check(self.step < 0, "step", lambda at: f"{self.step[at]} is negative")
        by_request = np.argsort(self.request, kind="stable")
        falls = np.zeros(len(self.step), bool)
        falls[by_request[1:]] = (np.diff(self.request[by_request]) == 0) & (np.diff(self.step[by_request]) < 0)
        check(falls, "step", lambda at: f"step {self.step[at]} of request {self.request[at]} is below its step before")

    def _validate_pred(self, source, L):
        if not isinstance(self.pred, dict):
            raise TraceError(f"{source}: pred: expected a dict of arrays by name, got {type(self.pred).__name__}")
        for name, array in self.pred.items():
            if not isinstance(name, str) or not _PRED_NAME.fullmatch(name):
                raise TraceError(f"{source}: pred: name {name!r}: use letters, digits, '_', '-' and '.'")
            shape = getattr(array, "shape", ())
            typed = isinstance(array, np.ndarray) and array.dtype in PRED_DTYPES
            if not typed or shape[:2] != (len(self.experts), L) or 0 in shape[2:]:
                found = f"{array.dtype} {shape}" if isinstance(array, np.ndarray) else type(array).__name__
                raise TraceError(
                    f"{source}: pred/{name}: expected int16 or float16 [T,L,...] = ({len(self.experts)}, {L}, ...), "
                    f"got {found}"
                )
            if array.dtype == np.float16 and np.isnan(array).any():
                row = int(np.argwhere(np.isnan(array))[0][0])
                raise TraceError(f"{source}: pred/{name}: row {row}: holds a value that is not a number")

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by their names in a file, `scores` and `pred/<name>` included where there are any."""
        named = {name: getattr(self, name) for name in _ARRAYS if getattr(self, name) is not None}
        return named | {f"pred/{name}": array for name, array in self.pred.items()}

    def save(self, path):
        """Writes the trace to `path` (.npz or .parquet), validated and all or nothing: a crash leaves the old file.

        Raises TraceError if the trace breaks the format, ValueError for another suffix, ImportError if a parquet file
        is asked for and pyarrow is not installed.
        """
        path = _native_path(path)
        self.validate(str(path))
        if path.suffix == ".parquet":
            from .trace_formats import parquet

            write_whole(path, lambda file: parquet.write(file, self.arrays(), self.header))
        else:
            header = np.frombuffer(json.dumps(self.header, ensure_ascii=False).encode(), np.uint8)
            write_whole(path, lambda file: np.savez_compressed(file, header=header, **self.arrays()))

    @classmethod
    def load(cls, path):
        """Reads and validates a native trace (.npz or .parquet); `load_trace` reads other systems' files too.

        Raises FileNotFoundError, TraceError naming file, field and row, ValueError for another suffix, ImportError if
        the file is parquet and pyarrow is not installed.
        """
        path = _native_path(path)
        if path.suffix == ".parquet":
            from .trace_formats import parquet

            arrays, header = parquet.read(path)
        else:
            arrays, header = _read_npz(path)
        return cls._from_arrays(arrays, header, path)

    @classmethod
    def _from_arrays(cls, arrays, header, path):
        """A validated trace from what a file holds; TraceError if fields are missing or unknown."""
        pred = {name.removeprefix("pred/"): array for name, array in arrays.items() if name.startswith("pred/")}
        fields = {name: array for name, array in arrays.items() if not name.startswith("pred/")}
        missing = sorted(set(_ARRAYS) - {"scores"} - set(fields))
        unknown = sorted(set(fields) - set(_ARRAYS))
        if missing or unknown:
            raise TraceError(f"{path}: missing fields {missing}, unknown fields {unknown}")
        trace = cls(header=header, pred=pred, **fields)
        trace.validate(str(path))
        return trace

    def select(self, requests: Iterable[int]) -> "Trace":
        """The rows of some requests, with their numbers of request and step, in the order of the trace.

        Lists in the header that go by the number of the request, such as `domains`, stay right because numbers stay.
        Raises TraceError for a request that the trace does not have.
        """
        requests = [int(request) for request in requests]
        absent = sorted(set(requests) - set(np.unique(self.request).tolist()))
        if absent:
            raise TraceError(f"select: requests {absent} are not in the trace")
        rows = np.flatnonzero(np.isin(self.request, requests))
        fields = {name: getattr(self, name) for name in _ARRAYS}
        fields = {name: None if array is None else array[rows] for name, array in fields.items()}
        pred = {name: array[rows] for name, array in self.pred.items()}
        return Trace(header=dict(self.header), pred=pred, **fields)

    def events(self, phase=None) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yields (step, layer, need) for each step in rising order and each layer.

        `need` int64 [n], rising: the distinct experts that the step's rows, of whatever request, were sent to; `layer`
        counts MoE layers, 0..L-1. `phase` "prefill" or "decode" leaves out the rows of the other phase, None takes all.
        """
        rows = self._rows_of_phase(phase)
        rows = rows[np.argsort(self.step[rows], kind="stable")]
        L, E = len(self.header["moe_layers"]), self.header["E"]
        cuts = np.flatnonzero(np.diff(self.step[rows])) + 1
        for group in np.split(rows, cuts) if len(rows) else ():
            step = int(self.step[group[0]])
            needed = np.zeros((L, E), bool)
            needed[np.arange(L)[:, None], self.experts[group]] = True
            for layer in range(L):
                yield step, layer, np.flatnonzero(needed[layer])

    def frequency(self, phase=None):
        """Returns [L, E] int64: in how many events (of `phase`, see `events`) each expert was needed."""
        count = np.zeros((len(self.header["moe_layers"]), self.header["E"]), np.int64)
        for _, layer, need in self.events(phase):
            count[layer, need] += 1
        return count

    def _rows_of_phase(self, phase):
        if phase is None:
            return np.arange(len(self.phase))
        if phase not in PHASES:
            raise ValueError(f"phase: expected None, 'prefill' or 'decode', got {phase!r}")
        return np.flatnonzero(self.phase == PHASES[phase])


def concatenate(traces, header=None):
    """Joins runs of one model into one trace; requests and steps of later runs are numbered on.

    The required header fields must agree; `header` states them for the whole when they do not (another policy, say),
    but never layers, E or K. Either all traces hold scores or none. Raises TraceError.
    """
    traces = list(traces)
    if not traces:
        raise TraceError("concatenate: no traces given")
    first = traces[0].header
    fixed = ("moe_layers", "E", "K") if header is not None else tuple(HEADER_FIELDS)
    header = dict(first if header is None else header)
    for index, trace in enumerate(traces):
        trace.validate(f"concatenate: trace {index}")
        for name in fixed:
            if trace.header[name] != header.get(name):
                raise TraceError(
                    f"concatenate: trace {index}: {name} is {trace.header[name]!r}, expected {header.get(name)!r}; "
                    "runs that differ in more than moe_layers, E and K can be joined by passing header="
                )
        if (trace.scores is None) != (traces[0].scores is None):
            raise TraceError(f"concatenate: trace {index}: either all traces hold scores or none")
        if {n: (a.dtype, a.shape[2:]) for n, a in trace.pred.items()} != {
            n: (a.dtype, a.shape[2:]) for n, a in traces[0].pred.items()
        }:
            raise TraceError(
                f"concatenate: trace {index}: pred holds {sorted(trace.pred)}, trace 0 {sorted(traces[0].pred)}: "
                "names, dtypes and shapes must be the same"
            )
    columns = {name: [] for name in _ARRAYS}
    next_number = {"request": 0, "step": 0}
    for trace in traces:
        for name, parts in columns.items():
            array = getattr(trace, name)
            if name in next_number and len(array):
                numbered = array.astype(np.int64) - array.min() + next_number[name]
                next_number[name] = int(numbered.max()) + 1
                if next_number[name] > np.iinfo(np.int32).max:
                    raise TraceError(f"concatenate: {name}: the joined trace needs more than 2^31 - 1 numbers")
                array = numbered.astype(np.int32)
            parts.append(array)
    if traces[0].scores is None:
        columns["scores"] = None
    joined = {name: None if parts is None else np.concatenate(parts) for name, parts in columns.items()}
    pred = {name: np.concatenate([trace.pred[name] for trace in traces]) for name in traces[0].pred}
    result = Trace(header=header, pred=pred, **joined)
    result.validate("concatenate")
    return result


def load_trace(path: str | os.PathLike, **facts: Any) -> Trace:
    """Reads a trace of any format known here; the format is recognised by the suffix and the content.

    Args:
        path: a native `.npz` or `.parquet` file, or one of another system (docs/traces.md lists them).
        facts: what the file's format cannot hold, such as `E` or `moe_layers`; see `trace_formats.import_trace`. A
            native file holds everything, so it takes none.

    Raises FileNotFoundError; TraceError naming file and place, or the facts that are missing or too many.
    """
    from .trace_formats import import_trace

    return import_trace(path, **facts)


def bundled_trace() -> Trace:
    """The trace that travels with the package: the demo model over the eleven domains of its training text.

    44 requests of up to 64 prompt and 96 new tokens; `header["domains"]` names the domain of each request. Made by
    `experiments/record_traces.py`; docs/traces.md says how.
    """
    return Trace.load(Path(__file__).parent / "data" / "demo_routes.npz")


def write_whole(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Calls `write(file)` with a file that becomes `path` only when all of it is on the disk.

    Raises OSError with the path, not with the name of the temporary file.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: the directory {path.parent} does not exist: create it first")
    try:
        _write_beside(path, write)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write_beside(path, write):
    # A temporary file beside the target, so that the rename cannot cross file systems.
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes private files
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def parse_header(raw: bytes, source) -> dict:
    """The header from its bytes in a file; raises TraceError beginning with `source`."""
    try:
        return json.loads(raw.decode())
    except ValueError as error:
        raise TraceError(f"{source}: header: not UTF-8 JSON: {error}") from error


def read_npz_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an .npz file; raises FileNotFoundError, or TraceError naming file and array if it is damaged."""
    arrays = {}
    with path.open("rb") as stream:
        # A damaged archive makes zipfile and NumPy raise whatever their parsers stumble over (ValueError, OSError,
        # zlib.error, struct.error, MemoryError, ...): from here on any of them means damage.
        try:
            file = np.load(stream, allow_pickle=False)
        except Exception as error:
            raise TraceError(f"{path}: not a readable .npz file, perhaps truncated: {error}") from error
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise TraceError(f"{path}: holds a single array, not a trace")
        for name in file.files:
            try:
                arrays[name] = file[name]
            except Exception as error:
                raise TraceError(f"{path}: {name}: damaged: {error}") from error
    return arrays


def _read_npz(path):
    arrays = read_npz_arrays(path)
    if "header" not in arrays:
        raise TraceError(
            f"{path}: missing fields ['header']: not a native trace; load_trace() reads those of other systems"
        )
    return arrays, parse_header(arrays.pop("header").tobytes(), path)


def _native_path(path):
    path = Path(path)
    if path.suffix not in (".npz", ".parquet"):
        raise ValueError(f"trace path {str(path)!r}: the suffix must be .npz or .parquet")
    return path


def _is_int(value, low):
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _validate_header(header, source):
    if not isinstance(header, dict):
        raise TraceError(f"{source}: header: expected a JSON object, got {type(header).__name__}")
    missing = [name for name in HEADER_FIELDS if name not in header]
    if missing:
        raise TraceError(f"{source}: header: missing {', '.join(missing)}")
    layers, slots = header["moe_layers"], header["slots"]
    listed = isinstance(layers, list) and bool(layers) and all(_is_int(layer, 0) for layer in layers)
    quotas = isinstance(slots, list) and listed and len(slots) == len(layers) and all(_is_int(n, 0) for n in slots)
    valid = {
        "moe_layers": listed and all(a < b for a, b in zip(layers, layers[1:], strict=False)),
        "E": _is_int(header["E"], 1) and header["E"] <= np.iinfo(np.int16).max + 1,
        "K": _is_int(header["K"], 1) and _is_int(header["E"], header["K"]),
        "chunk": _is_int(header["chunk"], 1),
        "scope": header["scope"] in SCOPES,
        "slots": _is_int(slots, 0) or quotas,
        "contract": header["contract"] in CONTRACTS,
    }
    for name, meaning in HEADER_FIELDS.items():
        if not valid.get(name, isinstance(header[name], str)):
            raise TraceError(f"{source}: header: {name} is {header[name]!r}, expected {meaning}")
    try:
        json.dumps(header)
    except (TypeError, ValueError) as error:
        raise TraceError(f"{source}: header: cannot be written as JSON: {error}") from error
