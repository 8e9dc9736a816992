"""Replays a routing trace against a cache policy: how often would each expert have been in a slot?

One event is one (step, MoE layer) with the distinct experts of all rows of that step. The NumPy back end drives the
engine's own `plan_event` and is the reference; the JAX back end (`simulate_jax.py`) runs many requests, capacities and
seeds side by side and decides alike, event by event. Shape letters: T rows, L MoE layers, E experts a layer, S steps.
"""

import copy
import dataclasses
from functools import partial
from typing import Any

import numpy as np

from host_offload.capacity import resolve_slots
from host_offload.plan import apply, plan_event
from host_offload.policy import fresh_state, get_policy
from host_offload.trace import CONTRACTS, PHASES, SCOPES, Trace

RESETS = ("request", "never")
BACKENDS = ("jax", "numpy")
COUNTERS = ("hits", "misses", "bypasses", "evictions", "miss_events", "lookups")
HITS, MISSES, BYPASSES, EVICTIONS, MISS_EVENTS, LOOKUPS = range(len(COUNTERS))


@dataclasses.dataclass(eq=False)
class Events:
    """What happened event by event, in order; n = S * L events, layers of a step adjacent.

    step, layer: [n] int32. need, hit, admit: [n, E] bool: the experts needed, those that were in a slot when the event
    began, and the misses that had a slot when it ended. evictions: [n] int32.
    """

    step: np.ndarray
    layer: np.ndarray
    need: np.ndarray
    hit: np.ndarray
    admit: np.ndarray
    evictions: np.ndarray

    @property
    def miss(self):
        """[n, E] bool: needed and moved, kept or bypassed."""
        return self.need & ~self.hit


@dataclasses.dataclass(eq=False)
class CacheState:
    """Where a run ended: resident [L, E] bool, the policy's state (NumPy), and the last step of its clock."""

    resident: np.ndarray
    policy: Any
    step: int


@dataclasses.dataclass(eq=False)
class Result:
    """Counts of one replay.

    policy: its name. capacities: [L] int32, slots of each layer, or the pool's total, L times, in scope `global`.
    contract: what the figures depend on (the reporting block of arXiv 2608.07911): contract, ties, reset, scope, quota,
    seed, dedup, scores, phase, warm. counters: [2, L, 6] int64, by phase (0 prefill, 1 decode; a step that holds rows
    of both counts as prefill), layer and `COUNTERS`. tokens, steps: [2] int64 rows and steps by phase. row_bytes:
    bytes of one expert or None. events: per-event record or None. state: the end of the run, to
    continue from; None with reset "request", which nothing continues.
    """

    policy: str
    capacities: np.ndarray
    contract: dict
    counters: np.ndarray
    tokens: np.ndarray
    steps: np.ndarray
    row_bytes: int | None = None
    events: Events | None = None
    state: CacheState | None = None

    def _total(self, index):
        return int(self.counters[..., index].sum())

    @property
    def hits(self):
        """Needed experts that were in a slot when their event began."""
        return self._total(HITS)

    @property
    def misses(self):
        """Needed experts that had to be moved, bypassed ones included."""
        return self._total(MISSES)

    @property
    def accesses(self):
        """Distinct experts needed, summed over events: hits + misses."""
        return self.hits + self.misses

    @property
    def lookups(self):
        """Experts asked for before duplicates within an event are merged: rows * K * L."""
        return self._total(LOOKUPS)

    @property
    def bypasses(self):
        """Misses that were used and not kept."""
        return self._total(BYPASSES)

    @property
    def evictions(self):
        """Residents that left."""
        return self._total(EVICTIONS)

    @property
    def miss_events(self):
        """Events with at least one miss."""
        return self._total(MISS_EVENTS)

    @property
    def hit_rate(self):
        """hits / accesses, NaN for a trace without events."""
        return self.hits / self.accesses if self.accesses else float("nan")

    @property
    def bytes_moved(self):
        """Bytes moved to the device: misses * row_bytes; None without `row_bytes`."""
        return None if self.row_bytes is None else self.misses * self.row_bytes

    @property
    def per_layer(self):
        """The counts of each layer over both phases: name -> [L] int64, and hit_rate [L] float64."""
        return _named(self.counters.sum(axis=0))

    def in_phase(self, phase):
        """The same counts of one phase, "prefill" or "decode": name -> int, with tokens, steps, hit_rate."""
        if phase not in PHASES:
            raise ValueError(f"phase: {phase!r} is neither 'prefill' nor 'decode'")
        index = PHASES[phase]
        totals = {name: value.item() for name, value in _named(self.counters[index].sum(axis=0)).items()}
        return {"tokens": int(self.tokens[index]), "steps": int(self.steps[index]), **totals}

    def to_dict(self):
        """Plain numbers for a table or JSON: totals, phases, per-layer lists, capacities and the contract block."""
        names = ("hits", "misses", "miss_events", "accesses", "lookups", "bypasses", "evictions")
        names += ("hit_rate", "bytes_moved")
        return {
            "policy": self.policy,
            **{name: getattr(self, name) for name in names},
            "row_bytes": self.row_bytes,
            "capacities": self.capacities.tolist(),
            "phases": {phase: self.in_phase(phase) for phase in PHASES},
            "per_layer": {name: values.tolist() for name, values in self.per_layer.items()},
            "contract": self.contract,
        }


