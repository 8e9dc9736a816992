"""Replays a routing trace in the live engine: the trace says which experts serve a token, not the router.

Layers, cache, policy, transport and copies work as in `MoE.generate` (the router runs, unheeded), so hits, bytes and
times are those that the traced routing has on this machine, whatever the weights of the model: a trace of one model can
be timed with the experts of another. `host_offload.simulate` predicts the same hits.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from host_offload.predictors.replay import Step, replay_steps
from host_offload.trace import PREFILL, Trace, TraceError
from moe_jax.engine.engine import power_of_two
from moe_jax.engine.forced_routing import ForcedRouting
from moe_jax.engine.programs import NO_TOKEN
from moe_jax.engine.stats import RunStats
from moe_jax.errors import InputError, TransportError
from moe_jax.generation.sampling import SamplingParams

# Fewest positions of a table of forced routing: below, more shapes would only mean more compilations.
MIN_POSITIONS = 64


def replay(
    moe,
    trace: Trace,
    requests: Iterable[int] | None = None,
    *,
    prompts: Sequence[Any] | None = None,
    record: bool | None = None,
) -> list[np.ndarray]:
    """Runs requests of `trace` from their first row to their last; what `MoE.replay` does.

    A request is prefilled with its prefill rows (see `with_prompts`) in chunks of `prefill_chunk`, and decoded with the
    rest; requests that share steps are a batch. The cache is not emptied between requests and the policy is told of
    each, as in `generate`: `simulate(with_prompts(trace), policy, reset="never")` gives the hits of a replay after
    `set_cache`, if the trace's prefill steps are the engine's chunks. The trace that `record` makes holds the steps as
    they were.

    Args:
        moe: the model; its MoE layers, experts a layer and experts a token must be those of the trace.
        trace: the routing. Weights scale the experts' outputs. A policy that reads scores sees the trace's, or the
            weights if it has none.
        requests: numbers of requests, all by default. They run in the order of their first steps.
        prompts: ids of each request in that order, as many as are prefilled; default zeros. Only the tokens depend on
            them: with the prompts of a greedy run and its trace, replay gives the tokens of that run (to the rounding
            of the weights to float16).
        record: record the routing for `MoE.trace()`; default the configuration's `trace`.

    Returns:
        The new ids of each request in that order, int32 [decoded rows + 1], chosen greedily.

    Raises:
        InputError: the model has an encoder, whose routing traces do not hold; the trace does not fit; a request is not
            in it, cannot be a batch with those it shares steps with, or is too long; a prompt has the wrong length or
            ids. TransportError: as `MoE.generate`; `error.partial` holds the ids of the requests made so far.
    """
    _check_fit(moe, trace)
    trace = with_prompts(trace)
    batches = [[_Request(trace, number) for number in batch] for batch in _batches(moe, trace, requests)]
    order = [request for batch in batches for request in batch]
    _give_prompts(moe, order, prompts)
    engine = moe._idle_engine()
    record = moe.config.trace if record is None else record
    stats = RunStats(engine.transport.spec.L, engine.transport.spec.row_bytes)
    new: list[np.ndarray] = []
    cache = moe._cache_now()
    try:
        for batch in batches:
            params = [SamplingParams(max_new_tokens=request.new_tokens) for request in batch]
            forced = _stack(trace, batch, power_of_two(len(batch)))
            script = None
            if engine.transport.scripted:
                script = _script(trace, batch, engine.transport.reads)
            run = engine.start([r.prompt for r in batch], params, seed=0, routing=record, forced=forced, script=script)
            pieces = []
            try:
                for tokens in run.tokens():
                    pieces.append(tokens)
            except TransportError as error:
                raise TransportError(str(error), new + _rows(pieces, len(batch))) from error.__cause__
            finally:
                stats.merge(run.stats)
                if run.routing:
                    moe._routing.append((cache, run.routing))
            new += _rows(pieces, len(batch))
    finally:
        moe._book(stats)
    return new


def with_prompts(trace: Trace) -> Trace:
    """`trace` with a prefill row in every request: the engine decodes only after one, so a request that was recorded
    without its prompt is prefilled with its first row."""
    numbers, first = np.unique(trace.request, return_index=True)
    prompted = np.unique(trace.request[trace.phase == PREFILL])
    phase = trace.phase.copy()
    phase[first[~np.isin(numbers, prompted)]] = PREFILL
    return dataclasses.replace(trace, phase=phase)


class _Request:
    """A request's rows in the order of its tokens, and how many of them are prefilled."""

    def __init__(self, trace: Trace, number: int):
        self.number = number
        self.rows = np.flatnonzero(trace.request == number)
        phase = trace.phase[self.rows]
        if (np.diff(phase.astype(np.int8)) < 0).any():
            raise InputError(f"trace: request {number} has prefill rows after decoded ones; it cannot be replayed")
        self.prefilled = int((phase == PREFILL).sum())
        self.new_tokens = len(self.rows) - self.prefilled + 1
        self.first, self.last = int(trace.step[self.rows[0]]), int(trace.step[self.rows[-1]])
        self.prompt = np.zeros(self.prefilled, np.int32)


