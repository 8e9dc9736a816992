"""What the readers and writers of other systems' formats share: facts, requests, grids of records, and losses.

Another system's file says less than a native trace. What its format cannot hold and the routing cannot be read without
(`E`, `moe_layers`, ...) is asked for by name; what only describes the recording run (policy, dtype, ...) becomes
"unknown" unless it is given.
"""

import dataclasses
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..trace import DECODE, PREFILL, Trace, TraceError

FACTS = {
    "E": "experts a layer",
    "K": "experts a token",
    "moe_layers": "list, the model's layer index of each MoE layer",
    "layers": "layers on the file's layer axis, dense ones included",
    "prompt_tokens": "leading rows that are prompt (prefill), a number or a list with one a request; 0: decode only",
    "stage": "'encoder' or 'decoder', the half of the model to read",
    "model": "the model's name",
    "dtype": "its compute dtype",
    "chunk": "tokens of the longest prefill step; default: each prompt is one step",
    "policy": "the cache policy it ran with",
    "scope": "'layer' or 'global'",
    "slots": "expert slots; default: all experts",
    "contract": "the cache contract it ran under",
}
# Every format takes these: none of them changes which experts were chosen.
RUN_FACTS = ("model", "dtype", "chunk", "policy", "scope", "slots", "contract")


@dataclasses.dataclass(frozen=True)
class Format:
    """One format of another system.

    name: as in `import_trace(path, format=name)`.
    suffixes: those that `export_trace` may write.
    facts: names of `FACTS` it takes beside `RUN_FACTS`.
    recognise: whether a file is of this format, from a `Peek`.
    read: path, facts -> Trace. write: trace, path -> what the file does not hold, one phrase each.
    """

    name: str
    suffixes: tuple[str, ...]
    facts: tuple[str, ...]
    recognise: Callable[["Peek"], bool]
    read: Callable[[Path, "Facts"], Trace]
    write: Callable[[Trace, Path], list[str]]


class Peek(NamedTuple):
    """What is seen of a file before its format is known.

    magic: its first 8 bytes. names: arrays of an .npz file. first: the first JSON object, {} if it is not JSON.
    """

    magic: bytes
    names: frozenset[str]
    first: dict


class Request(NamedTuple):
    """The routing of one sequence, rows in the order of its tokens; the first `prompt_tokens` rows are prefill.

    experts [n, L, K] integers; weights [n, L, K] floats or None; scores [n, L, E] floats or None.
    """

    experts: np.ndarray
    weights: np.ndarray | None
    scores: np.ndarray | None
    prompt_tokens: int