def _named(counters):
    """counters [..., 6] -> name -> [...] with accesses and hit_rate."""
    named = {name: counters[..., index] for index, name in enumerate(COUNTERS)}
    named["accesses"] = named["hits"] + named["misses"]
    with np.errstate(invalid="ignore"):
        named["hit_rate"] = np.true_divide(named["hits"], named["accesses"])
    return named


class EventTable:
    """A trace as steps: the rows of each step, and where a request begins that finds no other one running.

    step: [S] int32, rising. phase: [S] uint8, 0 if any row is prefill. rows: [S] int64. start: [S] bool.
    """

    def __init__(self, trace: Trace, phase=None):
        header = trace.header
        self.L, self.E, self.K = len(header["moe_layers"]), header["E"], header["K"]
        if phase is not None and phase not in PHASES:
            raise ValueError(f"phase: expected None, 'prefill' or 'decode', got {phase!r}")
        kept = np.arange(len(trace.step)) if phase is None else np.flatnonzero(trace.phase == PHASES[phase])
        order = kept[np.argsort(trace.step[kept], kind="stable")]
        self._experts = trace.experts[order]
        self._weights = trace.weights[order]
        self._scores = None if trace.scores is None else trace.scores[order]
        step, request = trace.step[order], trace.request[order]
        first = np.flatnonzero(np.diff(step, prepend=-1)) if len(step) else np.zeros(0, np.int64)
        self._bounds = np.append(first, len(step))
        self.step = step[first].astype(np.int32)
        self.rows = np.diff(self._bounds)
        self.phase = (
            np.minimum.reduceat(trace.phase[order], first).astype(np.uint8) if len(first) else np.zeros(0, np.uint8)
        )
        self.start = self._request_starts(request)

    @property
    def S(self):
        """Steps."""
        return len(self.step)

    def _request_starts(self, request):
        """[S] bool: a request begins and every earlier one has ended, so a batch begins once, at its first step."""
        index = np.repeat(np.arange(self.S), self.rows)
        ids, number = np.unique(request, return_inverse=True)
        begin = np.full(len(ids), self.S)
        np.minimum.at(begin, number, index)
        end = np.zeros(len(ids), np.int64)
        np.maximum.at(end, number, index)
        # running[s]: requests that have rows both before step s and at or after it.
        change = np.zeros(self.S + 1, np.int64)
        np.add.at(change, begin + 1, 1)
        np.add.at(change, end + 1, -1)
        return np.cumsum(change)[: self.S] == 0

    def need(self, low, high):
        """[high - low, L, E] bool: the distinct experts of each event of these steps."""
        a, b = self._bounds[low], self._bounds[high]
        out = np.zeros((high - low, self.L, self.E), bool)
        at = np.repeat(np.arange(high - low), self.rows[low:high])
        out[at[:, None, None], np.arange(self.L)[:, None], self._experts[a:b]] = True
        return out

    def scores(self, low, high):
        """[high - low, L, E] float32: router scores summed over each step's rows; see `score_source`."""
        a, b = self._bounds[low], self._bounds[high]
        out = np.zeros((high - low, self.L, self.E), np.float32)
        at = np.repeat(np.arange(high - low), self.rows[low:high])
        if self._scores is not None:
            np.add.at(out, at, self._scores[a:b].astype(np.float32))
        else:
            place = at[:, None, None], np.arange(self.L)[:, None], self._experts[a:b]
            np.add.at(out, place, self._weights[a:b].astype(np.float32))
        return out

    @property
    def score_source(self):
        """Where `scores` come from: the trace's scores, or only the weights of the chosen experts, 0 elsewhere."""
        return "weights of the chosen experts" if self._scores is None else "scores of the trace"

    def in_order(self, index, layer):
        """The distinct experts of one event in the trace's order: rows as recorded, each by falling weight."""
        listed = self._experts[self._bounds[index] : self._bounds[index + 1], layer].reshape(-1)
        return list(dict.fromkeys(listed.tolist()))


