"""Bounds: exhaustive search confirms the optimum, a replay by the engine's rule confirms each event of it, and a naive
schedule confirms oracle prefetch."""

import functools
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.bounds import belady, belady_curve, best_static_split, gap, oracle_prefetch
from host_offload.policy import Policy
from host_offload.simulate import EventTable, simulate
from host_offload.trace import Trace

BYPASS, FORCED = "atomic-bypass", "atomic-forced-admit"
few = settings(max_examples=25, deadline=None)


def make_trace(experts, request=None, step=None, phase=None, E=None):
    """A trace from experts [T, L, K]; one request, one row a step and decode unless told otherwise."""
    experts = np.asarray(experts)
    T, L, K = experts.shape
    header = {
        "moe_layers": list(range(L)),
        "E": E or int(experts.max(initial=K - 1)) + 1,
        "K": K,
        "chunk": 4,
        "scope": "layer",
        "slots": L,
        "contract": BYPASS,
        "policy": "lru",
        "model": "made up",
        "dtype": "float32",
    }
    columns = (np.ones(T, int) if phase is None else phase, np.zeros(T, int) if request is None else request)
    return Trace.from_rows(experts, np.ones((T, L, K)), *columns, np.arange(T) if step is None else step, header)


def one_layer(*needs, E=None):
    """A trace of one layer; each need is one expert a step, or a string of digits."""
    return make_trace([[[int(e) for e in need]] for need in needs], E=E)


@st.composite
def traces(draw, L=2, E=5, K=2, T=9, batched=True):
    """Up to T rows; several requests one after the other, or some rows sharing a step (unions above K)."""
    L, E, T = draw(st.integers(1, L)), draw(st.integers(K, E)), draw(st.integers(1, T))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    # A skewed draw repeats experts, so that caching has something to win.
    experts = np.argsort(rng.random((T, L, E)) ** np.linspace(0.5, 3, E), -1)[..., -K:]
    step = np.arange(T)
    request = np.cumsum(rng.random(T) < 0.15)
    if batched and draw(st.booleans()):
        step = np.cumsum(rng.random(T) < 0.7)
        step -= step[0]
        request = np.arange(T)  # rows of one step belong to different requests
    return make_trace(experts, request, step, rng.integers(0, 2, T), E)


def event_sets(trace, reset):
    """A list of requests, each a list of events, each a frozenset of blocks layer * E + expert."""
    table = EventTable(trace)
    lives = []
    for s in range(table.S):
        if s == 0 or (table.start[s] and reset == "request"):
            lives.append([])
        need = table.need(s, s + 1)[0]
        lives[-1] += [frozenset((layer * table.E + np.flatnonzero(need[layer])).tolist()) for layer in range(table.L)]
    return lives


def most_hits(events, capacity, forced):
    """Hits of the best of all ways to keep a set of at most `capacity` blocks after each event."""

    @functools.cache
    def best(i, cache):
        if i == len(events):
            return 0
        need, choices = events[i], []
        must, may = (need, cache - need) if forced else (frozenset(), cache | need)
        size = min(capacity - len(must), len(may))  # keeping less is never better
        for kept in itertools.combinations(sorted(may), size):
            choices.append(best(i + 1, must | frozenset(kept)))
        return len(need & cache) + max(choices)

    return best(0, frozenset())


class NextUse(Policy):
    """Belady's rule as a policy for the simulator: the table says when each block is used next."""

    name = "next-use"
    uses_scores = False

    def __init__(self, trace, reset):
        self.table = {}  # (event, block) -> next event that needs the block
        t = 0
        for events in event_sets(trace, reset):
            for i, _ in enumerate(events):
                for later in range(len(events) - 1, i, -1):
                    for block in events[later]:
                        self.table[t + i, block] = t + later
            t += len(events)

    def init(self, xp, L, E, seed):
        return {"E": np.int32(E)}

    def observe(self, xp, state, layer, need, scores, t):
        return state

    def priority(self, xp, state, layer, expert, t):
        blocks = (np.asarray(layer) * int(state["E"]) + expert).tolist()
        return -np.array([self.table.get((int(t), block), 10**6) for block in blocks], np.float32)


