"""How predictors see a trace: whole steps for a replay, single requests for fitting."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from host_offload.simulate import EventTable
from host_offload.trace import PHASES, TraceError


class Step(NamedTuple):
    """One step of a replay.

    number: the trace's step. start: a request begins here and no earlier one is running. need: [L, E] bool, distinct
    experts of its rows. scores: [L, E] float32 as the simulator gives them to policies. recorded: {name: [L, E]
    float32}, what was recorded under `pred/<name>`, higher = likelier, -inf = not predicted; "experts" is the truth (1
    where needed).
    """

    number: int
    start: bool
    need: np.ndarray
    scores: np.ndarray
    recorded: dict[str, np.ndarray]


def replay_steps(trace, phase="decode", reads=()) -> Iterator[Step]:
    """Yields the steps of `trace` in order; `phase` "prefill" or "decode" keeps only its rows, None takes all.

    `reads` are the names wanted in `Step.recorded`. Raises TraceError if the trace does not hold one of them,
    ValueError for an unknown phase.
    """
    table = EventTable(trace, phase)
    columns = {name: recorded_column(trace, name) for name in reads if name != "experts"}
    rows = np.arange(len(trace.step)) if phase is None else np.flatnonzero(trace.phase == PHASES[phase])
    rows = rows[np.argsort(trace.step[rows], kind="stable")]
    ends = np.cumsum(table.rows)
    for s in range(table.S):
        need, scores = table.need(s, s + 1)[0], table.scores(s, s + 1)[0]
        group = rows[ends[s] - table.rows[s] : ends[s]]
        recorded = {name: recorded_scores(column[group], table.E) for name, column in columns.items()}
        if "experts" in reads:
            recorded["experts"] = np.where(need, np.float32(1), np.float32(-np.inf))
        yield Step(int(table.step[s]), bool(table.start[s]), need, scores, recorded)


def upcoming(name_to_scores, next_name_to_scores, layer):
    """What `Predictor.observe` gets at `layer`: rows above it from this step, the others from the next one.

    The second argument is None at the last step: nothing is known then. Of recorded predictions only the truth reaches
    into the next step; a model's own predictions for a token do not exist before that token.
    """
    result = {}
    for name, scores in name_to_scores.items():
        rows = np.full_like(scores, -np.inf)
        rows[layer + 1 :] = scores[layer + 1 :]
        if name == "experts" and next_name_to_scores is not None:
            rows[: layer + 1] = next_name_to_scores[name][: layer + 1]
        result[name] = rows
    return result


def recorded_scores(values, E):
    """[L, E] float32, higher = likelier, from rows of `pred/<name>`: the best over the rows.

    int16 [rows, L, k] are ids by falling likelihood, -1 for none, and score k - rank; float16 [rows, L, E] are scores.
    """
    if values.dtype == np.float16:
        return values.max(axis=0).astype(np.float32)
    rows, L, k = values.shape
    scores = np.full((L, E), -np.inf, np.float32)
    layer = np.broadcast_to(np.arange(L), (rows, L))
    for rank in range(k - 1, -1, -1):  # the best rank is written last
        ids = values[..., rank]
        scores[layer[ids >= 0], ids[ids >= 0]] = k - rank
    return scores


def trace_shape(trace):
    """(L, E) of a trace."""
    return len(trace.header["moe_layers"]), trace.header["E"]


def fitted_shape(traces):
    """(L, E) of all `traces`; raises ValueError if there are none, or they differ."""
    shapes = {trace_shape(trace) for trace in traces}
    if len(shapes) != 1:
        raise ValueError(f"fit: traces must be of one model, got (L, E) = {sorted(shapes)}; give at least one trace")
    return shapes.pop()


def request_needs(traces) -> Iterator[np.ndarray]:
    """Yields [T, L, E] bool for each request of each trace: its tokens in order, prompt included."""
    for trace in traces:
        L, E = trace_shape(trace)
        for experts in requests_of(trace, "experts"):
            need = np.zeros((len(experts), L, E), bool)
            np.put_along_axis(need, experts.astype(np.int64), True, axis=-1)
            yield need


def requests_of(trace, field) -> Iterator[np.ndarray]:
    """Yields the rows of array `field` for each request, in the order in which they were processed."""
    order = np.lexsort((np.arange(len(trace.step)), trace.step, trace.request))
    for rows in np.split(order, np.flatnonzero(np.diff(trace.request[order])) + 1) if len(order) else ():
        yield getattr(trace, field)[rows]


def recorded_column(trace, name):
    """The array `pred/<name>` of a trace: int16 [T, L, k] or float16 [T, L, E].

    Raises TraceError if the trace does not hold it, or if its values are neither experts nor scores of all experts.
    """
    if name not in trace.pred:
        raise TraceError(
            f"trace: pred/{name} is missing (it holds: {', '.join(sorted(trace.pred)) or 'no predictions'}); record it "
            "while the model runs, see docs/predictors.md"
        )
    column, E = trace.pred[name], trace.header["E"]
    if column.dtype == np.float16 and column.shape[2:] != (E,):
        raise TraceError(f"trace: pred/{name}: float16 scores must be [T, L, E = {E}], got {column.shape}")
    if column.dtype == np.int16:
        if column.ndim != 3:
            raise TraceError(f"trace: pred/{name}: int16 ids must be [T, L, k], got {column.shape}")
        outside = np.flatnonzero(((column < -1) | (column >= E)).any(axis=(1, 2)))
        if outside.size:
            raise TraceError(f"trace: pred/{name}: row {outside[0]}: an expert is outside -1..{E - 1}")
    return column