def simulate(
    trace,
    policy,
    *,
    slots_per_layer=None,
    slots=None,
    scope="layer",
    contract="atomic-bypass",
    reset="request",
    warm=None,
    phase=None,
    row_bytes=None,
    seed=0,
    events=False,
    backend="jax",
):
    """Replays `trace` with one policy and one cache size.

    Args:
        trace: a `Trace`. Rows that share a step are one batch: an event needs the union of their experts.
        policy: a registered name, a `Policy` class or instance.
        slots_per_layer: slots of each layer, one number or L of them; a number times L is the total in scope `global`.
        slots: slots of all layers together, divided as the engine divides them. Exactly one of the two is given.
        scope: "layer", each layer has its own slots, or "global", all layers compete for one pool.
        contract: "atomic-bypass", "atomic-forced-admit", or "sequential": the experts of an event one after the other
            in the trace's order, each admitted before the next is looked up. There each access is its own event, with
            the clock t = (step * L + layer) * E + place, and the event's scores are observed with each.
        reset: "request": an empty cache and a fresh policy whenever a request begins while no other one runs. "never":
            the cache stays and the policy is told (`Policy.reset`), as in the live engine.
        warm: None, a `Result` whose end to continue from, or "warm": replay the trace once without counting. Needs
            `reset="never"`. If the trace's steps do not continue the earlier ones, they are numbered on.
        phase: "prefill" or "decode" leaves out the other phase's rows.
        row_bytes: bytes of an expert, for `bytes_moved`.
        seed: handed to `Policy.init`.
        events: keep the per-event record.
        backend: "jax", compiled, or "numpy", plain and slow. Both decide alike.

    Returns:
        A `Result`.

    Raises:
        ValueError: a bad value; the message names it and what would do.
    """
    policy, plan, table, start = _prepare(
        trace, policy, slots_per_layer, slots, scope, contract, reset, warm, phase, row_bytes, seed, events, backend
    )
    run = _run_numpy if backend == "numpy" else _run_jax
    if warm == "warm" and table.S:
        start = run(table, policy, dataclasses.replace(plan, events=False), None).state
    return run(table, policy, plan, start)


def simulate_many(
    trace,
    policies,
    capacities,
    seeds=(0,),
    *,
    scope="layer",
    contract="atomic-bypass",
    reset="request",
    phase=None,
    row_bytes=None,
    events=False,
    backend="jax",
):
    """Replays `trace` with every policy at every capacity and seed; returns a flat list of `Result`, seeds innermost.

    The compiled back end reads the trace once a policy: capacities run side by side, and so do seeds and those policies
    of one kind that differ only in the state they start from. Policies are spread over the processor's cores; one that
    is `host_only` is replayed by the NumPy back end.

    Args:
        policies: names, classes or instances of policies.
        capacities: what `simulate` takes as `slots_per_layer`, one entry a cache size.
        seeds: integers handed to `Policy.init`.
        scope, contract, reset, phase, row_bytes, events, backend: as in `simulate`.

    Raises:
        ValueError: as `simulate`, and for an empty list.
    """
    policies = [get_policy(policy) for policy in policies]
    capacities, seeds = list(capacities), list(seeds)
    for name, values in (("policies", policies), ("capacities", capacities), ("seeds", seeds)):
        if not values:
            raise ValueError(f"{name}: expected at least one")
    table, jobs = None, []
    for policy in policies:
        on_host = backend == "jax" and policy.host_only
        for slots_per_layer in capacities:
            for seed in seeds:
                job = _prepare(
                    trace if table is None else table,
                    policy,
                    slots_per_layer,
                    None,
                    scope,
                    contract,
                    reset,
                    None,
                    phase,
                    row_bytes,
                    seed,
                    events,
                    "numpy" if on_host else backend,
                )
                table = job[2]
                jobs.append((policy, job[1], on_host or backend == "numpy"))
    compiled = iter(_run_jax_many(table, [job[:2] for job in jobs if not job[2]]))
    return [_run_numpy(table, job[0], job[1], None) if job[2] else next(compiled) for job in jobs]


@dataclasses.dataclass(frozen=True, eq=False)
class Replay:
    """The settings of one run, checked."""

    capacities: np.ndarray
    scope: str
    contract: str
    reset: str
    seed: int
    events: bool
    row_bytes: int | None
    block: dict