# -------------------------------------------------------------------------------------------------------------- optimum


def test_hand_worked():
    # Two slots, experts 0 1 2 0 1 2 0. Bypass: keep 0 and 1 when 2 comes (next 5, after 3 and 4): hits at 3 and 4; then
    # 2 (never again) is used and not kept, 0 hits at 6: three hits, 2 bypassed twice. Nothing is evicted.
    trace = one_layer("0", "1", "2", "0", "1", "2", "0")
    result = belady(trace, slots_per_layer=2)
    assert (result.hits, result.misses, result.bypasses, result.evictions) == (3, 4, 2, 0)
    # Forced: 2 replaces 1 (next use 4, 0's is 3); 0 hits; 1 replaces 0 (next 6, 2's is 5); 2 hits; 0 misses.
    forced = belady(trace, slots_per_layer=2, contract=FORCED)
    assert (forced.hits, forced.misses, forced.bypasses, forced.evictions) == (2, 5, 0, 3)


def test_tie_keeps_the_lower_expert():
    # 0 and 1 are both needed next by the third event; one slot holds 0. Hits are the same either way.
    result = belady(one_layer("01", "23", "01", E=4), slots_per_layer=1, events=True)
    assert result.events.admit.tolist()[0] == [True, False, False, False]
    assert result.events.hit.tolist()[2] == [True, False, False, False]


def test_forced_admit_is_no_optimum_once_an_event_exceeds_the_slots():
    # Three slots, events 03 14 0123 02 23. After 14, 0 and 3 are due alike and 0 stays: {0, 1, 4}. Of 0123 the contract
    # takes the hits 0 1 first and keeps the last three, 1 2 3; then 2 hits, 0 replaces 1, and 2 3 hit: 5 in all.
    # Keeping 3 instead gives the order 1 3 0 2, which leaves 0 2 3: 2 + 2 + 2 hits.
    needs = [[[0, 3]], [[1, 4]], [[0, 1]], [[2, 3]], [[0, 2]], [[2, 3]]]
    trace = make_trace(needs, request=range(6), step=[0, 1, 2, 2, 3, 4])
    assert belady(trace, slots_per_layer=3, contract=FORCED, reset="never").hits == 5


@few
@given(trace=traces(), slots=st.integers(1, 4), reset=st.sampled_from(["request", "never"]), forced=st.booleans())
def test_exhaustive_search_finds_nothing_better_per_layer(trace, slots, reset, forced):
    E, L = trace.header["E"], len(trace.header["moe_layers"])
    slots = min(slots, E)
    if forced and max(len(need) for events in event_sets(trace, reset) for need in events) > slots:
        slots = E
    result = belady(trace, slots_per_layer=slots, contract=FORCED if forced else BYPASS, reset=reset)
    lanes = [events[layer::L] for events in event_sets(trace, reset) for layer in range(L)]
    assert result.hits == sum(most_hits(lane, slots, forced) for lane in lanes)


@few
@given(
    trace=traces(E=4, T=7), slots=st.integers(1, 6), reset=st.sampled_from(["request", "never"]), forced=st.booleans()
)
def test_exhaustive_search_finds_nothing_better_in_one_pool(trace, slots, reset, forced):
    lives = event_sets(trace, reset)
    slots = min(slots, trace.header["E"] * len(trace.header["moe_layers"]))
    if forced:
        slots = max(slots, *(len(need) for events in lives for need in events), 1)
    result = belady(trace, slots=slots, scope="global", contract=FORCED if forced else BYPASS, reset=reset)
    assert result.hits == sum(most_hits(events, slots, forced) for events in lives)


