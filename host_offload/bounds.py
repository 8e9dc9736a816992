"""What no policy can beat: optimal replacement over a trace, its best division into layers, and oracle prefetch.

An event is one (step, MoE layer) with the set of experts E it needs; C is the cache when it begins. With equal sizes
the fewest misses come from keeping, at each event, those of C and E whose next use is nearest (Belady, 1966). Between
two uses an expert is either kept throughout, which saves a miss, or not at all; at most c such intervals may overlap,
and choosing as many as possible is the largest c-colourable set of intervals, which the nearest end solves (Carlisle
and Lloyd, 1995). Requests of an event are a set, so the argument needs the contract `atomic-bypass`: an expert may be
used without being kept. Under `atomic-forced-admit` E stays and the nearest next use decides about the rest.

All capacities share one pass: the optimum keeps at c slots a subset of what it keeps at c + 1 (a stack algorithm,
Mattson et al., 1970), so experts lie in a stack whose first c entries are the cache of c slots. Shape letters: L MoE
layers, E experts a layer, S steps; here an event's clock is its place in the trace, `step index * L + layer`.
"""

import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np

from host_offload.simulate import COUNTERS, RESETS, Events, EventTable, Result, slot_capacities
from host_offload.trace import SCOPES, Trace

CONTRACTS = ("atomic-bypass", "atomic-forced-admit")
MASK_BYTES = 2**26  # of the [steps, L, E] mask, while accesses are listed some steps at a time


def belady(
    trace,
    *,
    slots_per_layer=None,
    slots=None,
    scope="layer",
    contract="atomic-bypass",
    reset="request",
    phase=None,
    row_bytes=None,
    events=False,
):
    """Returns the optimum as a `simulate.Result`: the replay that keeps the experts with the nearest next use.

    Arguments mean what they mean in `simulate`. Ties (experts that are next needed by the same event, or never again)
    keep the lower `layer * E + expert`; they change bypasses and evictions, never hits. Under `atomic-bypass` no policy
    under any contract has more hits in this scope. Under `atomic-forced-admit` the same is true among policies of that
    contract if no event needs more experts than there are slots; otherwise which of an event's experts stay is the
    contract's choice, and the result is the nearest-next-use rule under it, not a proven optimum.

    Raises ValueError for a bad value, naming it.
    """
    uses, capacities = _prepare(trace, scope, contract, reset, phase, slots_per_layer, slots)
    if row_bytes is not None and (isinstance(row_bytes, bool) or not isinstance(row_bytes, int) or row_bytes < 1):
        raise ValueError(f"row_bytes: {row_bytes!r} is not an integer of at least 1")
    lanes = _Lanes.of(uses, scope)
    depth = min(int(capacities.max()), uses.blocks)
    place = np.arange(depth)[:, None]
    quota = capacities[lanes.first % uses.L].astype(np.int64)
    resident = np.zeros(len(quota), np.int64)
    overflow = np.zeros(uses.n_events, np.int64)
    hit_codes, kept_codes = [], []
    for event, at, lane, old, new, stack in _replay(uses, lanes, depth, contract, quota):
        n = len(event)
        inside = at < quota[lane]
        lane = lane[inside]
        hit_codes.append(event[lane] * uses.E + old[inside] % uses.E)
        held = resident[:n] + uses.size[event] - np.bincount(lane, minlength=n)
        overflow[event] = np.maximum(held - quota[:n], 0)
        resident[:n] = np.minimum(held, quota[:n])
        cached = np.where(place < quota[:n], stack, -1)
        for key in new:
            stays = (cached == key).any(0) & (key != uses.empty)
            kept_codes.append(event[stays] * uses.E + key[stays] % uses.E)
    hit, kept = (
        np.isin(uses.code, np.concatenate([np.zeros(0, np.int64), *codes])) for codes in (hit_codes, kept_codes)
    )
    block = {
        "contract": contract,
        "ties": "higher layer * E + expert leaves first",
        "reset": reset,
        "scope": scope,
        "quota": capacities[:1].tolist() if scope == "global" else capacities.tolist(),
        "seed": 0,
        "dedup": "distinct experts of an event",
        "scores": "not used by the policy",
        "phase": phase or "prefill and decode",
        "warm": False,
    }
    return _result(uses, capacities, block, row_bytes, hit, kept, overflow, events)