def _prepare(
    trace, policy, slots_per_layer, slots, scope, contract, reset, warm, phase, row_bytes, seed, events, backend
):
    policy = get_policy(policy)
    if backend == "jax" and policy.host_only:
        raise ValueError(f"backend: policy {policy.name!r} runs on the host only; pass backend='numpy'")
    if not isinstance(trace, Trace | EventTable):
        raise ValueError(
            f"trace: expected a host_offload.trace.Trace, got {type(trace).__name__}; Trace.load reads one"
        )
    for name, value, known in (
        ("scope", scope, SCOPES),
        ("contract", contract, CONTRACTS),
        ("reset", reset, RESETS),
        ("backend", backend, BACKENDS),
    ):
        if value not in known:
            raise ValueError(f"{name}: {value!r} is none of {', '.join(map(repr, known))}")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise ValueError(f"seed: {seed!r} is not an integer")
    if row_bytes is not None and (isinstance(row_bytes, bool) or not isinstance(row_bytes, int) or row_bytes < 1):
        raise ValueError(f"row_bytes: {row_bytes!r} is not an integer of at least 1")
    table = trace if isinstance(trace, EventTable) else EventTable(trace, phase)
    capacities = slot_capacities(table.L, table.E, slots_per_layer, slots, scope)
    start = None
    if warm is not None:
        if reset != "never":
            raise ValueError(f"warm: reset={reset!r} empties the cache at each request; pass reset='never'")
        if isinstance(warm, Result):
            start = warm.state
            _check_continues(warm, policy, capacities, scope, contract, table)
        elif not isinstance(warm, str) or warm != "warm":
            raise ValueError(f"warm: {warm!r} is neither None, 'warm' nor a Result of simulate()")
    block = {
        "contract": contract,
        "ties": "higher layer * E + expert leaves first",
        "reset": reset,
        "scope": scope,
        "quota": capacities[:1].tolist() if scope == "global" else capacities.tolist(),
        "seed": int(seed),
        "dedup": "distinct experts of an event",
        "scores": table.score_source if policy.uses_scores else "not used by the policy",
        "phase": phase or "prefill and decode",
        "warm": warm is not None,
    }
    settings = Replay(capacities, scope, contract, reset, int(seed), bool(events), row_bytes, block)
    return policy, settings, table, start


def slot_capacities(L, E, slots_per_layer=None, slots=None, scope="layer"):
    """[L] int32 as `plan_event` takes it, from exactly one of `slots_per_layer` and `slots`; see `simulate`.

    Raises ValueError for none or both, or for numbers that the layers cannot hold.
    """
    if (slots_per_layer is None) == (slots is None):
        raise ValueError(
            f"give exactly one of slots_per_layer and slots, got slots_per_layer={slots_per_layer}, slots={slots}"
        )
    wanted = slots
    if slots_per_layer is not None:
        if isinstance(slots_per_layer, int | np.integer) and not isinstance(slots_per_layer, bool):
            if not 1 <= slots_per_layer <= E:
                raise ValueError(f"slots_per_layer: {slots_per_layer} is outside 1..{E}, the experts of a layer")
            wanted = int(slots_per_layer) * L
        elif isinstance(slots_per_layer, list | tuple | np.ndarray):
            wanted = [int(n) if isinstance(n, np.integer) else n for n in slots_per_layer]
        else:
            raise ValueError(f"slots_per_layer: {slots_per_layer!r} is neither an integer nor a list of L integers")
    elif isinstance(slots, bool) or not isinstance(slots, int | np.integer):
        raise ValueError(f"slots: {slots!r} is not an integer; quotas go into slots_per_layer")
    return resolve_slots(L=L, E=E, row_bytes=1, expert_slots=wanted, scope=scope).capacities


def _check_continues(result, policy, capacities, scope, contract, table):
    if result.state is None:
        raise ValueError("warm: this Result holds no end state; use one of simulate(..., reset='never')")
    if result.state.resident.shape != (table.L, table.E):
        raise ValueError(
            f"warm: the earlier run had [L, E] = {result.state.resident.shape}, this trace {(table.L, table.E)}"
        )
    same = {"policy": (result.policy, policy.name), "scope": (result.contract["scope"], scope)}
    same["contract"] = (result.contract["contract"], contract)
    same["slots"] = (result.capacities.tolist(), capacities.tolist())
    for name, (before, now) in same.items():
        if before != now:
            raise ValueError(f"warm: the earlier run had {name} {before!r}, this one {now!r}; they must agree")