@few
@given(
    trace=traces(L=3, E=6, T=14),
    data=st.data(),
    scope=st.sampled_from(["layer", "global"]),
    contract=st.sampled_from([BYPASS, FORCED]),
    reset=st.sampled_from(["request", "never"]),
)
def test_every_event_is_what_the_engines_rule_makes_of_next_uses(trace, data, scope, contract, reset):
    L, E = len(trace.header["moe_layers"]), trace.header["E"]
    if scope == "layer":
        size = {"slots_per_layer": data.draw(st.lists(st.integers(1, E), min_size=L, max_size=L))}
    else:
        size = {"slots": data.draw(st.integers(1, L * E))}
    settings = dict(size, scope=scope, contract=contract, reset=reset, events=True, row_bytes=3)
    steps = np.unique(trace.step, return_inverse=True)[1].astype(np.int32)  # NextUse counts events, so no step may lack
    trace = make_trace(trace.experts, trace.request, steps, trace.phase, E)
    expected = simulate(trace, NextUse(trace, reset), backend="numpy", **settings)
    result = belady(trace, **settings)
    for name in ("step", "layer", "need", "hit", "admit", "evictions"):
        np.testing.assert_array_equal(getattr(result.events, name), getattr(expected.events, name), err_msg=name)
    for name in ("capacities", "counters", "tokens", "steps"):
        np.testing.assert_array_equal(getattr(result, name), getattr(expected, name), err_msg=name)
    assert result.bytes_moved == expected.bytes_moved
    assert result.contract.keys() == expected.contract.keys()
    for name in result.contract.keys() - {"seed", "scores"}:
        assert result.contract[name] == expected.contract[name], name


@few
@given(trace=traces(L=3, E=6, T=14), phase=st.sampled_from([None, "prefill", "decode"]), slots=st.integers(1, 6))
def test_no_policy_is_better_and_more_room_never_hurts(trace, phase, slots):
    L, E = len(trace.header["moe_layers"]), trace.header["E"]
    slots = min(slots, E)
    optimum = belady(trace, slots_per_layer=slots, phase=phase)
    for contract in (BYPASS, FORCED, "sequential"):
        for policy in ("lru", "lfu", "lfru"):
            result = simulate(trace, policy, slots_per_layer=slots, contract=contract, phase=phase, backend="numpy")
            assert result.accesses == optimum.accesses
            assert result.hits <= optimum.hits
    assert belady(trace, slots_per_layer=slots, contract=FORCED, phase=phase).hits <= optimum.hits
    assert belady(trace, slots=slots * L, scope="global", phase=phase).hits >= optimum.hits
    curve = belady_curve(trace, range(E + 1), phase=phase)
    assert (np.diff(curve.hits, axis=0) >= 0).all()
    assert (np.diff(curve.hits, n=2, axis=0) <= 0).all()  # concave in each layer, what best_static_split rests on
    assert curve.hits[slots].tolist() == optimum.per_layer["hits"].tolist()


@few
@given(
    trace=traces(L=2, E=6, T=12),
    scope=st.sampled_from(["layer", "global"]),
    contract=st.sampled_from([BYPASS, FORCED]),
    reset=st.sampled_from(["request", "never"]),
)
def test_curve_is_belady_at_every_capacity(trace, scope, contract, reset):
    L, E = len(trace.header["moe_layers"]), trace.header["E"]
    most = E if scope == "layer" else L * E
    curve = belady_curve(trace, [most, 0, *range(1, most)], scope=scope, contract=contract, reset=reset)
    assert curve.hits[1].sum() == 0
    for capacity, hits, misses, rate in zip(curve.capacities, curve.hits, curve.misses, curve.hit_rate, strict=True):
        if capacity:
            size = {"slots_per_layer": int(capacity)} if scope == "layer" else {"slots": int(capacity)}
            result = belady(trace, scope=scope, contract=contract, reset=reset, **size)
            assert hits.tolist() == result.per_layer["hits"].tolist()
            assert (misses, rate) == (result.misses, result.hit_rate)


@few
@given(trace=traces(L=3, E=4, T=12), data=st.data())
def test_best_static_split_is_the_best_of_all_splits(trace, data):
    L, E = len(trace.header["moe_layers"]), trace.header["E"]
    total = data.draw(st.integers(L, L * E))
    hits = belady_curve(trace, range(E + 1)).hits
    splits = (q for q in itertools.product(range(1, E + 1), repeat=L) if sum(q) == total)
    best = best_static_split(trace, total)
    assert best.hits == max(sum(hits[c, layer] for layer, c in enumerate(quotas)) for quotas in splits)
    assert best.capacities.sum() == total
    assert best.hits <= belady(trace, slots=total, scope="global").hits