class Facts:
    """Facts that the caller gave, beside those that the file holds."""

    def __init__(self, given: dict[str, Any], name: str, accepted: Sequence[str], source: Path):
        self.given, self.name, self.source = given, name, source
        unknown = sorted(set(given) - {*accepted, *RUN_FACTS})
        if unknown:
            raise TraceError(
                f"{source}: format {name} takes no fact {', '.join(unknown)}; it takes "
                f"{', '.join([*accepted, *RUN_FACTS])}"
            )
        layers = given.get("moe_layers")
        if layers is not None and not (
            isinstance(layers, (list, tuple, range))
            and len(layers)
            and all(isinstance(layer, int) and layer >= 0 for layer in layers)
            and list(layers) == sorted(set(layers))
        ):
            raise TraceError(f"{source}: moe_layers={layers!r}: expected a rising list of layer indices")
        for field, least in (("E", 1), ("K", 1), ("layers", 1), ("chunk", 1)):
            value = given.get(field)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise TraceError(f"{source}: {field}={value!r}: expected an integer of at least {least}")

    def resolve(self, **found: Any) -> list[Any]:
        """The value of each fact: what the file holds (None: it does not), or what was given.

        Raises TraceError if both are there and differ, or naming all facts that are nowhere.
        """
        values, missing = [], []
        for name, held in found.items():
            given = self.given.get(name)
            given = list(given) if isinstance(given, (tuple, range)) else given
            if held is not None and given is not None and held != given:
                raise TraceError(f"{self.source}: {name}={given!r} contradicts the file, which holds {held!r}")
            values.append(given if held is None else held)
            if values[-1] is None:
                missing.append(name)
        if missing:
            asked = "; ".join(f"{name} ({FACTS[name]})" for name in missing)
            raise TraceError(
                f"{self.source}: a file of format {self.name} does not hold {asked}: pass "
                + ", ".join(f"{name}=..." for name in missing)
            )
        return values

    def moe_layers(self, held: list[int]) -> list[int]:
        """The model's MoE layers, of a file that numbers its layers: as it does, or as given if it counts 0..L-1."""
        given = self.given.get("moe_layers")
        if given is not None and len(given) == len(held) and held == list(range(len(held))):
            return list(given)
        return self.resolve(moe_layers=held)[0]

    def prompt_tokens(self, rows: Sequence[int], held: Sequence[int | None] | None = None) -> list[int]:
        """Prompt rows of each request, of which `rows` counts all rows; `held` are those that the file knows."""
        held = [None] * len(rows) if held is None else held
        given = self.given.get("prompt_tokens")
        if given is not None and not isinstance(given, (list, tuple)):
            given = [given] * len(rows)
        if given is not None and len(given) != len(rows):
            raise TraceError(f"{self.source}: prompt_tokens: {len(given)} numbers for {len(rows)} requests")
        counts = []
        for index, (count, known) in enumerate(zip(rows, held, strict=True)):
            (value,) = Facts.resolve(self if given is None else self._with(given[index]), prompt_tokens=known)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= count:
                raise TraceError(f"{self.source}: request {index}: prompt_tokens is {value!r}, expected 0..{count}")
            counts.append(value)
        return counts

    def _with(self, prompt_tokens):
        other = object.__new__(Facts)
        other.given = self.given | {"prompt_tokens": prompt_tokens}
        other.name, other.source = self.name, self.source
        return other


