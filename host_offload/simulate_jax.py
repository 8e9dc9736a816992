"""The compiled back end of the simulator: many requests, capacities and variants of a policy side by side.

With `reset="request"` requests do not touch each other, so they are dealt to P lanes that advance together; with
`reset="never"` there is one lane. A loop over steps and layers serves one event of every lane at a time. The loop's
operations are too small to be worth a second core, so if cores are left over each runs a part of the lanes.

What a policy without `in_cache` prefers does not depend on what is cached: one ranking an event then serves all
capacities. The ranking is kept as bit words (bit f of `before[e]`: f stays rather than e), and the experts that stay at
capacity c are those of the candidates for which popcount(candidates & before[e]) < c. Policies with `in_cache` get one
state for every capacity. Shape letters: P lanes, U policy states, Q capacities that share a state, W words of 32
experts, L MoE layers, E experts.
"""

import hashlib
import heapq
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.plan import ABSENT_KEY, INT32_MAX, _forced_key, _retention_key
from host_offload.policy import fresh_state
from host_offload.simulate import (
    COUNTERS,
    EVICTIONS,
    LOOKUPS,
    CacheState,
    _clock,
    _empty_log,
    _result,
)

MAX_LANES = 64
CHUNK_BYTES = 128 << 20  # of router scores that are on their way at a time, in each part of a group
# A pool is cut down to size one expert at a time up to this many, above it by bisection.
FEW_DROPS = 8

_programs = {}  # text of a policy's functions and the settings -> compiled loop


