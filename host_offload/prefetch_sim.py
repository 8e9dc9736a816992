"""Prefetch under a finite link: what a predictor saves in stall, and what it wastes in bytes.

The cache runs as in `simulate`: prefetch changes no hit, it only fetches ahead what would have missed. Prefetched rows
wait in a *reserve* of their own slots until their event, and leave it when they are used. The timeline of one event:

    1. the router has chosen; the link has worked on queued prefetches up to now
    2. missed experts that lie in the reserve cost nothing (on time); those in flight are waited for (late); the others
       are copied on demand, before all queued prefetches but after the copy that is in flight
    3. the predictor names experts for the layer `lead` ahead; those neither cached nor in the reserve are queued
    4. the layer computes for `layer_seconds`, and the next event begins

A copy is one row and takes `link.seconds(row_bytes)`; the link carries one at a time. A queued prefetch whose event
came before its copy began is cancelled and moves nothing. Shape letters: L MoE layers, E experts a layer.
"""

import collections
import dataclasses
from functools import partial

import numpy as np

from host_offload.cost_model import LinkCurve
from host_offload.plan import apply, plan_event
from host_offload.policy import fresh_state, get_policy
from host_offload.predictor import check_int, get_predictor
from host_offload.predictors.replay import replay_steps, trace_shape, upcoming
from host_offload.simulate import slot_capacities


@dataclasses.dataclass(frozen=True, eq=False)
class PrefetchResult:
    """Counts are rows (experts moved), times are seconds of the whole replay.

    policy, predictor: names ("none" without). steps: steps replayed. accesses, misses: of the cache, as without
    prefetch. issued: prefetches whose copy began. on_time, late: prefetches used, arrived or in flight when demanded.
    wasted: prefetches never used. harmful: prefetches that took the place of a row in the reserve which was demanded
    before they were used themselves. stall [L]: waiting for rows. stall_events: events that waited. compute_seconds,
    predict_seconds: the layers' and the predictor's time. link_seconds: the link was busy.
    """

    policy: str
    predictor: str
    lead: int
    row_bytes: int
    steps: int
    accesses: int
    misses: int
    issued: int
    on_time: int
    late: int
    harmful: int
    stall: np.ndarray
    stall_events: int
    compute_seconds: float
    predict_seconds: float
    link_seconds: float

    @property
    def useful(self):
        """Prefetches that were used: on time or late."""
        return self.on_time + self.late

    @property
    def wasted(self):
        """Prefetches that were never used."""
        return self.issued - self.useful

    @property
    def demand(self):
        """Rows copied on demand: misses that no prefetch covered."""
        return self.misses - self.useful

    @property
    def precision(self):
        """useful / issued; NaN if nothing was issued."""
        return self.useful / self.issued if self.issued else float("nan")

    @property
    def coverage(self):
        """Share of the misses that a prefetch served: useful / misses; NaN without misses."""
        return self.useful / self.misses if self.misses else float("nan")

    @property
    def timeliness(self):
        """Share of the useful prefetches that had arrived: on_time / useful; NaN if none was."""
        return self.on_time / self.useful if self.useful else float("nan")

    @property
    def bytes_moved(self):
        """Demand and prefetch together."""
        return (self.demand + self.issued) * self.row_bytes

    @property
    def stall_seconds(self):
        """Waiting for rows over the whole replay."""
        return float(self.stall.sum())

    @property
    def seconds(self):
        """Compute, stall and prediction."""
        return self.compute_seconds + self.stall_seconds + self.predict_seconds

    @property
    def stall_ms_per_step(self):
        """Milliseconds a step (batch 1: a token) waits for rows; NaN without steps."""
        return self.stall_seconds / self.steps * 1e3 if self.steps else float("nan")

    @property
    def link_utilisation(self):
        """Share of the time in which the link was busy; NaN if no time passed."""
        return self.link_seconds / self.seconds if self.seconds else float("nan")

    def to_dict(self):
        """Plain numbers for a table or JSON."""
        rows = ("issued", "useful", "on_time", "late", "wasted", "harmful", "demand")
        names = ("policy", "predictor", "lead", "row_bytes", "steps", "accesses", "misses", *rows)
        names += ("precision", "coverage", "timeliness", "bytes_moved", "stall_seconds", "stall_ms_per_step")
        names += ("stall_events", "compute_seconds", "predict_seconds", "link_seconds", "link_utilisation")
        sizes = {f"{name}_bytes": getattr(self, name) * self.row_bytes for name in rows}
        return {name: getattr(self, name) for name in names} | sizes | {"stall_per_layer": self.stall.tolist()}