def assemble(requests: Sequence[Request], facts: Facts, *, E, moe_layers, model=None, **header: Any) -> Trace:
    """The trace of requests that were served one after the other.

    A prompt is one prefill step, or steps of `chunk` tokens if that fact is given; each later row is a step of its own.
    Weights that the file does not hold become 1/K, which leaves the experts in the order of their ids, and the header
    says `"weights": "unknown"`. Raises TraceError.
    """
    source = facts.source
    if not requests:
        raise TraceError(f"{source}: holds no request")
    shapes = {request.experts.shape[1:] for request in requests}
    if len(shapes) != 1:
        raise TraceError(f"{source}: requests differ in layers or experts a token: {sorted(shapes)}")
    ((L, K),) = shapes
    if L != len(moe_layers):
        raise TraceError(f"{source}: {L} layers in the file, {len(moe_layers)} in moe_layers {moe_layers}")
    known = {(request.weights is None, request.scores is None) for request in requests}
    if len(known) != 1:
        raise TraceError(f"{source}: some requests hold weights or scores, others do not")
    no_weights, no_scores = known.pop()

    given = facts.given
    chunk = given.get("chunk", max(1, *(request.prompt_tokens for request in requests), 1))
    phase, number, step, next_step = [], [], [], 0
    for index, request in enumerate(requests):
        n, prompt = len(request.experts), request.prompt_tokens
        prefill_steps = -(-prompt // chunk)
        rows = np.arange(n)
        phase.append(np.where(rows < prompt, PREFILL, DECODE))
        number.append(np.full(n, index))
        step.append(next_step + np.where(rows < prompt, rows // chunk, prefill_steps + rows - prompt))
        next_step += prefill_steps + n - prompt
    experts = np.concatenate([request.experts for request in requests])
    if no_weights:
        weights = np.full(experts.shape, 1 / K, np.float16)
        header["weights"] = "unknown"
    else:
        weights = np.concatenate([request.weights for request in requests])
    header = {
        "moe_layers": [int(layer) for layer in moe_layers],
        "E": int(E),
        "K": int(K),
        "chunk": int(chunk),
        "scope": given.get("scope", "layer"),
        "slots": given.get("slots", L * int(E)),
        "contract": given.get("contract", "atomic-bypass"),
        "policy": given.get("policy", "unknown"),
        "model": given.get("model") or model or "unknown",
        "dtype": given.get("dtype", "unknown"),
        "source_format": facts.name,
    } | header
    try:
        return Trace.from_rows(
            experts,
            weights,
            np.concatenate(phase),
            np.concatenate(number),
            np.concatenate(step),
            header,
            None if no_scores else np.concatenate([request.scores for request in requests]),
        )
    except TraceError as error:
        raise TraceError(f"{source}: {str(error).removeprefix('trace: ')}") from error


def split_requests(trace: Trace) -> list[Request]:
    """The requests of a trace by rising number, prompt rows first; the other direction of `assemble`."""
    order = np.argsort(trace.request, kind="stable")
    cuts = np.flatnonzero(np.diff(trace.request[order])) + 1
    requests = []
    for rows in np.split(order, cuts) if len(order) else ():
        phase = trace.phase[rows]
        if (np.diff(phase.astype(int)) < 0).any():
            raise TraceError(
                f"export: request {trace.request[rows[0]]} has prompt rows after decoded ones, which no other "
                "format holds"
            )
        scores = None if trace.scores is None else trace.scores[rows]
        weights = None if trace.header.get("weights") == "unknown" else trace.weights[rows]
        requests.append(Request(trace.experts[rows], weights, scores, int((phase == PREFILL).sum())))
    return requests


def single_request(trace: Trace, name: str) -> Request:
    """The only request of a trace, for formats that hold one."""
    requests = split_requests(trace)
    if len(requests) != 1:
        raise TraceError(
            f"export: a file of format {name} holds one request, the trace {len(requests)}: export "
            "trace.select([number]), one file each"
        )
    return requests[0]


def losses(trace: Trace, holds: Sequence[str]) -> list[str]:
    """What a file does not hold of a trace: phrases for arrays, header entries and the grouping into steps.

    holds: names of arrays (`weights`, `scores`, `phase`) and header entries that the format stores.
    """
    lost = []
    if "weights" not in holds and trace.header.get("weights") != "unknown":
        lost.append("weights, and with them the order of a token's experts")
    lost += [name for name in ("scores", "phase") if name not in holds and getattr(trace, name) is not None]
    lost += [f"pred/{name}" for name in trace.pred]
    numbers = np.unique(trace.request)
    if len(numbers) and numbers[-1] != len(numbers) - 1:
        lost.append("the numbers of the requests: they are counted from 0")
    if _steps_matter(trace):
        lost.append("step: which rows were served together")
    derived = {"source_format", "weights"}
    lost += [f"header: {name}" for name in trace.header if name not in holds and name not in derived]
    return lost


def _steps_matter(trace):
    """Whether the rows are anything else than requests one after the other, each prompt one step."""
    phase, request, step = (column.astype(np.int64) for column in (trace.phase, trace.request, trace.step))
    if len(step) < 2:
        return False
    joined = (np.diff(request) == 0) & (phase[1:] == PREFILL) & (phase[:-1] == PREFILL)
    return bool((np.diff(request) < 0).any() or (np.diff(step) != ~joined).any())


def take_layers(experts: np.ndarray, moe_layers: Sequence[int], source: Path) -> np.ndarray:
    """The MoE layers of [n, layers, K]: all of them, or those of an axis that counts dense layers too."""
    count = experts.shape[1]
    if count == len(moe_layers):
        return experts
    if count > max(moe_layers):
        return experts[:, list(moe_layers)]
    raise TraceError(
        f"{source}: the layer axis has {count} entries: neither the {len(moe_layers)} of moe_layers nor all layers up "
        f"to {max(moe_layers)}"
    )


class Grid:
    """Collects records of one (request, token, layer) each, and puts them into arrays."""

    def __init__(self, source: Path, unit: str = "line"):
        self.source, self.unit = source, unit
        self.K = self.E = None
        self._at, self._key = array("q"), array("q")
        self._experts, self._weights, self._scores, self._phase = array("q"), array("d"), array("d"), array("b")

    def fail(self, at: int, problem: str):
        """Raises TraceError for the record at line (or whatever `unit` is) `at`."""
        raise TraceError(f"{self.source}: {self.unit} {at}: {problem}")

    def add(self, at, request, token, layer, experts, weights=None, scores=None, phase=None):
        """Adds a record; `at` is its line. `weights` or `scores` in all records or in none."""
        for name, value in (("request", request), ("token", token), ("layer", layer)):
            if not _is_count(value):
                self.fail(at, f"{name} is {value!r}, expected an integer of at least 0")
        if not isinstance(experts, list) or not experts or not all(_is_count(e) for e in experts):
            self.fail(at, f"experts are {experts!r}, expected a list of integers of at least 0")
        self.K = self.K or len(experts)
        if len(experts) != self.K:
            self.fail(at, f"{len(experts)} experts, expected {self.K} as before: a trace has one number K")
        if len(set(experts)) != len(experts):
            self.fail(at, f"an expert occurs twice in {experts}")
        if scores is not None:
            self.E = self.E or len(scores)
        for name, values, width, store in (
            ("weights", weights, self.K, self._weights),
            ("scores", scores, self.E, self._scores),
        ):
            if (values is None) != (not store) and self._at:
                self.fail(at, f"{name}: there in some records and absent in others")
            if values is not None:
                if not isinstance(values, list) or len(values) != width or not all(_is_number(v) for v in values):
                    self.fail(at, f"{name}: expected a list of {width} finite numbers, got {str(values)[:80]}")
                store.extend(values)
        if (phase is None) != (not self._phase) and self._at:
            self.fail(at, "phase: there in some records and absent in others")
        if phase is not None:
            self._phase.append(phase)
        self._at.append(at)
        self._key.extend((request, token, layer))
        self._experts.extend(experts)

    def layers(self) -> list[int]:
        """The layers that occur, rising."""
        return np.unique(np.array(self._key).reshape(-1, 3)[:, 2]).tolist()

    def requests(self) -> list[tuple[int, Request, int | None]]:
        """(number in the file, routing, prompt rows if records have a phase) of each request, by rising number.

        Raises TraceError naming the line of a record that occurs twice, or whose token lacks a layer.
        """
        if not self._at:
            raise TraceError(f"{self.source}: holds no routing")
        key, at = np.array(self._key).reshape(-1, 3), np.array(self._at)
        order = np.lexsort(key.T[::-1])
        key, at = key[order], at[order]
        twice = np.flatnonzero((key[1:] == key[:-1]).all(1))
        if len(twice):
            request, token, layer = key[twice[0]].tolist()
            self.fail(max(at[twice[0] : twice[0] + 2]), f"request {request} token {token} layer {layer} occurs twice")
        layers = self.layers()
        L = len(layers)
        starts = np.flatnonzero(np.r_[True, (key[1:, :2] != key[:-1, :2]).any(1)])
        counts = np.diff(np.r_[starts, len(key)])
        short = np.flatnonzero(counts != L)
        if len(short):
            rows = slice(starts[short[0]], starts[short[0]] + counts[short[0]])
            lacking = sorted(set(layers) - set(key[rows, 2].tolist()))
            request, token, _ = key[rows.start].tolist()
            self.fail(int(at[rows].max()), f"request {request} token {token} lacks layers {lacking}, perhaps torn")
        experts = np.array(self._experts).reshape(-1, self.K)[order].reshape(-1, L, self.K)
        weights = np.array(self._weights).reshape(-1, self.K)[order].reshape(-1, L, self.K) if self._weights else None
        scores = np.array(self._scores).reshape(-1, self.E)[order].reshape(-1, L, self.E) if self._scores else None
        phase = np.array(self._phase)[order].reshape(-1, L) if self._phase else None
        if phase is not None:
            for row in np.flatnonzero((phase != phase[:, :1]).any(1))[:1]:
                self.fail(int(at[row * L]), "the layers of one token have different phases")
        owner = key[starts, 0]
        found = []
        for number in np.unique(owner).tolist():
            rows = np.flatnonzero(owner == number)
            prompt = None
            if phase is not None:
                own = phase[rows, 0]
                for row in rows[1:][np.diff(own.astype(int)) < 0][:1]:
                    self.fail(int(at[row * L]), "a prompt token after a generated one")
                prompt = int((own == PREFILL).sum())
            parts = [None if part is None else part[rows] for part in (experts, weights, scores)]
            found.append((number, Request(*parts, prompt or 0), prompt))
        return found


def _is_count(value):
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf")