def run_many(table, jobs, start=None):
    """Replays `jobs`, a list of (policy, settings) that share scope, contract, reset and `events`; Results in order.

    Jobs whose policies compute alike run in one program, and jobs that differ in nothing that matters only once.
    """
    groups, keys = {}, {}
    for index, (policy, settings) in enumerate(jobs):
        form = _form(policy, table, settings)
        known = id(policy), str(form)
        if known not in keys:
            keys[known] = _fingerprint(policy, table, settings, form)
        groups.setdefault(keys[known], []).append(index)
    results = [None] * len(jobs)
    cores = os.cpu_count() or 1

    def work(item):
        key, members = item
        done = _run_group(key, table, [jobs[i] for i in members], start, max(1, cores // len(groups)))
        for index, result in zip(members, done, strict=True):
            results[index] = result

    with ThreadPoolExecutor(min(len(groups), cores)) as pool:
        list(pool.map(work, groups.items()))
    return results


# ---------------------------------------------------------------------------------------------------- one group of jobs


def _run_group(key, table, jobs, start, threads):
    policy, settings = jobs[0]
    L, E = table.L, table.E
    # Distinct policy states, and the capacities that each of them serves.
    units, place = [], []
    for member, own in jobs:
        state = fresh_state(member, np, L, E, own.seed, own.capacities, own.scope == "global")
        if start is not None:
            state = start.policy
        identity = _digest(state) + (own.capacities.tobytes() if policy.in_cache else b"")
        known = [unit["identity"] for unit in units]
        if identity not in known:
            units.append({"identity": identity, "state": state, "capacities": []})
            known.append(identity)
        unit = units[known.index(identity)]
        quota = own.capacities.tolist()
        if quota not in unit["capacities"]:
            unit["capacities"].append(quota)
        place.append((known.index(identity), unit["capacities"].index(quota)))
    Q = max(len(unit["capacities"]) for unit in units)
    capacities = np.array([(u["capacities"] + u["capacities"][:1] * Q)[:Q] for u in units], np.int32)  # [U, Q, L]
    initial = jax.tree.map(lambda *leaves: np.stack(leaves), *(unit["state"] for unit in units))

    lanes = _deal(table, settings, threads)
    bits = _pack(np.zeros((L, E), bool) if start is None else start.resident)
    clock = _clock(table, settings, start)
    program, steps = _program(key, policy, settings), _steps(table, settings, clock)
    replay = partial(_replay, program, table, policy, settings, steps, initial, bits, capacities)
    with ThreadPoolExecutor(len(lanes)) as pool:
        ends, logs = zip(*pool.map(replay, lanes), strict=True)
    state, resident, _ = ends[0]  # with reset "never" there is one part
    counts = sum(end[2].sum(axis=0, dtype=np.int64) for end in ends)  # [U, Q, 2, L, 5]

    lookups = np.bincount(table.phase, table.rows * table.K, minlength=2).astype(np.int64)
    results = []
    for (member, own), (u, q) in zip(jobs, place, strict=True):
        counters = np.zeros((2, L, len(COUNTERS)), np.int64)
        counters[..., :LOOKUPS] = counts[u, q]
        counters[..., LOOKUPS] = lookups[:, None]
        end = None
        if own.reset == "never":
            left = _unpack(resident[0, u, q], E)
            last = int(clock[-1]) if table.S else (-1 if start is None else start.step)
            end = CacheState(left, jax.tree.map(lambda leaf, u=u: leaf[0, u].copy(), state), last)
        events = _events(table, lanes, logs, u, q) if own.events else None
        results.append(_result(table, member, own, counters, events, end))
    return results


def _replay(program, table, policy, settings, steps, initial, bits, capacities, lanes):
    """Replays one part, `lanes` [P, n]: (the loop's carry at its end; the record, [n, P, U, Q, L, ...] each, or None).

    steps: see `_steps`. initial: states [U, ...]. bits: residents at the start [L, W]. capacities: [U, Q, L].
    """
    P, n = lanes.shape
    shape = (P, *capacities.shape[:2])
    carry = (
        jax.tree.map(lambda leaf: np.broadcast_to(leaf, (P, *leaf.shape)), initial),
        np.broadcast_to(bits, (*shape, *bits.shape)),
        np.zeros((*shape, 2, table.L, LOOKUPS), np.int32),
    )
    sizes = {"E": table.E, "most": _most(table), "ragged": _ragged(table, settings)}
    long = policy.uses_scores or settings.events
    chunk = max(1, min(n, CHUNK_BYTES // (4 * P * table.L * table.E))) if long else max(n, 1)
    width = 1 << (chunk - 1).bit_length()
    logs = []
    for low in range(0, n, chunk):
        part = lanes[:, low : low + chunk]
        xs = _inputs(table, policy, steps, part, width)
        carry, log = program(carry, initial, capacities, xs, np.int32(part.shape[1]), **sizes)
        if settings.events:
            logs.append(jax.tree.map(lambda a, part=part: np.asarray(a)[: part.shape[1]], log))
    logs = jax.tree.map(lambda *parts: np.concatenate(parts), *logs) if logs else None
    return jax.tree.map(np.asarray, carry), logs


def _deal(table, settings, parts):
    """[B, P, n] int64 step numbers of P lanes in each of at most `parts` parts, -1 beyond a lane's end."""
    S = table.S
    if settings.reset == "never" or S == 0:
        return np.arange(S)[None, None]
    first = np.flatnonzero(table.start)
    length = np.diff(np.append(first, S))
    most = min(-(-S // int(length.max())), MAX_LANES)
    parts = min(parts, most)
    widths = [1 << k for k in range((most // parts).bit_length())]  # powers of two, for few compilations
    dealt = [_hands(length, parts * width) for width in widths]
    # A step takes its time for each lane, ended ones included, and about two lanes' time for itself.
    lanes = min(dealt, key=lambda hands: _longest(length, hands) * (len(hands) // parts + 2))
    out = np.full((len(lanes), _longest(length, lanes)), -1)
    for lane, requests in enumerate(lanes):
        steps = [np.arange(first[request], first[request] + length[request]) for request in requests]
        steps = np.concatenate(steps) if steps else np.zeros(0, np.int64)
        out[lane, : len(steps)] = steps
    return out.reshape(parts, -1, out.shape[1])


def _hands(length, lanes):
    """The requests of each lane, lists of indices into `length`: longest first, to the lane of fewest steps so far."""
    hands, load = [[] for _ in range(lanes)], [(0, lane) for lane in range(lanes)]
    for request in np.argsort(-length, kind="stable").tolist():
        steps, lane = load[0]
        hands[lane].append(request)
        heapq.heapreplace(load, (steps + int(length[request]), lane))
    return hands


def _longest(length, hands):
    """The steps of the longest lane."""
    return max(int(length[requests].sum()) for requests in hands)


def _steps(table, settings, clock):
    """What the loop reads of every step beside scores, by name: [S] or [S, L, ...]."""
    need = [_pack(table.need(s, min(s + 1024, table.S))) for s in range(0, table.S, 1024)]
    W = -(-table.E // 32)
    out = {
        "start": table.start,
        "phase": table.phase.astype(np.int32),
        "step": clock.astype(np.int32),
        "need": np.concatenate(need) if need else np.zeros((0, table.L, W), np.uint32),
    }
    return {**out, "order": _orders(table)} if settings.contract == "sequential" else out


def _inputs(table, policy, steps, part, width):
    """`steps` and the scores of steps `part` [P, n], step major, padded to `width`; a step of -1 needs nothing."""
    P, n = part.shape
    at, live = np.maximum(part.T, 0), part.T >= 0  # [n, P]
    xs = {}
    for name, values in steps.items():
        xs[name] = np.full((width, P, *values.shape[1:]), -1 if name == "order" else 0, values.dtype)
        xs[name][:n][live] = values[at[live]]
    if policy.uses_scores:
        scores = np.zeros((width, P, table.L, table.E), np.float32)
        for lane in range(P):  # consecutive steps of a lane are read in one go
            mine = part[lane][part[lane] >= 0]
            cuts = np.flatnonzero(np.diff(mine) != 1) + 1
            at = 0
            for run_ in np.split(mine, cuts) if len(mine) else ():
                scores[at : at + len(run_), lane] = table.scores(int(run_[0]), int(run_[-1]) + 1)
                at += len(run_)
        xs["scores"] = scores
    return xs


def _orders(table):
    """[S, L, M] int32: the experts of every event in the trace's order, filled up with -1."""
    listed = [[table.in_order(s, layer) for layer in range(table.L)] for s in range(table.S)]
    out = np.full((table.S, table.L, _most(table)), -1, np.int32)
    for s, layers in enumerate(listed):
        for layer, experts in enumerate(layers):
            out[s, layer, : len(experts)] = experts
    return out


def _most(table):
    """The most distinct experts an event can need: bounded by its rows, up to a power of two for few compilations."""
    rows = int(table.rows.max(initial=1))
    most = min(table.E, rows * table.K)
    return most if rows == 1 else min(table.E, 1 << (most - 1).bit_length())


def _ragged(table, settings):
    return settings.contract == "sequential" and bool((table.rows != 1).any())


def _pack(mask):
    """[..., E] bool -> [..., W] uint32, expert e in bit e % 32 of word e // 32."""
    E = mask.shape[-1]
    padded = np.zeros((*mask.shape[:-1], -(-E // 32) * 32), bool)
    padded[..., :E] = mask
    return np.ascontiguousarray(np.packbits(padded, axis=-1, bitorder="little")).view("<u4")


def _unpack(words, E):
    """The inverse of `_pack`."""
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")[..., :E].astype(bool)


def _events(table, lanes, logs, u, q):
    """The record of unit u, capacity q, in the trace's order."""
    log = _empty_log(table)
    log.need[:] = table.need(0, table.S).reshape(-1, table.E)
    shape = (table.S, table.L)
    for part, record in zip(lanes, logs, strict=True):
        lane, at = np.nonzero(part >= 0)
        for name, E in (("hit", table.E), ("admit", table.E), ("evictions", None)):
            values = record[name][at, lane, u, q]  # [steps, L, ...]
            values = values if E is None else _unpack(values, E)
            getattr(log, name).reshape(*shape, *values.shape[2:])[part[lane, at]] = values
    return log


# ------------------------------------------------------------------------------------------------------------ programs


def _digest(state):
    hashed = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        leaf = np.asarray(leaf)
        hashed.update(f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes())
    return hashed.digest()


def _form(policy, table, settings):
    """The shapes and dtypes of the policy's state: a tree of `jax.ShapeDtypeStruct`."""
    capacities, pool = settings.capacities, settings.scope == "global"
    state = fresh_state(policy, np, table.L, table.E, settings.seed, capacities, pool)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), np.asarray(leaf).dtype), state)


def _fingerprint(policy, table, settings, form):
    """What decides the compiled program: the text of the policy's functions, with the constants they hold.

    Policies that differ only in the state they start from (a table, a seed) have the same text, so they share a program
    and run side by side; a new instance of a known policy does not compile again.
    """
    L, E = table.L, table.E
    integer = jax.ShapeDtypeStruct((), np.int32)

    def functions(state, layer, need, scores, t, pairs, resident):
        seen = policy.observe(jnp, state, layer, need, scores, t)
        out = policy.priority(jnp, seen, pairs, pairs, t), policy.reset(jnp, state)
        return out, policy.commit(jnp, seen, layer, resident, t) if policy.in_cache else seen

    shapes = [((E,), bool), ((E,), np.float32), ((), np.int32), ((E,), np.int32), ((L, E), bool)]
    traced = jax.make_jaxpr(functions)(form, integer, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    text = f"{traced.jaxpr}|{policy.in_cache}|{policy.uses_scores}|{settings.scope}|{settings.contract}"
    return hashlib.sha256(f"{text}|{settings.reset}|{settings.events}|{L},{E}".encode()).digest() + _digest(
        traced.consts
    )


def _program(key, policy, settings):
    if key not in _programs:
        loop = partial(
            _loop,
            policy,
            in_pool=settings.scope == "global",
            contract=settings.contract,
            cold=settings.reset == "request",
            log=settings.events,
        )
        _programs[key] = jax.jit(loop, static_argnames=("E", "most", "ragged"))
    return _programs[key]


def _loop(policy, carry, initial, capacities, xs, n, *, E, most, ragged, in_pool, contract, cold, log):
    """The first `n` steps of all lanes: (carry, record by name, [width, P, U, Q, L, ...] each, empty without `log`).

    carry: policy states [P, U, ...], residents [P, U, Q, L, W], counts [P, U, Q, 2, L, 5]. initial: states [U, ...].
    capacities: [U, Q, L]. xs: step-major inputs of all lanes, see `_inputs`.
    """
    width, P, L, W = xs["need"].shape
    U, Q = capacities.shape[:2]
    access = partial(_access, policy, _pool_event if in_pool else _layer_event, E=E, L=L, most=most)
    if contract == "sequential":
        serve = partial(_serve_in_order, access, E=E, ragged=ragged)
    else:
        serve = partial(_serve, access, forced=contract == "atomic-forced-admit")
    # Policy states share an event, and lanes share the layer, so that rows of states are read and written as slices.
    # arguments: state, residents, layer, need, scores, order, t, capacity
    serve = jax.vmap(serve, in_axes=(0, 0, None, None, None, None, None, 0))
    serve = jax.vmap(serve, in_axes=(0, 0, None, 0, 0, 0, 0, None))
    told = jax.vmap(jax.vmap(partial(policy.reset, jnp)))

    def step(i, carry):
        states, residents, counts, record = carry
        x = {name: jax.lax.dynamic_index_in_dim(values, i, keepdims=False) for name, values in xs.items()}
        if cold:
            states = jax.tree.map(lambda old, new: _at(x["start"], new[None], old), states, initial)
            residents = _at(x["start"], jnp.zeros_like(residents), residents)
        else:
            states = jax.tree.map(lambda old, new: _at(x["start"], new, old), states, told(states))

        def serve_layer(inner, layer):
            def here(name, missing):
                return jax.lax.dynamic_index_in_dim(x[name], layer, 1, keepdims=False) if name in x else missing

            states, residents, *out = serve(
                *inner,
                layer,
                here("need", None),
                here("scores", jnp.zeros((P, E), jnp.float32)),
                here("order", jnp.zeros((P, 0), jnp.int32)),
                x["step"] * L + layer,
                jax.lax.dynamic_index_in_dim(capacities, layer, 2, keepdims=False),
            )
            return (states, residents), out

        (states, residents), out = jax.lax.scan(serve_layer, (states, residents), jnp.arange(L, dtype=jnp.int32))
        change, hit, admit = (jnp.moveaxis(values, 0, 3) for values in out)  # [P, U, Q, L, ...]
        in_phase = (x["phase"][:, None] == jnp.arange(2))[:, None, None, :, None, None]
        counts = counts + jnp.where(in_phase, change[:, :, :, None], 0)
        if log:
            new = {"hit": hit, "admit": admit, "evictions": change[..., EVICTIONS]}
            record = {name: jax.lax.dynamic_update_index_in_dim(record[name], new[name], i, 0) for name in record}
        return states, residents, counts, record

    record = {}
    if log:
        shape = (width, P, U, Q, L)
        record = {name: jnp.zeros((*shape, W), jnp.uint32) for name in ("hit", "admit")}
        record["evictions"] = jnp.zeros(shape, jnp.int32)
    *carry, record = jax.lax.fori_loop(0, n, step, (*carry, record))
    return tuple(carry), record


def _at(lanes, new, old):
    """`new` in the lanes [P] that are true, `old` elsewhere."""
    return jnp.where(lanes.reshape(-1, *(1,) * (old.ndim - 1)), new, old)


# -------------------------------------------------------------------------------------------------- one event, one lane


def _serve(access, state, residents, layer, need, scores, order, t, capacity, *, forced):
    """An atomic event: (state, residents, change [Q, 5] by `COUNTERS`, hit and admit [Q, W] words)."""
    del order
    state, residents, hit, evictions = access(state, residents, layer, need, scores, t, capacity, forced=forced)
    miss = need & ~hit
    admit = miss & _row(residents, layer, 1)
    misses = _count(miss)
    change = [_count(hit), misses, misses - _count(admit), evictions, (misses > 0).astype(jnp.int32)]
    return state, residents, jnp.stack(change, -1), hit, admit


def _serve_in_order(access, state, residents, layer, need, scores, order, t, capacity, *, ragged, E):
    """The experts of an event one after the other, each an event of its own; returns what `_serve` does."""
    W, Q = need.shape[0], capacity.shape[0]

    def one(place, carry):
        state, residents, hit, evictions = carry
        expert = order[place]
        bit = jnp.uint32(1) << (expert % 32).astype(jnp.uint32)
        alone = jnp.where((jnp.arange(W) == expert // 32) & (expert >= 0), bit, jnp.uint32(0))
        new, residents, hits, more = access(
            state, residents, layer, alone, scores, t * E + place, capacity, forced=True
        )
        if ragged:  # a place beyond the event's end is no event: the policy must not see it
            new = jax.tree.map(lambda after, before: jnp.where(expert >= 0, after, before), new, state)
        return new, residents, hit | hits, evictions + more

    nothing = jnp.zeros((Q, W), jnp.uint32), jnp.zeros((Q,), jnp.int32)
    state, residents, hit, evictions = jax.lax.fori_loop(0, order.shape[0], one, (state, residents, *nothing))
    miss = need & ~hit
    admit = miss & _row(residents, layer, 1)
    misses = _count(miss)
    change = [_count(hit), misses, jnp.zeros_like(misses), evictions, (misses > 0).astype(jnp.int32)]
    return state, residents, jnp.stack(change, -1), hit, admit


def _access(policy, event, state, residents, layer, need, scores, t, capacity, *, forced, E, L, most):
    """Observe, decide for every capacity, commit: (state, residents, hit [Q, W] words, evictions [Q])."""
    state = policy.observe(jnp, state, layer, _bools(need, E), scores, t)
    residents, hit, evictions = event(
        partial(policy.priority, jnp, state), residents, layer, need, t, capacity, forced=forced, E=E, L=L, most=most
    )
    if policy.in_cache:  # then Q = 1
        state = policy.commit(jnp, state, layer, _bools(residents[0], E), t)
    return state, residents, hit, evictions


def _layer_event(priority, residents, layer, need, t, capacity, *, forced, E, L, most):
    """Scope `layer`; residents [Q, L, W] words, need [W] words, capacity [Q]."""
    del L, most
    expert = jnp.arange(E, dtype=jnp.int32)
    key = _once(_retention_key(jnp, priority(jnp.full_like(expert, layer), expert, t), E))
    before = _before(key)
    later = jnp.asarray(_pack(np.arange(E)[None, :] > np.arange(E)[:, None]).T)  # [W, E]
    needed = _bools(need, E)

    def among(words, others):
        """int32 [E]: how many of `words` [W] each column of `others` [W, E] holds."""
        return _count(words[:, None] & others, axis=0)

    def decide(resident, capacity):
        hit, miss = need & resident, need & ~resident
        if forced:  # what is processed last stays: misses come after hits, each in ascending order
            rank = _count(need) + among(resident & ~need, before)
            last = jnp.where(_bools(miss, E), among(miss, later), _count(miss) + among(hit, later))
            rank = jnp.where(needed, last, rank)
        else:
            rank = among(resident | need, before)
        kept = _words(rank < capacity) & (resident | need)
        return kept, hit, _count(resident & ~kept)

    kept, hit, evictions = jax.vmap(decide)(_row(residents, layer, 1), capacity)
    return jax.lax.dynamic_update_index_in_dim(residents, kept, layer, 1), hit, evictions


def _before(key):
    """[W, E] words from `key` [E] int32: bit f of column e, if f stays rather than e.

    32 operations on whole rows, which XLA turns into vector instructions; of a reduction over f it makes scalar ones.
    """
    E = key.shape[0]
    expert, W = jnp.arange(E, dtype=jnp.int32), -(-E // 32)
    other = jnp.pad(key, (0, W * 32 - E), constant_values=ABSENT_KEY).reshape(W, 32, 1)
    first = jnp.arange(0, W * 32, 32, dtype=jnp.int32)[:, None]
    words = jnp.zeros((W, E), jnp.uint32)
    for bit in range(32):
        # Ties stay with the lower expert: as integers, other >= mine is other > mine - 1. No key is the lowest int32.
        words |= jnp.where(other[:, bit] > key - (first + bit < expert), jnp.uint32(1 << bit), jnp.uint32(0))
    return words


def _pool_event(priority, residents, layer, need, t, capacity, *, forced, E, L, most):
    """Scope `global`; residents [Q, L, W] words, need [W] words, capacity [Q]."""
    grid = jnp.arange(L * E, dtype=jnp.int32)
    key = _once(_retention_key(jnp, priority(grid // E, grid % E, t), L * E)).reshape(L, E)
    needed = _bools(need, E)

    def decide(resident, capacity):
        local = _row(resident, layer)
        hit, miss = need & local, need & ~local
        own = key
        if forced:
            first = _forced_key(jnp, _bools(hit, E), _bools(miss, E))
            own = jax.lax.dynamic_update_index_in_dim(key, jnp.where(needed, first, _row(key, layer)), layer, 0)
        candidate = jax.lax.dynamic_update_index_in_dim(resident, local | need, layer, 0)
        excess = jnp.maximum(_count(candidate.reshape(-1)) - capacity, 0)
        kept = candidate & ~_lowest(own, candidate, excess, most)
        return kept, hit, excess - _count(miss & ~_row(kept, layer))

    return jax.vmap(decide)(residents, capacity)


def _lowest(key, candidate, excess, most):
    """[L, W] words: the `excess` <= `most` candidates of lowest `key` [L, E] int32, ties from the highest index on.

    candidate: [L, W] words.
    """
    L, E = key.shape
    layers, experts = jnp.arange(L, dtype=jnp.int32), jnp.arange(E, dtype=jnp.int32)
    inside = _bools(candidate, E)
    if most <= FEW_DROPS:  # a tournament: of all rows the lowest key, then only rows that lost theirs again
        lowest = _once(jnp.min(jnp.where(inside, key, INT32_MAX), axis=1))  # [L]
        gone = jnp.zeros_like(candidate)
        for i in range(most):
            layer = jnp.max(jnp.where(lowest == jnp.min(lowest), layers, -1))
            row, left = _row(key, layer), _bools(_row(candidate, layer) & ~_row(gone, layer), E)
            expert = jnp.max(jnp.where(left & (row == jnp.min(lowest)), experts, -1))
            lowest = jnp.where(layers == layer, jnp.min(jnp.where(left & (experts != expert), row, INT32_MAX)), lowest)
            lowest, layer, expert = _once((lowest, layer, expert))
            gone |= jnp.where((layers == layer)[:, None] & (i < excess), _words(experts == expert), jnp.uint32(0))
        return gone

    def narrow(count_at, low, high, rounds):
        """The smallest value with count_at(value) >= 1, between low and high."""

        def half(_, bounds):
            low, high = bounds
            middle = (low & high) + ((low ^ high) >> 1)  # rounds down and does not overflow
            enough = count_at(middle)
            return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

        return jax.lax.fori_loop(0, rounds, half, (jnp.int32(low), jnp.int32(high)))[1]

    # The key up to which candidates leave, then the index from which those that tie with it do.
    index, n = layers[:, None] * E + experts, L * E
    edge = narrow(lambda v: jnp.sum(inside & (key <= v), dtype=jnp.int32) >= excess, ABSENT_KEY, INT32_MAX, 32)
    tied = inside & (key == edge)
    rest = excess - jnp.sum(inside & (key < edge), dtype=jnp.int32)
    back = narrow(lambda v: jnp.sum(tied & (index >= n - 1 - v), dtype=jnp.int32) >= rest, 0, n - 1, n.bit_length())
    leaves = (inside & (key < edge)) | (tied & (index >= n - 1 - back))
    return _words(leaves & (excess > 0))


def _once(values):
    """`values`, computed once: XLA would fuse them into each of their uses, and so compute them again for each."""
    return jax.lax.optimization_barrier(values)


def _row(array, layer, axis=0):
    """`array[layer]` along `axis`, for a traced layer that is in range."""
    return jax.lax.dynamic_index_in_dim(array, layer, axis, keepdims=False)


def _count(words, axis=-1):
    """int32 [...]: bits set in words, whose W words are along `axis`."""
    return jnp.sum(jax.lax.population_count(words), axis=axis, dtype=jnp.int32)


def _bools(words, E):
    """[..., E] bool from [..., W] words."""
    bits = words[..., None] >> jnp.arange(32, dtype=jnp.uint32) & 1  # [..., W, 32]
    return bits.reshape(*words.shape[:-1], -1)[..., :E] != 0


def _words(mask):
    """[..., W] uint32 words from [..., E] bool."""
    E = mask.shape[-1]
    W = -(-E // 32)
    mask = jnp.pad(mask, [*[(0, 0)] * (mask.ndim - 1), (0, W * 32 - E)]).reshape(*mask.shape[:-1], W, 32)
    return jnp.sum(
        jnp.where(mask, jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32), jnp.uint32(0)), axis=-1, dtype=jnp.uint32
    )