def _clock(table, settings, start):
    """[S] int64 steps of the event clock; numbered on from `start` where the trace does not continue it."""
    steps = table.step.astype(np.int64)
    if start is not None and table.S and steps[0] <= start.step:
        steps = steps - steps[0] + start.step + 1
    unit = table.L * (table.E if settings.contract == "sequential" else 1)
    if table.S and (steps[-1] + 1) * unit > 2**31 - 1:
        raise ValueError(
            f"trace: step {steps[-1]} is beyond the int32 event clock ({unit} ticks a step); split or renumber it"
        )
    return steps


def _result(table, policy, settings, counters, events, state):
    by_phase = [np.bincount(table.phase, weights, minlength=2).astype(np.int64) for weights in (table.rows, None)]
    return Result(
        policy.name, settings.capacities, settings.block, counters, *by_phase, settings.row_bytes, events, state
    )


# ------------------------------------------------------------------------------------------------------- NumPy back end


def _run_numpy(table, policy, settings, start):
    L, E = table.L, table.E
    clock = _clock(table, settings, start)
    capacities, global_scope = settings.capacities, settings.scope == "global"
    n_slots = int(capacities[0] if global_scope else capacities.sum())
    counters = np.zeros((2, L, len(COUNTERS)), np.int64)
    log = _empty_log(table) if settings.events else None

    def fresh():
        empty = np.full((L, E), -1, np.int32), np.full(n_slots + E, -1, np.int32)
        return *empty, fresh_state(policy, np, L, E, settings.seed, capacities, global_scope)

    def serve(layer, need, scores, t, forced_admit):
        """One event: its plan, applied."""
        nonlocal state
        state = policy.observe(np, state, layer, need, scores, np.int32(t))
        plan = plan_event(
            np,
            need=need,
            slot_of=slot_of,
            owner=owner,
            priority=partial(policy.priority, np, state),
            layer=layer,
            capacity=int(capacities[layer]),
            global_scope=global_scope,
            forced_admit=forced_admit,
            t=np.int32(t),
        )
        apply(np, plan, slot_of, owner)
        if policy.in_cache:
            state = policy.commit(np, state, layer, slot_of >= 0, np.int32(t))
        return plan

    slot_of, owner, state = fresh()
    if start is not None:
        ids = np.flatnonzero(start.resident)
        owner[: len(ids)] = ids
        slot_of[start.resident] = np.arange(len(ids))
        state = copy.deepcopy(start.policy)  # updated in place
    no_scores = np.zeros(E, np.float32)
    for s in range(table.S):
        if table.start[s]:
            if settings.reset == "request":
                slot_of, owner, state = fresh()
            else:
                state = policy.reset(np, state)
        needed = table.need(s, s + 1)[0]
        scores = table.scores(s, s + 1)[0] if policy.uses_scores else None
        for layer in range(L):
            t = int(clock[s]) * L + layer
            need, seen = needed[layer], no_scores if scores is None else scores[layer]
            if settings.contract == "sequential":
                hit, evicted = np.zeros(E, bool), 0
                for place, expert in enumerate(table.in_order(s, layer)):
                    plan = serve(layer, np.arange(E) == expert, seen, t * E + place, True)
                    hit |= plan.hit
                    evicted += int(plan.n_evicted)
                miss, bypassed = need & ~hit, 0
                admit = miss & (slot_of[layer] >= 0)
            else:
                plan = serve(layer, need, seen, t, settings.contract == "atomic-forced-admit")
                hit, miss, admit, evicted = plan.hit, plan.miss, plan.admit, int(plan.n_evicted)
                bypassed = np.count_nonzero(plan.bypass)
            lookups = table.rows[s] * table.K
            counters[table.phase[s], layer] += (
                np.count_nonzero(hit),
                np.count_nonzero(miss),
                bypassed,
                evicted,
                miss.any(),
                lookups,
            )
            if log is not None:
                event = s * L + layer
                log.need[event], log.hit[event], log.admit[event], log.evictions[event] = need, hit, admit, evicted
    last = int(clock[-1]) if table.S else (-1 if start is None else start.step)
    end = CacheState(slot_of >= 0, state, last) if settings.reset == "never" else None
    return _result(table, policy, settings, counters, log, end)


def _empty_log(table):
    n, E = table.S * table.L, table.E
    masks = [np.zeros((n, E), bool) for _ in range(3)]
    return Events(
        np.repeat(table.step, table.L),
        np.tile(np.arange(table.L, dtype=np.int32), table.S),
        *masks,
        np.zeros(n, np.int32),
    )


def _run_jax(table, policy, settings, start):
    return _run_jax_many(table, [(policy, settings)], start)[0]


def _run_jax_many(table, jobs, start=None):
    if not jobs:
        return []
    from host_offload.simulate_jax import run_many  # only here is jax needed

    return run_many(table, jobs, start)