def test_large_numbers_take_wide_keys_and_agree():
    # 90 steps of 30 layers of 32000 experts: next use * blocks exceeds 2^31. The experts 31000, 31001, 31002 in turn.
    T, L, E = 90, 30, 32000
    assert T * L * L * E > 2**31
    trace = make_trace(np.tile(np.arange(T)[:, None, None] % 3 + 31000, (1, L, 1)), E=E)
    assert belady(trace, slots_per_layer=3).misses == 3 * L
    # With two slots the first two stay for good and the third is never kept.
    assert belady_curve(trace, [2]).hits.tolist() == [[T // 3 * 2 - 2] * L]


def test_no_rows():
    trace = one_layer("01", "12")
    result = belady(trace, slots_per_layer=1, phase="prefill")
    assert result.accesses == 0 and np.isnan(result.hit_rate)
    assert np.isnan(belady_curve(trace, [1], phase="prefill").hit_rate).all()
    assert best_static_split(trace, 1, phase="prefill").hits == 0
    empty = oracle_prefetch(trace, slots=2, phase="prefill", row_bytes=1, link_bytes_per_second=1, layer_seconds=1)
    assert empty.moves == 0 and np.isnan(empty.stall_seconds_per_token) and np.isnan(empty.seconds_per_token)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda t: belady("run.npz", slots_per_layer=1), "trace"),
        (lambda t: belady(t, slots_per_layer=9), "slots_per_layer"),
        (lambda t: belady(t), "slots"),
        (lambda t: belady(t, slots_per_layer=1, contract="sequential"), "contract"),
        (lambda t: belady(t, slots_per_layer=1, scope="pool"), "scope"),
        (lambda t: belady(t, slots_per_layer=1, reset="step"), "reset"),
        (lambda t: belady(t, slots_per_layer=1, phase="both"), "phase"),
        (lambda t: belady(t, slots_per_layer=1, row_bytes=0), "row_bytes"),
        (lambda t: belady_curve(t, []), "capacities"),
        (lambda t: belady_curve(t, [4]), "capacities"),
        (lambda t: belady_curve(t, [0.5]), "capacities"),
        (lambda t: best_static_split(t, 0), "total"),
        (lambda t: best_static_split(t, 4), "total"),
        (lambda t: prefetch(t, slots=2, row_bytes=-1), "row_bytes"),
        (lambda t: prefetch(t, slots=2, link_bytes_per_second=float("inf")), "link_bytes_per_second"),
        (lambda t: prefetch(t, slots=2, layer_seconds=[1, 2]), "layer_seconds"),
        (lambda t: prefetch(t, slots=1), "slots: step 0 layer 0 needs 2"),
    ],
)
def test_bad_values_are_named(call, field):
    with pytest.raises(ValueError, match=f"^{field}|give exactly one of .*{field}"):
        call(one_layer("01", "12"))


# ------------------------------------------------------------------------------------------------------------------ gap


def test_gap_by_hand():
    # Two slots, 0 1 2 0 1 2 0: LRU misses all 7, the optimum 5 forced and 4 with bypass (first test).
    trace = one_layer("0", "1", "2", "0", "1", "2", "0")
    optima = [belady(trace, slots_per_layer=2, contract=contract) for contract in (BYPASS, FORCED)]
    lru = simulate(trace, "lru", slots_per_layer=2, contract=FORCED, backend="numpy")
    lfu = simulate(trace, "lfu", slots_per_layer=2, contract=BYPASS, backend="numpy")
    found = gap(lru, *optima)
    assert (found.policy, found.m_best, found.m_forced, found.m_bypass) == ("lru", 7, 5, 4)
    assert (found.gap, found.admission_share, found.future_victim_share) == (3 / 7, 1 / 3, 2 / 3)
    # LFU with bypass keeps 0 and 1 for good, as the optimum does: there is no gap, and the best of a list is taken.
    assert lfu.misses == 4
    best = gap([lru, lfu], *optima)
    assert (best.policy, best.gap) == ("lfu", 0.0)
    assert np.isnan(best.admission_share) and np.isnan(best.future_victim_share)