def _check_fit(moe, trace):
    if not isinstance(trace, Trace):
        raise InputError(
            f"trace: expected a host_offload.trace.Trace, got {type(trace).__name__}; load_trace reads one"
        )
    trace.validate()
    cfg, header = moe.model_config, trace.header
    if cfg.encoder_decoder:
        raise InputError(
            "trace: an encoder-decoder routes whole sources and drops tokens; only decoders can be replayed"
        )
    ours = {"MoE layers": len(cfg.moe_layers), "E": cfg.num_experts, "K": cfg.num_experts_per_tok}
    theirs = {"MoE layers": len(header["moe_layers"]), "E": header["E"], "K": header["K"]}
    if ours != theirs:
        raise InputError(
            f"trace: its {theirs} are not the model's {ours}; replay it with a model of its geometry "
            "(experiments/random_model.py makes one of any shape)"
        )
    if not len(trace.request):
        raise InputError("trace: holds no rows")


def _batches(moe, trace, requests) -> list[list[int]]:
    """Numbers of requests that run together, by first step."""
    known = np.unique(trace.request).tolist()
    wanted = known if requests is None else list(dict.fromkeys(int(number) for number in requests))
    absent = sorted(set(wanted) - set(known))
    if absent or not wanted:
        raise InputError(f"requests: {absent or wanted} not in the trace; it has {known[0]} to {known[-1]}")
    spans = {number: trace.step[trace.request == number][[0, -1]].tolist() for number in wanted}
    batches: list[list[int]] = []
    end = -1
    for number in sorted(wanted, key=lambda number: (spans[number][0], number)):
        first, last = spans[number]
        if first > end:
            batches.append([])
        elif first != spans[batches[-1][0]][0]:
            raise InputError(
                f"requests: {number} begins at step {first} while request {batches[-1][0]} runs since step "
                f"{spans[batches[-1][0]][0]}; a batch begins together, so replay them one after the other"
            )
        batches[-1].append(number)
        end = max(end, last)
    largest = max(batches, key=len)
    if len(largest) > moe.config.max_batch:
        raise InputError(
            f"requests: {largest} are one batch of {len(largest)}, and max_batch is {moe.config.max_batch}; raise it, "
            "or replay fewer of them"
        )
    return batches


def _give_prompts(moe, order, prompts):
    vocabulary, longest = moe.model_config.vocab_size, moe.max_sequence_length
    if prompts is not None and len(prompts) != len(order):
        raise InputError(f"prompts: {len(prompts)} for the requests {[r.number for r in order]}; give one for each")
    for index, request in enumerate(order):
        length = request.prefilled + request.new_tokens
        if length > longest:
            raise InputError(
                f"requests: {request.number} is {length} tokens long, and this model runs at most {longest}; raise "
                "max_sequence_length in the configuration"
            )
        if prompts is None:
            continue
        ids = np.asarray(prompts[index])
        if ids.dtype.kind not in "iu" or ids.shape != (request.prefilled,):
            raise InputError(
                f"prompts[{index}]: {ids.dtype} {ids.shape}; request {request.number} prefills {request.prefilled} "
                "tokens, so give that many integers"
            )
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise InputError(f"prompts[{index}]: ids {ids.min()}..{ids.max()} are outside 0..{vocabulary - 1}")
        request.prompt = ids.astype(np.int32)


def _stack(trace: Trace, batch: list[_Request], rows: int) -> ForcedRouting:
    """The routing of a batch by row and position, padded as the engine pads (a new length then rarely compiles)."""
    S = max(MIN_POSITIONS, power_of_two(max(len(request.rows) for request in batch)))

    def lay(values):
        out = np.zeros((rows, S, *values.shape[1:]), values.dtype)
        for row, request in enumerate(batch):
            out[row, : len(request.rows)] = values[request.rows]
        return out

    return ForcedRouting(
        given=lay(np.ones(len(trace.request), bool)),
        ids=lay(trace.experts),
        weights=lay(trace.weights),
        scores=None if trace.scores is None else lay(trace.scores),
    )


def _script(trace: Trace, batch: list[_Request], reads: tuple[str, ...]) -> list[Step]:
    """The decode steps of a batch for a predictor that reads a recorded run; InputError if the trace lacks `reads`."""
    try:
        return list(replay_steps(trace.select([request.number for request in batch]), "decode", reads))
    except TraceError as error:
        raise InputError(str(error)) from error


def _rows(pieces: list[np.ndarray], B: int) -> list[np.ndarray]:
    """The ids of each of B rows from the engine's chunks [B, n]."""
    whole = np.concatenate(pieces, axis=1) if pieces else np.zeros((B, 0), np.int32)
    return [row[row != NO_TOKEN] for row in whole]
