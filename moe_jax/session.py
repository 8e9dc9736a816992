"""One call of `MoE.generate`: the engine's tokens on their way to the caller, cut at stop strings and booked."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from moe_jax.config import bad_value
from moe_jax.engine.engine import Run
from moe_jax.engine.programs import NO_TOKEN
from moe_jax.errors import TransportError
from moe_jax.generation.request import Request
from moe_jax.generation.stopping import StopMatcher
from moe_jax.generation.text import IncrementalDecoder, StreamerFeed, Tokenizer


class Session:
    """One generate call: feeds the engine's tokens through the stop strings and keeps what each row produced."""

    def __init__(self, moe, request: Request, trace: bool | None):
        if not isinstance(trace, bool | None):
            raise bad_value("trace", trace, "True, False or None (the configuration's)")
        batch, params = request.batch, request.params
        self._moe = moe
        self.new_ids: list[list[int]] = [[] for _ in batch.prompts]
        self._record = moe.config.trace if trace is None else trace
        rows = [dataclasses.replace(params, max_new_tokens=batch.max_new_tokens, max_length=None)] * len(batch.prompts)
        self._run: Run = moe._open_engine().start(
            list(batch.prompts),
            rows,
            seed=params.seed,
            routing=self._record,
            source=request.source,
            stops=bool(params.stop),
        )
        self._matchers = [
            StopMatcher(moe.tokenizer, params.stop, prompt.tolist()) if params.stop else None
            for prompt in batch.prompts
        ]
        self._lengths = batch.lengths

    def advance(self) -> Iterator[list[list[int]]]:
        """Yields the new ids of each row, a chunk a time, already cut at stop strings."""
        self._cache = self._moe._cache_now()  # not before: the cache may be set between stream() and its first piece
        try:
            for tokens in self._run.tokens():
                yield [self._take(row, tokens[row]) for row in range(len(self.new_ids))]
        finally:
            self._finish()

    def _take(self, row: int, tokens) -> list[int]:
        ids = [int(token) for token in tokens if token != NO_TOKEN]
        matcher = self._matchers[row]
        if matcher is not None and ids:
            match = matcher.push(ids)
            if match is not None:
                ids = ids[: max(0, match.kept - len(self.new_ids[row]))]
                self._run.stats.overshoot += match.overshoot
                self._run.stop(row)
        self.new_ids[row].extend(ids)
        return ids

    def _finish(self):
        if self._record:
            # Rows of a sequence in the trace: its prompt and all but the last of its new tokens.
            keep = {
                int(request): int(length) + max(0, len(ids) - 1)
                for request, length, ids in zip(self._run._requests, self._lengths, self.new_ids, strict=True)
            }
            rows = [part for part in _cut(self._run.routing, keep) if len(part["request"])]
            if rows:
                self._moe._routing.append((self._cache, rows))
        self._moe._book(self._run.stats)


def complete(moe, request: Request, trace: bool | None, streamer: Any) -> Any:
    """Runs a call to its end; returns what `MoE.generate` returns. `streamer`: fed as transformers does, or None.

    Raises InputError for an object that is no streamer, TransportError with what there is so far.
    """
    feed = None if streamer is None else StreamerFeed(streamer)
    if feed:
        feed.prompt(request.batch.input_ids)
    session = Session(moe, request, trace)
    fault = None
    try:
        # Closed here, not by the garbage collector: when a streamer raises, the run is booked and its pages free.
        with contextlib.closing(session.advance()) as chunks:
            for pieces in chunks:
                if feed:
                    feed.tokens(steps(pieces, request.params.fill_token_id))
    except TransportError as error:
        fault = error
    if feed:
        feed.end()
    result = request.result(session.new_ids, moe.tokenizer)
    if fault is not None:
        raise TransportError(str(fault), result) from fault.__cause__
    return result


def stream_text(session: Session, tokenizer: Tokenizer) -> Iterator[str]:
    """Yields the new text of the session's one sequence in pieces; raises TransportError after what there is so far."""
    decoder, fault = IncrementalDecoder(tokenizer, skip_special_tokens=True), None
    try:
        with contextlib.closing(session.advance()) as chunks:
            for pieces in chunks:
                text = decoder.push(pieces[0])
                if text:
                    yield text
    except TransportError as error:
        fault = error
    rest = decoder.flush()
    if rest:
        yield rest
    if fault is not None:
        partial = tokenizer.decode(session.new_ids[0], skip_special_tokens=True)
        raise TransportError(str(fault), partial) from fault.__cause__


def recorded(calls: list[tuple[dict, list[dict]]]) -> tuple[list[dict], dict[str, np.ndarray]]:
    """(caches of the recorded routing in order, each with its first request; the rows, by name of the array).

    `calls`: of each session that recorded, the cache it ran under and its rows.
    """
    caches: list[dict] = []
    for cache, parts in calls:
        if not caches or any(caches[-1][name] != value for name, value in cache.items()):
            caches.append({"from_request": int(parts[0]["request"].min()), **cache})
    rows = [part for _, parts in calls for part in parts]
    return caches, {name: np.concatenate([part[name] for part in rows]) for name in rows[0]}


def _cut(routing: list[dict], keep: dict[int, int]) -> list[dict]:
    """Drops what was generated past a stop string: the first keep[request] rows of each request stay."""
    out = []
    for part in routing:
        stay = np.zeros(len(part["request"]), bool)
        for index, request in enumerate(part["request"].tolist()):
            if keep[request] > 0:
                keep[request] -= 1
                stay[index] = True
        out.append({name: values[stay] for name, values in part.items()})
    return out


def steps(pieces: list[list[int]], fill: int) -> np.ndarray:
    """[steps, B] ids of a chunk for a streamer; rows that ended are filled."""
    longest = max(map(len, pieces))
    out = np.full((longest, len(pieces)), fill, np.int64)
    for row, ids in enumerate(pieces):
        out[: len(ids), row] = ids
    return out