def test_gap_refuses_what_cannot_be_compared():
    trace = one_layer("0", "1", "2", "0", "1")
    bypass, forced = (belady(trace, slots_per_layer=2, contract=contract) for contract in (BYPASS, FORCED))
    lru = simulate(trace, "lru", slots_per_layer=2, backend="numpy")
    for arguments, message in (
        (([], bypass, forced), "results: empty"),
        ((lru, forced, bypass), "bypass: expected"),
        ((lru, bypass, bypass), "forced_admit: expected"),
        ((lru, bypass, belady(trace, slots_per_layer=1, contract=FORCED)), "has quota"),
        ((simulate(trace, "lru", slots_per_layer=2, reset="never", backend="numpy"), bypass, forced), "has reset"),
        ((simulate(one_layer("0", "1", "2"), "lru", slots_per_layer=2, backend="numpy"), bypass, forced), "accesses"),
    ):
        with pytest.raises(ValueError, match=message):
            gap(*arguments)


# ------------------------------------------------------------------------------------------------------ oracle prefetch


def prefetch(trace, **changes):
    """A link of one row a second, layers of one second."""
    return oracle_prefetch(trace, **{"link_bytes_per_second": 10, "row_bytes": 10, "layer_seconds": 1.0, **changes})


def naive_prefetch(trace, scope, capacities, row_seconds, layer_seconds, reset):
    """The schedule's rule with nothing remembered: at each free moment of the link all future uses are looked through.

    Returns (stall, moves).
    """
    E, L = trace.header["E"], len(trace.header["moe_layers"])
    stall, moves = 0.0, 0
    for events in event_sets(trace, reset):
        arrival, link, now = {}, 0.0, 0.0
        for t, need in enumerate(events):
            while need - arrival.keys():
                link = max(link, now) + row_seconds
                arrival[_most_urgent(events, t, arrival, scope, capacities, E)] = link
                moves += 1
            begin = max([now, *(arrival[b] for b in need)])
            end = begin + layer_seconds[t % L]
            while max(link, now) < end:
                block = _most_urgent(events, t, arrival, scope, capacities, E)
                if block is None:
                    break
                link = max(link, now) + row_seconds
                arrival[block] = link
                moves += 1
            stall += begin - now
            now = end
    return stall, moves


def _most_urgent(events, t, arrival, scope, capacities, E):
    """The absent block that is needed soonest and has a place; whoever must go for it is taken out of `arrival`."""

    def pool(block):
        return 0 if scope == "global" else block // E

    def next_use(block):
        return next((i for i in range(t, len(events)) if block in events[i]), len(events))

    for i in range(t, len(events)):
        for block in sorted(events[i] - arrival.keys()):
            held = [b for b in arrival if pool(b) == pool(block)]
            if len(held) < capacities[pool(block)]:
                return block
            worst = max(held, key=lambda b: (next_use(b), b))
            if next_use(worst) > i:
                del arrival[worst]
                return block
    return None


def test_prefetch_hand_worked():
    # Two slots, a link of one row a second, layers of one second, experts 0 1 2 0: 0 arrives at 1 and is used until 2;
    # 1 arrives at 2: no wait. During 1's layer (2-3) the link wants 2, due next, and 0, due later, leaves: 2 arrives at
    # 3. During 2's layer 0 replaces 1 and arrives at 4. Only the first row was waited for; 4 moves.
    result = prefetch(one_layer("0", "1", "2", "0"), slots=2)
    assert (result.stall_seconds, result.moves, result.bytes_moved, result.link_seconds) == (1, 4, 40, 4)
    assert (result.compute_seconds, result.tokens) == (4, 4)
    assert (result.stall_seconds_per_token, result.seconds_per_token) == (0.25, 1.25)
    # Half the rate: 0 at 2 (wait 2), 1 at 4 (its layer could begin at 3: wait 1), 2 at 6 (wait 1), 0 at 8 (wait 1).
    assert prefetch(one_layer("0", "1", "2", "0"), slots=2, link_bytes_per_second=5).stall_seconds == 5
    # One slot: nothing can come early, each of the 4 rows is waited for.
    assert prefetch(one_layer("0", "1", "2", "0"), slots=1).stall_seconds == 4