@dataclasses.dataclass(frozen=True, eq=False)
class Curve:
    """The optimum at several capacities.

    capacities: [n] int64, slots of each layer, or of the pool in scope `global`. hits: [n, L] int64. accesses: [L]
    int64. scope, contract: what they were made under.
    """

    capacities: np.ndarray
    hits: np.ndarray
    accesses: np.ndarray
    scope: str
    contract: str

    @property
    def hit_rate(self):
        """[n] float64: hits of all layers over accesses, NaN for a trace without events."""
        total = int(self.accesses.sum())
        return self.hits.sum(1) / total if total else np.full(len(self.capacities), np.nan)

    @property
    def misses(self):
        """[n] int64, over all layers."""
        return int(self.accesses.sum()) - self.hits.sum(1)


def belady_curve(trace, capacities, *, scope="layer", contract="atomic-bypass", reset="request", phase=None):
    """Returns the optimum at every capacity as a `Curve`, all from one pass over the trace.

    `capacities`: integers, slots of each layer in scope `layer`, of the whole pool in scope `global`; 0 is allowed.
    Under `atomic-forced-admit` a capacity below the largest event takes a pass of its own. Raises ValueError.
    """
    uses, _ = _prepare(trace, scope, contract, reset, phase, 1, None)
    most = uses.E if scope == "layer" else uses.blocks
    wanted = np.asarray(capacities)
    if wanted.ndim != 1 or not wanted.size or wanted.dtype.kind not in "iu" or wanted.min() < 0 or wanted.max() > most:
        raise ValueError(
            f"capacities: {capacities!r} is not a list of integers from 0 to {most}, all slots of a {scope}"
        )
    wanted = wanted.astype(np.int64)
    # Small capacities that must choose among the experts of one event are no stack: each takes its own pass.
    alone = (wanted > 0) & (wanted < uses.largest) & (contract == "atomic-forced-admit")
    lanes = _Lanes.of(uses, scope)
    hits = np.zeros((len(wanted), uses.L), np.int64)
    for group in (np.flatnonzero(~alone), *np.flatnonzero(alone)[:, None]):
        depth = int(wanted[group].max(initial=0))
        if depth == 0:
            continue
        quota = np.full(len(lanes.first), depth) if alone[group].all() else None
        found = np.zeros(uses.L * depth, np.int64)
        for event, at, lane, *_ in _replay(uses, lanes, depth, contract, quota):
            found += np.bincount(event[lane] % uses.L * depth + at, minlength=len(found))
        reached = np.zeros((uses.L, depth + 1), np.int64)
        np.cumsum(found.reshape(uses.L, depth), axis=1, out=reached[:, 1:])
        hits[group] = reached[:, wanted[group]].T
    accesses = np.bincount(uses.event % uses.L, minlength=uses.L)
    return Curve(wanted, hits, accesses, scope, contract)


def best_static_split(trace, total, *, reset="request", phase=None, row_bytes=None):
    """Returns `belady` under `atomic-bypass` with the best fixed quotas; they are the result's `capacities`.

    The optimum's hits are concave in a layer's slots (they are the value of a flow of that size), so giving `total`
    slots one by one to the layer that gains most is exact. Every layer gets at least one. Raises ValueError.
    """
    uses, _ = _prepare(trace, "layer", "atomic-bypass", reset, phase, 1, None)
    L, E = uses.L, uses.E
    if isinstance(total, bool) or not isinstance(total, int | np.integer) or not L <= total <= L * E:
        raise ValueError(f"total: {total!r} is not an integer from {L}, one slot a layer, to {L * E}, all experts")
    gain = np.diff(belady_curve(trace, np.arange(1, E + 1), reset=reset, phase=phase).hits, axis=0)  # [E - 1, L]
    # Stable, over (slots, layer): equal gains go to the layer with fewer slots, then to the lower one.
    chosen = np.argsort(-gain.reshape(-1), kind="stable")[: total - L]
    quotas = 1 + np.bincount(chosen % L, minlength=L)
    return belady(trace, slots_per_layer=quotas.tolist(), reset=reset, phase=phase, row_bytes=row_bytes)


