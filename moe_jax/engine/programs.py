"""The compiled programs of the engine: one prefill step, the first token, and the decode loop.

Each is a pure function over pytrees, compiled ahead of time for the shapes it meets, so that compilation is counted and
timed apart and its HLO can be inspected. The KV pools and the slot cache are donated: a step updates them in place.
"""

import logging
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moe_jax.engine.forced_routing import force
from moe_jax.generation.sampling import mark_seen, sample
from moe_jax.generation.stopping import is_eos

logger = logging.getLogger(__name__)

NO_TOKEN = -1


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["kv", "cache", "tokens", "live", "left", "seen"],
    meta_fields=[],
)
@dataclass(frozen=True)
class LoopState:
    """What a decode step changes.

    tokens [B] int32: the last token of each row, not yet in the cache. live [B] bool. left [B] int32: tokens that a row
    may still produce. seen [B, V] bool or None: tokens of prompt and output, for the repetition penalty.
    """

    kv: Any
    cache: Any
    tokens: jax.Array
    live: jax.Array
    left: jax.Array
    seen: Any


class Programs:
    """Compiles on demand and keeps what it compiled.

    Args:
      graphdef: structure of the model (`nnx.split`); transport: the `Transport` whose experts the model calls.

    Attributes:
      compilations, compile_seconds: how often and how long XLA compiled.
    """

    def __init__(self, graphdef, transport):
        self._graphdef = graphdef
        self._transport = transport
        self._compiled: dict[Any, Any] = {}
        self.compilations = 0
        self.compile_seconds = 0.0

    def run(self, name: str, donate: tuple[int, ...], static: dict, *args):
        """Runs the method `_<name>` on `args`, compiled for their shapes and `static`."""
        leaves, structure = jax.tree.flatten(args)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        key = (name, tuple(sorted(static.items())), structure, shapes)
        if key not in self._compiled:
            started = time.perf_counter()
            body = partial(getattr(self, f"_{name}"), **static)
            options = self._transport.decode_options(static["program"]) if name == "decode" else None
            self._compiled[key] = jax.jit(body, donate_argnums=donate).lower(*args).compile(options)
            seconds = time.perf_counter() - started
            self.compilations += 1
            self.compile_seconds += seconds
            logger.info("compiled %s %s in %.1f s", name, static, seconds)
        return self._compiled[key](*args)

    def texts(self):
        """(name, optimised HLO) of every compiled program."""
        return [(key[0], program.as_text()) for key, program in self._compiled.items()]

    def _prefill(
        self, params, operands, kv, cache, batch, logits, forced, *, block_rows, attention, routing, everything
    ):
        """One chunk.

        batch: (tokens, positions [B, T] int32, live [B, T] bool, ends [B] bool: rows whose prompt ends here).
        forced: `ForcedRouting` in the router's place, or None.

        Returns kv, cache, logits ([B, V] f32, replaced where `ends`; with `everything` [B, T, V] of this chunk) and the
        routing or None.
        """
        tokens, positions, live, ends = batch
        model = nnx.merge(self._graphdef, params)
        cache = self._transport.begin(cache)
        experts = self._transport.bind(operands, prefill=True, block_rows=block_rows)
        experts = force(experts, forced, positions)
        hidden, kv, cache = model(
            tokens, positions, live, kv, experts, cache, last_only=not everything, attention=attention
        )
        if everything:
            logits = model.logits(hidden)
        else:
            logits = jnp.where(ends[:, None], model.logits(hidden[:, 0]), logits)
        cache, record = self._transport.finish_step(cache)
        return kv, cache, logits, _stack(record) if routing else None

    def _encode(self, params, operands, cache, batch, *, block_rows):
        """Whole sources of an encoder-decoder.

        batch: (tokens [B, S] int32, live [B, S] bool, counted [] int32: what experts' capacity is a share of).

        Returns what each layer of the decoder keeps of the sources, and cache.
        """
        tokens, live, counted = batch
        model = nnx.merge(self._graphdef, params)
        cache = self._transport.begin(cache)
        experts = self._transport.bind(operands, prefill=True, block_rows=block_rows)
        kept, cache = model.encode(tokens, live, counted, experts, cache)
        cache, _ = self._transport.finish_step(cache)
        return kept, cache

    def _first(self, logits, seen, live, left, draws, *, greedy, sort):
        """The first new token of each row from the prompt's logits, or a given one: (tokens, live, left, seen)."""
        tokens = _draw(logits, seen, draws, draws["length"], greedy, sort)
        tokens = jnp.where(draws["first"] == NO_TOKEN, tokens, draws["first"])
        return _advance(tokens, tokens, live, live, left, seen, draws["eos"])

    def _decode(self, params, operands, loop, draws, forced, *, steps, greedy, sort, routing, attention, program=None):
        """Up to `steps` tokens a row. When no row is live or a callback failed it stops, or the steps that are left are
        idle (`Transport.runs_ahead`). `forced` as in `_prefill`.

        Returns the loop state and what the host wants of the call, apart from the state, which the next call may have
        consumed by then: tokens [B, steps] (NO_TOKEN where a row produced none), steps done, live [B], routing
        [steps, L, B, K] or None, and the transport's counters and report. routing: (L, K) to record it, else None; in
        an encoder-decoder L is the decoder's. program: as of `Transport.choose_program`.
        """
        model = nnx.merge(self._graphdef, params)
        transport = self._transport
        settings = {"guess": model.guess} if transport.gate else {}
        if program is not None:
            settings["program"] = program
        loop = replace(loop, cache=transport.begin(loop.cache, program))
        B = loop.tokens.shape[0]

        def running(i, loop):
            return (i < steps) & jnp.any(loop.live) & (loop.cache.error[0] == 0)

        def step(carry):
            i, loop, out, routed = carry
            kv = loop.kv
            go = running(i, loop)
            fed = loop.live & go
            experts = force(transport.bind(operands, prefill=False, **settings), forced, kv.lengths[:, None])
            if routing:  # XLA reads the ids of each layer, too
                experts.read_by_kernels = getattr(experts, "read_by_kernels", frozenset()) - {"ids"}
            hidden, kv, cache = model(
                loop.tokens[:, None],
                kv.lengths[:, None],
                fed[:, None],
                kv,
                experts,
                loop.cache,
                attention=attention,
            )
            cache, record = transport.finish_step(cache, go)
            with jax.named_scope("sample"):
                drawn = _draw(model.logits(hidden[:, 0]), loop.seen, draws, kv.lengths, greedy, sort)
            good = fed & (cache.error[0] == 0)
            tokens, live, left, seen = _advance(drawn, loop.tokens, good, loop.live, loop.left, loop.seen, draws["eos"])
            # An idle step writes what is written already, or where nobody reads.
            out = out.at[:, i].set(jnp.where(good, drawn, NO_TOKEN))
            if routing:
                ids, weights = _stack(record)
                routed = (routed[0].at[i].set(ids), routed[1].at[i].set(weights))
            return i + go, LoopState(kv, cache, tokens, live, left, seen), out, routed

        out = jnp.full((B, steps), NO_TOKEN, jnp.int32)
        routed = None
        if routing:
            L, K = routing
            routed = jnp.zeros((steps, L, B, K), jnp.int16), jnp.zeros((steps, L, B, K), jnp.float16)

        carry = (jnp.int32(0), loop, out, routed)
        if transport.runs_ahead:
            # XLA starts all of a fixed number of steps at once; the condition of a loop is read by the host, which
            # then cannot go on to the next call.
            carry = jax.lax.fori_loop(0, steps, lambda _, carry: step(carry), carry)
        else:
            carry = jax.lax.while_loop(lambda carry: running(carry[0], carry[1]), step, carry)
        done, loop, out, routed = carry
        results = {"tokens": out, "steps": done, "routing": routed}
        kept = {"live": loop.live, "counters": transport.counters(loop.cache), "report": transport.report(loop.cache)}
        return loop, results | jax.tree.map(jnp.copy, kept)


def _draw(logits, seen, draws, position, greedy, sort):
    return sample(
        logits,
        draws["arrays"],
        seed=draws["seed"],
        sequence=draws["sequence"],
        position=position,
        seen=seen,
        greedy=greedy,
        sort=sort,
    )


def _advance(drawn, before, good, live, left, seen, eos):
    """Books the drawn tokens of the rows in `good`: (tokens, live, left, seen)."""
    tokens = jnp.where(good, drawn, before)
    left = left - good
    if seen is not None:
        seen = mark_seen(seen, tokens, good)
    # A row whose step failed stays live: the error word, not the row, ends the loop.
    live = jnp.where(good, (left > 0) & ~is_eos(tokens, eos), live)
    return tokens, live, left, seen


def _stack(record):
    """Routing of a step, one (ids, weights, scores) a MoE layer -> ids int16 and weights f16, [L, rows, K]."""
    ids = jnp.stack([ids for ids, _, _ in record]).astype(jnp.int16)
    return ids, jnp.stack([weights for _, weights, _ in record]).astype(jnp.float16)