def test_prefetch_between_layers():
    # Layer 0 always needs its expert 0, layer 1 changes; one slot each. Layer 1's row comes while layer 0 computes.
    trace = make_trace([[[0], [0]], [[0], [1]], [[0], [2]]])
    result = prefetch(trace, slots_per_layer=1)
    # 0 of layer 0 arrives at 1, that of layer 1 at 2; later ones arrive during layer 0's second.
    assert result.stall.tolist() == [1, 0]
    assert result.moves == 4
    assert prefetch(trace, slots_per_layer=1, layer_seconds=[0.5, 1]).stall.tolist() == [1, 0.5 * 3]


@few
@given(
    trace=traces(L=3, E=5, T=8),
    scope=st.sampled_from(["layer", "global"]),
    extra=st.integers(0, 3),
    row=st.sampled_from([0.0625, 0.25, 1.0, 3.0]),
    reset=st.sampled_from(["request", "never"]),
)
def test_prefetch_is_the_naive_schedule(trace, scope, extra, row, reset):
    L, E = len(trace.header["moe_layers"]), trace.header["E"]
    lives = event_sets(trace, reset)
    largest = max(len(need) for events in lives for need in events)
    slots = min(largest + extra, E) if scope == "layer" else min(largest + extra, L * E)
    size = {"slots_per_layer": slots} if scope == "layer" else {"slots": slots}
    layer_seconds = [0.5, 1.0, 0.25][:L]
    found = oracle_prefetch(
        trace,
        link_bytes_per_second=16,
        row_bytes=int(16 * row),
        layer_seconds=layer_seconds,
        scope=scope,
        reset=reset,
        **size,
    )
    stall, moves = naive_prefetch(trace, scope, [slots] * L, row, layer_seconds, reset)
    assert (found.stall_seconds, found.moves) == (stall, moves)
    # What is kept between two uses is bounded as in `belady`, so no fewer rows can move. The link has no other time.
    assert found.moves >= belady(trace, scope=scope, reset=reset, **size).misses
    assert found.compute_seconds + found.stall_seconds >= found.link_seconds
    assert found.stall_seconds <= found.link_seconds
    fast = oracle_prefetch(
        trace, link_bytes_per_second=1e15, row_bytes=1, layer_seconds=layer_seconds, scope=scope, reset=reset, **size
    )
    assert fast.stall_seconds < 1e-12


# ----------------------------------------------------------------------------------------------------------- real trace


def test_anchors_of_the_real_trace():
    folder = os.environ.get("MOE_JAX_TRACES")
    if not folder:
        pytest.skip("MOE_JAX_TRACES names no folder with recorded traces")
    with np.load(Path(folder) / "gptoss20b_routes_mmlu60.npz") as file:
        request = np.repeat(np.arange(len(file["offsets"]) - 1), np.diff(file["offsets"]))
        trace = make_trace(file["experts"], request, E=32)
    assert round(100 * belady(trace, slots_per_layer=8).hit_rate, 3) == 80.065
    assert round(100 * belady(trace, slots_per_layer=8, contract=FORCED).hit_rate, 3) == 76.460
    curve = belady_curve(trace, [4, 6, 8, 12, 16, 24])
    assert np.round(100 * curve.hit_rate, 1).tolist() == [60.4, 72.3, 80.1, 89.2, 93.8, 97.1]
    split = best_static_split(trace, 24 * 8)
    assert belady(trace, slots_per_layer=8).hits < split.hits
    assert split.hits < belady_curve(trace, [24 * 8], scope="global").hits.sum()
