"""The simulator: hand-worked traces, its invariants, equal back ends, and the live engine repeated hit by hit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload import Trace, simulate, simulate_many
from host_offload.policy import LFU, Policy, StaticPin, set_row
from host_offload.simulate import slot_capacities

ATOMIC = ("atomic-bypass", "atomic-forced-admit")
CONTRACTS = (*ATOMIC, "sequential")
SCOPES = ("layer", "global")


def make_trace(experts, E, *, request=None, step=None, phase=None, weights=None, scores=None):
    """A trace from experts [T, L, K], by default one decode request of one row a step."""
    experts = np.asarray(experts)
    T, L, K = experts.shape
    header = {
        "moe_layers": list(range(L)),
        "E": E,
        "K": K,
        "chunk": 8,
        "scope": "layer",
        "slots": L * E,
        "contract": "atomic-bypass",
        "policy": "none",
        "model": "none",
        "dtype": "float32",
    }
    if weights is None:
        weights = np.broadcast_to(np.arange(K, 0, -1), experts.shape)
    columns = (np.ones(T, int) if phase is None else phase, np.zeros(T, int) if request is None else request)
    return Trace.from_rows(experts, weights, *columns, np.arange(T) if step is None else step, header, scores)


def random_trace(seed, *, T=24, L=2, E=5, K=2, batch=1, requests=3, scores=False):
    """Requests one after the other, each of `batch` concurrent sequences; the first step of each is prefill."""
    rng = np.random.default_rng(seed)
    popular = rng.random((L, E)) ** 3
    experts = np.argsort(-(popular + 0.6 * rng.random((T * batch, L, E))), axis=-1)[..., :K]
    group = np.sort(np.random.default_rng(T).integers(0, requests, T))  # alike for all seeds: one compilation
    phase = np.repeat(np.diff(group, prepend=-1) == 0, batch).astype(int)
    request = np.repeat(group * batch, batch) + np.tile(np.arange(batch), T)
    table = rng.random((T * batch, L, E)) if scores else None
    step = np.repeat(np.arange(T), batch)
    return make_trace(experts, E, request=request, step=step, phase=phase, scores=table)


class Longest(Policy):
    """Keeps what came last, like a stack; follows the cache, and weighs router scores in."""

    name = "test-longest"
    in_cache = True

    def init(self, xp, L, E, seed):
        return {"since": xp.full((L, E), -1, xp.int32), "score": xp.zeros((L, E), xp.float32), "size": xp.int32(seed)}

    def bound(self, xp, state, capacity, global_scope):
        return {**state, "size": state["size"] + xp.sum(capacity).astype(xp.int32)}

    def observe(self, xp, state, layer, need, scores, t):
        return {**state, "score": set_row(xp, state["score"], layer, (state["score"][layer] + scores) / 2)}

    def priority(self, xp, state, layer, expert, t):
        late = state["since"][layer, expert] % (state["size"] % 3 + 2)
        return late.astype(xp.float32) + state["score"][layer, expert]

    def commit(self, xp, state, layer, resident, t):
        row = state["since"][layer]
        row = xp.where(resident[layer] & (row < 0), t, xp.where(resident[layer], row, -1))
        return {**state, "since": set_row(xp, state["since"], layer, row)}


def assert_same(a, b):
    np.testing.assert_array_equal(a.counters, b.counters)
    for name in ("step", "layer", "need", "hit", "admit", "evictions"):
        np.testing.assert_array_equal(getattr(a.events, name), getattr(b.events, name), err_msg=name)
    assert a.contract == b.contract and a.policy == b.policy


# ---------------------------------------------------------------------------------------------------------- hand-worked


def test_lru_by_hand():
    # 2 slots. {0,1} miss; {0,1} hit; {2,3} miss, 0 and 1 leave; {0,2}: 2 hits, 0 misses, 3 leaves; {1,2}: 2 hits.
    trace = make_trace(np.array([[0, 1], [0, 1], [2, 3], [0, 2], [1, 2]])[:, None], 4)
    result = simulate(trace, "lru", slots_per_layer=2, events=True, backend="numpy", row_bytes=10)
    assert [row.nonzero()[0].tolist() for row in result.events.hit] == [[], [0, 1], [], [2], [2]]
    assert (result.hits, result.misses, result.accesses, result.lookups) == (4, 6, 10, 10)
    assert (result.bypasses, result.evictions, result.bytes_moved) == (0, 4, 60)
    assert result.miss_events == 4  # all but the second
    assert result.hit_rate == 0.4
    # Slots 0, 1 after the last event: 1 and 2 were needed last.
    ended = simulate(trace, "lru", slots_per_layer=2, reset="never", backend="numpy")
    assert ended.state.resident.tolist() == [[False, True, True, False]]


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_contracts_differ_by_hand(backend):
    # LFU, 2 slots. After {0,1} x 2 both count 2. {2,0}: 2 counts 1, so it is bypassed; forced admission throws out 1.
    # Then {1,0}: two hits under bypass, one under forced admission.
    trace = make_trace(np.array([[0, 1], [0, 1], [2, 0], [1, 0]])[:, None], 4)
    bypass, forced = (simulate(trace, "lfu", slots_per_layer=2, contract=c, backend=backend) for c in ATOMIC)
    assert (bypass.hits, bypass.bypasses, bypass.evictions) == (5, 1, 0)
    assert (forced.hits, forced.bypasses, forced.evictions) == (4, 0, 2)


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_sequential_loses_a_member_of_its_own_event(backend):
    # LRU, 2 slots hold {0,1}, 1 used last. {2,0} in this order: 2 throws out 0, which then misses; atomically 0 hits.
    trace = make_trace(np.array([[0, 1], [2, 0]])[:, None], 3)
    hits = {c: simulate(trace, "lru", slots_per_layer=2, contract=c, backend=backend).hits for c in CONTRACTS}
    assert hits == {"atomic-bypass": 1, "atomic-forced-admit": 1, "sequential": 0}
    other = make_trace(np.array([[0, 1], [0, 2]])[:, None], 3)
    assert simulate(other, "lru", slots_per_layer=2, contract="sequential", backend=backend).hits == 1


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_more_needed_than_slots(backend):
    # Forced admission with 2 slots and {0..3} needed: processed 0, 1, 2, 3, so 2 and 3 stay; then 2, 3 first as hits,
    # 0 and 1 after them stay. Bypass under LRU: equal priorities, so the low ids 0 and 1 stay.
    trace = make_trace(np.tile(np.arange(4), (3, 1, 1)), 4)
    forced = simulate(trace, "lru", slots_per_layer=2, contract="atomic-forced-admit", events=True, backend=backend)
    assert [row.nonzero()[0].tolist() for row in forced.events.hit] == [[], [2, 3], [0, 1]]
    bypass = simulate(trace, "lru", slots_per_layer=2, events=True, backend=backend)
    assert [row.nonzero()[0].tolist() for row in bypass.events.hit] == [[], [0, 1], [0, 1]]


def test_rows_of_a_step_are_one_event_and_phases_are_apart():
    trace = make_trace(
        np.array([[0, 1], [1, 2], [1, 0], [2, 0]])[:, None],
        4,
        request=[0, 1, 0, 1],
        step=[0, 0, 1, 1],
        phase=[0, 0, 1, 1],
    )
    result = simulate(trace, "lru", slots_per_layer=4, backend="numpy")
    assert (result.lookups, result.accesses, result.hits) == (8, 6, 3)
    assert result.in_phase("prefill") | {"hit_rate": 0} == {
        "tokens": 2,
        "steps": 1,
        "hits": 0,
        "misses": 3,
        "bypasses": 0,
        "evictions": 0,
        "miss_events": 1,
        "lookups": 4,
        "accesses": 3,
        "hit_rate": 0,
    }
    decode = simulate(trace, "lru", slots_per_layer=4, phase="decode", backend="numpy")
    assert (decode.accesses, decode.hits, decode.in_phase("prefill")["tokens"]) == (3, 0, 0)
    assert result.to_dict()["per_layer"]["hits"] == [3] and result.contract["quota"] == [4]


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_reset_and_warm(backend):
    experts = np.array([[0, 1], [0, 1], [0, 1], [0, 1]])[:, None]
    trace = make_trace(experts, 4, request=[0, 0, 1, 1])
    keywords = {"slots_per_layer": 2, "backend": backend}
    assert simulate(trace, "lru", **keywords).hits == 4
    once = simulate(trace, "lru", reset="never", **keywords)
    assert once.hits == 6
    assert simulate(trace, "lru", reset="never", warm="warm", **keywords).hits == 8
    again = simulate(trace, "lru", reset="never", warm=once, **keywords)
    assert again.hits == 8 and again.state.step == 7 and once.state.step == 3
    assert simulate(trace, "lru", reset="never", warm=once, **keywords).hits == 8  # `once` was not changed


def test_a_run_in_two_parts_is_the_run():
    whole = random_trace(5, requests=4)
    half = whole.request < 2
    parts = [
        make_trace(
            whole.experts[rows],
            5,
            request=whole.request[rows],
            step=whole.step[rows],
            phase=whole.phase[rows],
            weights=whole.weights[rows],
        )
        for rows in (half, ~half)
    ]
    keywords = {"slots_per_layer": 2, "reset": "never", "backend": "numpy"}
    for policy in ("lfru", Longest()):
        first = simulate(parts[0], policy, **keywords)
        second = simulate(parts[1], policy, warm=first, **keywords)
        together = simulate(whole, policy, **keywords)
        np.testing.assert_array_equal(first.counters + second.counters, together.counters)
        assert second.state.step == together.state.step


# --------------------------------------------------------------------------------------------------------- back ends


@pytest.mark.slow
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("contract", CONTRACTS)
def test_numpy_and_jax_decide_alike(scope, contract):
    @settings(max_examples=4, deadline=None)
    @given(
        st.integers(0, 2**31), st.sampled_from(["request", "never"]) if contract != "sequential" else st.just("never")
    )
    def check(seed, reset):
        trace = random_trace(seed, requests=1 if reset == "never" else 4)
        keywords = {"scope": scope, "contract": contract, "reset": reset, "events": True}
        compiled, plain = (
            simulate_many(trace, ["lfru", Longest()], [1, 2, 4], backend=b, **keywords) for b in ("jax", "numpy")
        )
        for a, b in zip(compiled, plain, strict=True):
            assert_same(a, b)
            assert a.hits + a.misses == a.accesses
            if reset == "never":
                np.testing.assert_array_equal(a.state.resident, b.state.resident)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("contract", CONTRACTS)
def test_unions_over_two_words_of_experts(scope, contract):
    """E > 32 takes several bit words; many missing experts take the bisection in scope `global`; scores are summed."""
    trace = random_trace(1, T=14, E=40, K=6, batch=4, requests=2, scores=True)
    keywords = {"scope": scope, "contract": contract, "events": True}
    for policy in ("lfru", Longest()) if contract != "sequential" else (Longest(),):
        compiled, plain = (simulate_many(trace, [policy], [3, 17], backend=b, **keywords) for b in ("jax", "numpy"))
        for a, b in zip(compiled, plain, strict=True):
            assert_same(a, b)
    assert plain[0].contract["scores"] == "scores of the trace" and plain[0].lookups == 14 * 4 * 2 * 6


def test_many_equals_one_by_one():
    trace = random_trace(2)
    tables = [StaticPin(np.arange(10).reshape(2, 5)), StaticPin(np.arange(10)[::-1].reshape(2, 5)), Longest(), LFU]
    many = iter(simulate_many(trace, tables, [2, [1, 4]], seeds=(0, 1), events=True))
    for policy in tables:
        for capacity in (2, [1, 4]):
            for seed in (0, 1):
                one = simulate(trace, policy, slots_per_layer=capacity, seed=seed, events=True, backend="numpy")
                assert_same(next(many), one)
    assert next(many, None) is None


def test_same_kind_of_policy_compiles_once():
    from host_offload import simulate_jax

    trace = random_trace(3)
    simulate(trace, StaticPin(), slots_per_layer=2)
    before = len(simulate_jax._programs)
    simulate(trace, StaticPin(np.ones((2, 5))), slots_per_layer=3, seed=4)
    assert len(simulate_jax._programs) == before


# ---------------------------------------------------------------------------------------------------------- properties


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(SCOPES), st.sampled_from(CONTRACTS), st.integers(1, 4))
def test_capacity_is_never_exceeded(seed, scope, contract, slots):
    trace = random_trace(seed, batch=2, T=12)
    result = simulate(
        trace,
        "lfru",
        slots_per_layer=slots,
        scope=scope,
        contract=contract,
        reset="never",
        events=True,
        backend="numpy",
    )
    change = result.events.admit.sum(axis=1) - result.events.evictions
    if contract == "sequential":  # an expert that came and went within its event was evicted, but is no admission
        assert result.state.resident.sum() <= result.capacities[0] * (1 if scope == "global" else 2)
    elif scope == "global":
        assert (np.cumsum(change) <= result.capacities[0]).all() and np.cumsum(change)[
            -1
        ] == result.state.resident.sum()
    else:
        for layer in range(2):
            held = np.cumsum(change[result.events.layer == layer])
            assert (held <= slots).all() and held[-1] == result.state.resident[layer].sum()
    assert result.hits + result.misses == result.accesses == result.events.need.sum()
    assert result.miss_events == result.events.miss.any(axis=1).sum()
    assert result.bypasses == (result.events.miss & ~result.events.admit).sum() or contract == "sequential"


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(ATOMIC[:1]))
def test_a_larger_lru_cache_holds_the_smaller_one(seed, contract):
    trace = random_trace(seed, batch=2, T=16)
    runs = simulate_many(trace, ["lru"], [1, 2, 3, 4, 5], contract=contract, events=True, backend="numpy")
    for small, large in zip(runs, runs[1:], strict=False):
        assert not (small.events.hit & ~large.events.hit).any()
    first_uses = [np.unique(trace.experts[trace.request // 2 == r, layer]).size for r in range(3) for layer in range(2)]
    assert runs[-1].misses == sum(first_uses)


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({}, "exactly one of slots_per_layer and slots"),
        ({"slots": 4, "slots_per_layer": 2}, "exactly one"),
        ({"slots_per_layer": 6}, r"slots_per_layer: 6 is outside 1..5"),
        ({"slots_per_layer": 2.5}, "slots_per_layer: 2.5 is neither"),
        ({"slots": [2, 2]}, "slots: .* quotas go into slots_per_layer"),
        ({"slots": 1}, "gives 1 expert slots"),
        ({"slots_per_layer": [2, 2], "scope": "global"}, "quotas needs scope 'layer'"),
        ({"slots": 4, "scope": "both"}, "scope: 'both' is none of 'layer', 'global'"),
        ({"slots": 4, "contract": "atomic"}, "contract: 'atomic'"),
        ({"slots": 4, "reset": "step"}, "reset: 'step'"),
        ({"slots": 4, "backend": "torch"}, "backend: 'torch'"),
        ({"slots": 4, "phase": "both"}, "phase: expected None, 'prefill' or 'decode', got 'both'"),
        ({"slots": 4, "seed": 0.5}, "seed: 0.5"),
        ({"slots": 4, "row_bytes": 0}, "row_bytes: 0"),
        ({"slots": 4, "warm": "warm"}, "warm: reset='request' empties"),
        ({"slots": 4, "warm": 3, "reset": "never"}, "warm: 3 is neither"),
    ],
)
def test_bad_settings_are_named(keywords, message):
    with pytest.raises(ValueError, match=message):
        simulate(random_trace(0), "lru", **keywords)


def test_warm_refuses_another_run():
    trace = random_trace(0)
    cold = simulate(trace, "lru", slots=4, backend="numpy")
    with pytest.raises(ValueError, match="holds no end state"):
        simulate(trace, "lru", slots=4, reset="never", warm=cold)
    run = simulate(trace, "lru", slots=4, reset="never", backend="numpy")
    with pytest.raises(ValueError, match="had policy 'lru', this one 'lfu'"):
        simulate(trace, "lfu", slots=4, reset="never", warm=run)
    with pytest.raises(ValueError, match=r"had slots \[2, 2\], this one \[3, 2\]"):
        simulate(trace, "lru", slots=5, reset="never", warm=run)
    with pytest.raises(ValueError, match=r"had \[L, E\] = \(2, 5\), this trace \(2, 7\)"):
        simulate(random_trace(0, E=7), "lru", slots=4, reset="never", warm=run)


def test_other_refusals():
    trace = random_trace(0)
    with pytest.raises(ValueError, match="trace: expected a host_offload.trace.Trace, got str"):
        simulate("run.npz", "lru", slots=4)
    with pytest.raises(ValueError, match="capacities: expected at least one"):
        simulate_many(trace, ["lru"], [])
    late = make_trace(np.zeros((1, 2, 1), int), 5, step=[2**31 - 2])
    with pytest.raises(ValueError, match="beyond the int32 event clock"):
        simulate(late, "lru", slots=4, backend="numpy")
    assert slot_capacities(3, 8, slots=7).tolist() == [3, 2, 2]
    assert slot_capacities(3, 8, slots_per_layer=2, scope="global").tolist() == [6, 6, 6]


def test_an_empty_trace_counts_nothing():
    empty = make_trace(np.zeros((0, 2, 2), int), 5)
    for backend in ("numpy", "jax"):
        result = simulate(empty, "lru", slots=4, backend=backend)
        assert result.accesses == 0 and np.isnan(result.hit_rate)


# --------------------------------------------------------------------------------------------------------------- engine


@pytest.mark.slow
def test_the_engine_does_what_the_simulator_says(tiny, expected):
    from moe_jax import MoE

    prompt = expected("qwen3_moe")["input_ids"]
    config = {"cache_rate": 0.4, "progress": False, "max_batch": 1, "max_sequence_length": 64, "page_size": 16}
    with MoE(tiny("qwen3_moe"), config) as moe:
        L, seen = moe.stats()["experts"]["layers"], np.zeros((2, 4), int)
        for transport, policies in (("device", ("lru", "lfu", "lfru", "static")), ("callback", ("lfru",))):
            for policy in policies:
                for scope in SCOPES:
                    for contract in ATOMIC:
                        moe.set_cache(policy, transport=transport, scope=scope, contract=contract, cache_rate=0.3)
                        stats = []
                        for _ in range(2):  # the second call finds a warm cache and a policy that was told
                            moe.generate(prompt, max_new_tokens=13, eos_token_id=[], trace=True)
                            stats.append(moe.stats()["last"])
                        replayed = simulate(
                            moe.trace(),
                            policy,
                            slots=moe.stats()["slots"]["total"],
                            scope=scope,
                            contract=contract,
                            reset="never",
                            backend="jax" if policy == "lru" else "numpy",
                        )
                        for index, phase in enumerate(("prefill", "decode")):
                            for column, name in enumerate(("hits", "misses", "bypasses", "evictions")):
                                live = sum(np.array(s[phase]["per_layer"][name]) for s in stats)
                                assert live.shape == (L,)
                                seen[index, column] += live.sum()
                                np.testing.assert_array_equal(replayed.counters[index, :, column], live, err_msg=name)
                            assert replayed.in_phase(phase)["lookups"] == sum(s[phase]["lookups"] for s in stats)
        assert seen.all(), seen