def simulate_prefetch(
    trace,
    policy,
    predictor,
    *,
    link: LinkCurve,
    row_bytes,
    layer_seconds,
    slots_per_layer=None,
    slots=None,
    scope="layer",
    contract="atomic-bypass",
    reset="request",
    phase="decode",
    lead=1,
    reserve=None,
    budget_bytes=None,
    width=None,
    seed=0,
):
    """Replays `trace` with a cache policy and a predictor over a finite link.

    Args:
        trace, policy, slots_per_layer, slots, scope, contract, reset, phase, seed: as for `simulate`; contracts are
            the two atomic ones.
        predictor: name, class, instance (fitted if it needs to be), or None for no prefetch.
        link: `LinkCurve`; `CostModel.miss_link` gives a measured one.
        row_bytes: bytes of an expert.
        layer_seconds: time of a layer in which every expert hits, from its router to the next one's; a number or [L].
        lead: distance in layers of a prefetch, at most the predictor's `lead_layers`; beyond the last layer it reaches
            into the next step.
        reserve: slots for prefetched rows beside the cache's; None: E, enough for every row of a layer.
        budget_bytes: most bytes of prefetch that one event may queue; None: no limit. The predictor's own `byte_cap`
            holds as well.
        width: how many of the likeliest experts are looked at; those that are cached use none of the budget. None: K.

    Returns:
        `PrefetchResult`.

    Raises:
        ValueError: a bad value; the message names it.
    """
    L, E = trace_shape(trace)
    policy = get_policy(policy)
    predictor = None if predictor is None else get_predictor(predictor)
    if not isinstance(link, LinkCurve):
        raise ValueError(f"link: expected a host_offload.cost_model.LinkCurve, got {link!r}")
    if contract not in ("atomic-bypass", "atomic-forced-admit"):
        raise ValueError(f"contract: {contract!r} is neither 'atomic-bypass' nor 'atomic-forced-admit'")
    if scope not in ("layer", "global"):
        raise ValueError(f"scope: {scope!r} is neither 'layer' nor 'global'")
    if reset not in ("request", "never"):
        raise ValueError(f"reset: {reset!r} is neither 'request' nor 'never'")
    width, reserve = trace.header["K"] if width is None else width, E if reserve is None else reserve
    for name, value, low in (
        ("row_bytes", row_bytes, 1),
        ("lead", lead, 1),
        ("reserve", reserve, 0),
        ("width", width, 1),
    ):
        check_int(name, value, low)
    if predictor is not None and lead > min(predictor.lead_layers, L):
        raise ValueError(
            f"lead: {lead} layers, but predictor {predictor.name!r} has lead_layers {predictor.lead_layers} and a step "
            f"has {L} layers; lower it, or build the predictor with a larger lead_layers"
        )
    layer_seconds = np.asarray(layer_seconds, np.float64)
    if layer_seconds.shape not in ((), (L,)) or not ((layer_seconds >= 0) & np.isfinite(layer_seconds)).all():
        raise ValueError(f"layer_seconds: {layer_seconds} is neither a time of at least 0 nor {L} of them")
    layer_seconds = np.broadcast_to(layer_seconds, (L,))
    caps = [cap for cap in (budget_bytes, None if predictor is None else predictor.byte_cap) if cap is not None]
    for cap in caps:
        check_int("budget_bytes", cap, 0)
    most = min(cap // row_bytes for cap in caps) if caps else E

    cache = CacheRun(policy, L, E, slot_capacities(L, E, slots_per_layer, slots, scope), scope, contract, seed)
    lane = _Lane(float(link.seconds(row_bytes)), reserve)
    told = None if predictor is None else predictor.init(np, L, E, seed)
    now, predicting, event, accesses, misses = 0.0, 0.0, 0, 0, 0
    stall, stall_events, steps = np.zeros(L), 0, 0
    for step, after in _with_next(replay_steps(trace, phase, () if predictor is None else predictor.reads)):
        steps += 1
        if step.start:
            if reset == "request":
                cache.clear()
                lane.clear()
            else:
                cache.begin_request()
            told = None if predictor is None else predictor.reset(np, told)
        later = None if after is None or (after.start and reset == "request") else after.recorded
        for layer in range(L):
            t = np.int32(step.number * L + layer)
            need = step.need[layer]
            missing = np.flatnonzero(cache.serve(layer, need, step.scores[layer], t)) + layer * E
            accesses += int(np.count_nonzero(need))
            misses += len(missing)
            ready = lane.serve(missing.tolist(), now, event)
            stall[layer] += ready - now
            stall_events += ready > now
            if predictor is not None:
                recorded = upcoming(step.recorded, later, layer)
                told = predictor.observe(np, told, layer, need, step.scores[layer], t, recorded)
                target = (layer + lead) % L
                scores = predictor.predict(np, told, layer, target)
                likely = np.argsort(-scores, kind="stable")[:width]
                likely = likely[(scores[likely] > -np.inf) & ~cache.resident(target)[likely]]
                seconds = predictor.cost_us * 1e-6
                lane.request((likely + target * E).tolist(), most, now + seconds, event, event + lead)
                predicting += seconds
                ready += seconds
            now = ready + layer_seconds[layer]
            event += 1
    return PrefetchResult(
        policy=policy.name,
        predictor="none" if predictor is None else predictor.name,
        lead=lead,
        row_bytes=row_bytes,
        steps=steps,
        accesses=accesses,
        misses=misses,
        issued=lane.issued,
        on_time=lane.on_time,
        late=lane.late,
        harmful=lane.harmful,
        stall=stall,
        stall_events=stall_events,
        compute_seconds=float(layer_seconds.sum() * steps),
        predict_seconds=predicting,
        link_seconds=lane.busy,
    )


class CacheRun:
    """The cache of `simulate`, event by event, with its residents in view."""

    def __init__(self, policy, L, E, capacities, scope, contract, seed):
        self._policy, self._capacities, self._seed = policy, capacities, seed
        self._global, self._forced = scope == "global", contract == "atomic-forced-admit"
        self._shape = L, E
        self.clear()

    def clear(self):
        """Empty, with a fresh policy."""
        L, E = self._shape
        total = int(self._capacities[0] if self._global else self._capacities.sum())
        self._slot_of, self._owner = np.full((L, E), -1, np.int32), np.full(total + E, -1, np.int32)
        self._state = fresh_state(self._policy, np, L, E, self._seed, self._capacities, self._global)

    def begin_request(self):
        """Tells the policy and keeps the content."""
        self._state = self._policy.reset(np, self._state)

    def resident(self, layer):
        """[E] bool."""
        return self._slot_of[layer] >= 0

    def serve(self, layer, need, scores, t):
        """One event: [E] bool, its misses."""
        policy = self._policy
        self._state = policy.observe(np, self._state, layer, need, scores, t)
        plan = plan_event(
            np,
            need=need,
            slot_of=self._slot_of,
            owner=self._owner,
            priority=partial(policy.priority, np, self._state),
            layer=layer,
            capacity=int(self._capacities[layer]),
            global_scope=self._global,
            forced_admit=self._forced,
            t=t,
        )
        apply(np, plan, self._slot_of, self._owner)
        if policy.in_cache:
            self._state = policy.commit(np, self._state, layer, self._slot_of >= 0, t)
        return plan.miss


@dataclasses.dataclass(eq=False)
class _Fetch:
    """A prefetch: its row, the event it is for, when it was queued; `arrival` once its copy has begun."""

    row: int
    deadline: int
    queued: float
    arrival: float | None = None
    used: bool = False


class _Lane:
    """The link, its queue and the reserve. A prefetch holds its place in the reserve from the time it is queued."""

    def __init__(self, copy_seconds, places):
        self._copy, self._places = copy_seconds, places
        self._free = 0.0  # when the link has done all copies that have begun
        self._queue = collections.deque()
        self._held = {}  # row -> _Fetch
        self._evicted_by = {}  # row -> the _Fetch that took its place
        self.issued = self.on_time = self.late = self.harmful = 0
        self.busy = 0.0

    def clear(self):
        """Forgets queue and reserve; a copy in flight still occupies the link."""
        self._queue.clear()
        self._held.clear()
        self._evicted_by.clear()

    def serve(self, rows, now, event):
        """Provides the missing `rows` of `event`, which begins at `now`; returns when the last one is there."""
        self._advance(now)
        ready, demanded = now, []
        for row in rows:
            fetch = self._held.pop(row, None)
            if fetch is not None and fetch.arrival is not None:
                fetch.used = True
                if fetch.arrival <= now:
                    self.on_time += 1
                else:
                    self.late += 1
                    ready = max(ready, fetch.arrival)
                continue
            demanded.append(row)
            taker = self._evicted_by.pop(row, None)
            if taker is not None and taker.arrival is not None and not taker.used:
                self.harmful += 1
        for _ in demanded:
            ready = max(ready, self._start(now))
        # What is queued for this event or an earlier one has come too late.
        self._held = {
            row: fetch for row, fetch in self._held.items() if fetch.arrival is not None or fetch.deadline > event
        }
        self._queue = collections.deque(fetch for fetch in self._queue if self._held.get(fetch.row) is fetch)
        return ready

    def request(self, rows, most, when, event, deadline):
        """Queues up to `most` of `rows` (likeliest first) that are not held, as far as the reserve has room."""
        for row in rows:
            if row in self._held:
                self._held[row].deadline = max(self._held[row].deadline, deadline)
                continue
            if most == 0:
                break
            fetch = _Fetch(row, deadline, when)
            if not self._make_room(fetch, when, event):
                break
            most -= 1
            self._held[row] = fetch
            self._evicted_by.pop(row, None)
            self._queue.append(fetch)

    def _make_room(self, fetch, now, event):
        """Frees a place for `fetch`: of an arrived row whose event is over (oldest first), else of one needed later."""
        if len(self._held) < self._places:
            return True
        arrived = [held for held in self._held.values() if held.arrival is not None and held.arrival <= now]
        over = [held for held in arrived if held.deadline <= event]
        later = [held for held in arrived if held.deadline > fetch.deadline]
        if over:
            victim = min(over, key=lambda held: held.deadline)
        elif later:
            victim = max(later, key=lambda held: held.deadline)
        else:
            return False
        del self._held[victim.row]
        self._evicted_by[victim.row] = fetch
        return True

    def _advance(self, now):
        """Begins the queued copies that the link came to before `now`."""
        while self._queue and max(self._free, self._queue[0].queued) < now:
            fetch = self._queue.popleft()
            fetch.arrival = self._start(fetch.queued)
            self.issued += 1

    def _start(self, earliest):
        """One copy as soon as the link is free; returns when it arrives."""
        self._free = max(self._free, earliest) + self._copy
        self.busy += self._copy
        return self._free


def _with_next(items):
    """Yields (item, the one after it or None)."""
    items = iter(items)
    current = next(items, None)
    for following in items:
        yield current, following
        current = following
    if current is not None:
        yield current, None