@dataclasses.dataclass(frozen=True)
class Gap:
    """How far the best of some policies is from the optimum, and why.

    policy: its name. m_best, m_forced, m_bypass: misses of it, of the optimum under `atomic-forced-admit` and under
    `atomic-bypass`. gap: (m_best - m_bypass) / m_best, 0 without misses. admission_share: (m_forced - m_bypass) /
    (m_best - m_bypass), the part that only not keeping an expert at all can win. future_victim_share: (m_best -
    m_forced) / (m_best - m_bypass), the part that a better choice of the victim wins. The shares sum to 1 and are NaN
    if there is no gap; future_victim_share is negative for a policy that bypasses better than any that admits all.
    """

    policy: str
    m_best: int
    m_forced: int
    m_bypass: int
    gap: float
    admission_share: float
    future_victim_share: float


def gap(results, bypass, forced_admit):
    """Returns the `Gap` of the `results` entry with the fewest misses (decomposition of arXiv 2608.07911).

    `results`: one `Result` or a list, of any policies; `bypass`, `forced_admit`: what `belady` returns under the two
    contracts. All of one trace, phase, reset, scope and quotas, or ValueError names what differs.
    """
    results = list(results) if isinstance(results, Sequence) else [results]
    if not results:
        raise ValueError("results: empty; pass at least one Result of simulate()")
    for name, result, contract in (("bypass", bypass, CONTRACTS[0]), ("forced_admit", forced_admit, CONTRACTS[1])):
        if result.policy != "belady" or result.contract["contract"] != contract:
            raise ValueError(
                f"{name}: expected belady(..., contract={contract!r}), got {result.policy!r} "
                f"under {result.contract['contract']!r}"
            )
    for result in (*results, forced_admit):
        for name in ("scope", "quota", "reset", "phase"):
            if result.contract[name] != bypass.contract[name]:
                raise ValueError(
                    f"results: {result.policy!r} has {name} {result.contract[name]!r}, the optimum "
                    f"{bypass.contract[name]!r}; make them alike"
                )
        if result.accesses != bypass.accesses:
            raise ValueError(
                f"results: {result.policy!r} has {result.accesses} accesses, the optimum "
                f"{bypass.accesses}; replay the same trace"
            )
    best = min(results, key=lambda result: result.misses)
    distance = best.misses - bypass.misses
    return Gap(
        policy=best.policy,
        m_best=best.misses,
        m_forced=forced_admit.misses,
        m_bypass=bypass.misses,
        gap=distance / best.misses if best.misses else 0.0,
        admission_share=(forced_admit.misses - bypass.misses) / distance if distance else float("nan"),
        future_victim_share=(best.misses - forced_admit.misses) / distance if distance else float("nan"),
    )


# ------------------------------------------------------------------------------------------------------ oracle prefetch


@dataclasses.dataclass(frozen=True, eq=False)
class OraclePrefetch:
    """Time of a run whose link knows the future. Seconds and bytes.

    tokens: rows of the trace. stall: [L] float64, waiting for rows at each layer. compute_seconds: of the layers.
    moves: rows moved. link_seconds: time the link was busy. bytes_moved: moves * row_bytes.
    """

    tokens: int
    stall: np.ndarray
    compute_seconds: float
    moves: int
    link_seconds: float
    bytes_moved: int

    @property
    def stall_seconds(self):
        """Waiting, all layers together."""
        return float(self.stall.sum())

    @property
    def stall_seconds_per_token(self):
        """Waiting over tokens, NaN without tokens."""
        return self.stall_seconds / self.tokens if self.tokens else float("nan")

    @property
    def seconds_per_token(self):
        """Compute and waiting over tokens, NaN without tokens."""
        return (self.compute_seconds + self.stall_seconds) / self.tokens if self.tokens else float("nan")


def oracle_prefetch(
    trace,
    *,
    link_bytes_per_second,
    row_bytes,
    layer_seconds,
    slots_per_layer=None,
    slots=None,
    scope="layer",
    reset="request",
    phase=None,
):
    """Replays the trace with perfect knowledge of the future and a link of finite speed.

    Layers run one after the other; one starts when the layer before has ended and all experts it needs have arrived.
    The link carries one row at a time, `row_bytes / link_bytes_per_second` each, without pause: the absent expert
    that is needed soonest (earliest deadline first), into a free slot or that of the resident whose next use is
    furthest, if that is later. Otherwise it waits until the pool's next event has ended. Experts of an event keep their
    slots until it has ended, so every event must fit into the slots. No row is moved that is not used.

    This is a schedule that could be run, not a proven least time. It is the rule "aggressive" of Cao et al. (SIGMETRICS
    1995), for which they show, with one block a request, a total time of at most 1 + F / c times the least (F: the time
    of a move over that of a request, c slots).

    Args:
        link_bytes_per_second, row_bytes: of the link, and of one expert; above 0.
        layer_seconds: time of a layer whose experts are all there, one number or L.
        slots_per_layer, slots, scope, reset, phase: as in `simulate`. With reset="request" the cache is empty when a
            request begins, and nothing is moved ahead of that.

    Returns:
        An `OraclePrefetch`.

    Raises:
        ValueError: a bad value, or an event that needs more experts than its layer has slots.
    """
    uses, capacities = _prepare(trace, scope, "atomic-bypass", reset, phase, slots_per_layer, slots)
    for name, value in (("link_bytes_per_second", link_bytes_per_second), ("row_bytes", row_bytes)):
        if not np.ndim(value) == 0 or not np.isfinite(value) or value <= 0:
            raise ValueError(f"{name}: {value!r} is not a finite number above 0")
    seconds = np.asarray(layer_seconds, np.float64)
    if seconds.shape not in ((), (uses.L,)) or not np.isfinite(seconds).all() or (seconds < 0).any():
        raise ValueError(f"layer_seconds: {layer_seconds!r} is neither a number of at least 0 nor {uses.L} of them")
    seconds = np.broadcast_to(seconds, (uses.L,)).tolist()
    too_large = np.flatnonzero(uses.size > np.tile(capacities, uses.n_events // uses.L))
    if too_large.size:
        step, layer = divmod(int(too_large[0]), uses.L)
        raise ValueError(
            f"slots: step {uses.table.step[step]} layer {layer} needs {uses.size[too_large[0]]} experts at once, "
            f"but has {capacities[layer]} slots; give more, or leave prefill out with phase='decode'"
        )
    row_seconds = row_bytes / link_bytes_per_second
    stall, moves = np.zeros(uses.L), 0
    first = np.searchsorted(uses.event, np.append(uses.starts, len(uses.table.step)) * uses.L)
    for low, high in zip(first[:-1], first[1:], strict=True):
        part = [column[low:high].tolist() for column in (uses.event, uses.block, uses.next)]
        moves += _prefetch_one(*part, uses, capacities, scope, row_seconds, seconds, stall)
    return OraclePrefetch(
        tokens=int(uses.table.rows.sum()),
        stall=stall,
        compute_seconds=float(sum(seconds)) * uses.table.S,
        moves=moves,
        link_seconds=moves * row_seconds,
        bytes_moved=moves * int(row_bytes),
    )


def _prefetch_one(event, block, following, uses, capacities, scope, row_seconds, layer_seconds, stall):
    """Schedules one request from an empty cache, adds its waiting to `stall` [L] and returns the rows moved.

    event, block, following: lists over the request's accesses in order: the event, the expert, and the event that needs
    it next. A pool is a layer's slots, or all of them in scope `global`.
    """
    L, E = uses.L, uses.E
    pools = 1 if scope == "global" else L
    queue = [[] for _ in range(pools)]  # accesses of each pool in order
    for i, b in enumerate(block):
        queue[b // E % pools].append(i)
    cursor = [0] * pools
    free = [int(c) for c in capacities[:pools]]
    arrival, next_use = {}, {}  # of residents, in flight or here
    victims = [[] for _ in range(pools)]  # heaps of (-next use, -block), entries may be out of date
    ready = []  # heap of (deadline, pool), the pools that may have something to fetch
    waiting = [False] * pools
    link_free = now = 0.0
    moves = 0

    def enlist(pool):
        """Puts the pool's soonest absent expert up for the link. What lies behind the cursor stays until its use."""
        line, at = queue[pool], cursor[pool]
        while at < len(line) and block[line[at]] in arrival:
            at += 1
        cursor[pool] = at
        if at < len(line):
            heapq.heappush(ready, (event[line[at]], pool))

    def move_one():
        """Moves the most urgent row that has a place; False if none has."""
        nonlocal link_free, moves
        while ready:
            deadline, pool = heapq.heappop(ready)
            if free[pool]:
                free[pool] -= 1
            else:
                heap = victims[pool]
                while heap and next_use.get(-heap[0][1]) != -heap[0][0]:
                    heapq.heappop(heap)
                if not heap or -heap[0][0] <= deadline:
                    waiting[pool] = True
                    continue
                gone = -heapq.heappop(heap)[1]
                del arrival[gone], next_use[gone]
            b = block[queue[pool][cursor[pool]]]
            link_free = max(link_free, now) + row_seconds
            arrival[b], next_use[b] = link_free, deadline
            heapq.heappush(victims[pool], (-deadline, -b))
            moves += 1
            enlist(pool)
            return True
        return False

    for pool in range(pools):
        enlist(pool)
    i = 0
    while i < len(event):
        t = event[i]
        j = i
        while j < len(event) and event[j] == t:
            while block[j] not in arrival:
                move_one()
            j += 1
        begin = max(now, *(arrival[b] for b in block[i:j]))
        end = begin + layer_seconds[t % L]
        while max(link_free, now) < end and move_one():
            pass
        stall[t % L] += begin - now
        now = end
        pool = t % L % pools
        for k in range(i, j):
            next_use[block[k]] = following[k]
            heapq.heappush(victims[pool], (-following[k], -block[k]))
        if waiting[pool]:
            waiting[pool] = False
            enlist(pool)
        i = j
    return moves


# ----------------------------------------------------------------------------------------------------------- the replay


class _Uses:
    """The accesses of a trace in order, each with its next use.

    code: [n] int64 rising, event * E + expert. event, block: [n] int64, block = layer * E + expert. next: [n] int64,
    the event that needs the block next before the cache is emptied, n_events if none does. size: [n_events] experts
    of an event, largest: their maximum. starts: steps at which the cache is empty. key: [n], `next * blocks + block`:
    orders by next use, ties by block, and tells both; empty: a key above all others.
    """

    def __init__(self, table, reset):
        self.table, self.L, self.E = table, table.L, table.E
        self.blocks, self.n_events = table.L * table.E, table.S * table.L
        parts = [np.zeros(0, np.int64)]
        steps = max(MASK_BYTES // self.blocks, 1)
        for low in range(0, table.S, steps):
            parts.append(np.flatnonzero(table.need(low, min(low + steps, table.S))) + low * self.blocks)
        self.code = np.concatenate(parts)
        self.event = self.code // self.E
        step, self.block = np.divmod(self.code, self.blocks)
        begins = table.start.copy() if reset == "request" else np.zeros(table.S, bool)
        begins[:1] = True
        self.starts = np.flatnonzero(begins)
        life = np.cumsum(begins)[step] * self.blocks + self.block  # one number for a block between two resets
        order = np.argsort(life, kind="stable")
        again = np.flatnonzero(life[order[1:]] == life[order[:-1]])
        self.next = np.full(len(self.code), self.n_events, np.int64)
        self.next[order[again]] = self.event[order[again + 1]]
        self.size = np.bincount(self.event, minlength=self.n_events)
        self.largest = int(self.size.max(initial=0))
        dtype = np.int32 if (self.n_events + 1) * self.blocks < 2**31 - 1 else np.int64
        self.empty = np.iinfo(dtype).max
        self.key = (self.next * self.blocks + self.block).astype(dtype)

    def padded_keys(self):
        """[n_events, largest]: the keys of each event's experts, ascending by expert, then `empty`."""
        keys = np.full((self.n_events, self.largest), self.empty, self.key.dtype)
        first = np.cumsum(self.size) - self.size
        keys[self.event, np.arange(len(self.event)) - first[self.event]] = self.key
        return keys


@dataclasses.dataclass(frozen=True, eq=False)
class _Lanes:
    """Replays that do not influence each other, the longest first: (request, layer), or requests in scope `global`.

    first: [n] the first event of a lane; its events lie `stride` apart. length: [n] events, falling.
    """

    first: np.ndarray
    length: np.ndarray
    stride: int

    @classmethod
    def of(cls, uses, scope):
        steps = np.diff(np.append(uses.starts, uses.table.S))
        first, length, stride = uses.starts * uses.L, steps * uses.L, 1
        if scope == "layer":
            first, length, stride = (first[:, None] + np.arange(uses.L)).ravel(), np.repeat(steps, uses.L), uses.L
        order = np.argsort(-length, kind="stable")
        return cls(first[order], length[order], stride)


def _replay(uses, lanes, depth, contract, quota):
    """Runs all lanes side by side; yields once for each place in a lane, over the n lanes that still run.

    `depth` is the largest capacity of interest. `quota` [lanes] may be None if no event needs more experts than the
    smallest capacity of interest, or under `atomic-bypass`, where it has no effect.

    Yields (event [n], at [h], lane [h], old [h], new [largest of the n events, n], stack [depth, n]): each hit's place
    in the stack, lane and key before the event; the keys of the experts needed; and the stack after it. A cache of c
    slots holds the first c entries, so a hit counts for it if at < c.
    """
    padded = uses.padded_keys()
    forced = contract == "atomic-forced-admit"
    whole = np.full((depth, len(lanes.first)), uses.empty, uses.key.dtype)
    for s in range(int(lanes.length.max(initial=0))):
        n = int(np.searchsorted(-lanes.length, -s, side="left"))
        event = lanes.first[:n] + s * lanes.stride
        stack = whole[:, :n]
        # No resident's next use is in the past, so what is due now has the lowest keys.
        due = stack < ((event + 1) * uses.blocks).astype(stack.dtype)
        at, lane = np.nonzero(due)
        old = stack[at, lane]
        new = padded[event, : int(uses.size[event].max())].T
        if forced and quota is not None:
            order = _processing_order(uses, event, new, at, lane, old, quota)
        stack[at, lane] = uses.empty
        for key in new:
            _insert(stack, np.where(key == uses.empty, uses.empty, -1) if forced else key)
        if forced:
            top = new[:depth]
            np.copyto(stack[: len(top)], top, where=top != uses.empty)
            if quota is not None:
                crowded = np.flatnonzero(uses.size[event] > quota[:n])
                last = np.take_along_axis(new[:, crowded], order[:, crowded], 0)[:depth]
                stack[: len(last), crowded] = last
        yield event, at, lane, old, new, stack


def _insert(stack, key):
    """Puts one key [n] into each stack [depth, n]: the smaller stays, the larger goes on to the next place."""
    carried = np.concatenate([key[None].astype(stack.dtype), stack[:-1]])
    np.maximum.accumulate(carried, axis=0, out=carried)
    np.minimum(stack, carried, out=stack)


def _processing_order(uses, event, new, at, lane, old, quota):
    """[m, n] places in `new`, last processed first: the contract takes hits, then misses, each ascending by expert."""
    inside = at < quota[lane]
    hit = np.zeros((len(event), uses.E), bool)
    hit[lane[inside], old[inside] % uses.E] = True
    expert = new % uses.E
    rank = np.where(hit[np.arange(len(event)), expert], expert, expert + uses.E)
    return np.argsort(-np.where(new == uses.empty, -1, rank), axis=0, kind="stable")


def _prepare(trace, scope, contract, reset, phase, slots_per_layer, slots):
    if not isinstance(trace, Trace):
        raise ValueError(
            f"trace: expected a host_offload.trace.Trace, got {type(trace).__name__}; Trace.load reads one"
        )
    for name, value, known in (("scope", scope, SCOPES), ("contract", contract, CONTRACTS), ("reset", reset, RESETS)):
        if value not in known:
            raise ValueError(f"{name}: {value!r} is none of {', '.join(map(repr, known))}")
    table = EventTable(trace, phase)
    return _Uses(table, reset), slot_capacities(table.L, table.E, slots_per_layer, slots, scope)


def _result(uses, capacities, block, row_bytes, hit, kept, overflow, events):
    """The `Result` of per-access marks `hit`, `kept` [n] and per-event numbers of experts without a slot `overflow`."""
    table, L, E = uses.table, uses.L, uses.E
    miss = ~hit
    of_event = [np.bincount(uses.event[mark], minlength=uses.n_events) for mark in (hit, miss, miss & ~kept)]
    evictions = overflow - of_event[2]  # what found no slot either was bypassed or had one before
    lookups = np.repeat(table.rows * table.K, L)
    per_event = np.stack([*of_event, evictions, of_event[1] > 0, lookups], -1).reshape(table.S, L, len(COUNTERS))
    counters = np.stack([per_event[table.phase == phase].sum(0) for phase in (0, 1)])
    log = None
    if events:
        masks = np.zeros((3, uses.n_events * E), bool)
        for mask, chosen in zip(masks, (miss | hit, hit, miss & kept), strict=True):
            mask[uses.code[chosen]] = True
        step, layer = np.repeat(table.step, L), np.tile(np.arange(L, dtype=np.int32), table.S)
        log = Events(step, layer, *masks.reshape(3, -1, E), evictions.astype(np.int32))
    totals = [np.bincount(table.phase, weights, minlength=2).astype(np.int64) for weights in (table.rows, None)]
    return Result("belady", capacities, block, counters, *totals, row_bytes, log)
