"""The rounds of a prefill event: executed step by step on labelled rows, with moves as early and as late as allowed."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.plan import apply, check_invariants, plan_event
from host_offload.schedule import max_rounds, schedule_rounds

L, E = 2, 8


@st.composite
def events(draw):
    """A consistent state within its capacity, an event, priorities with ties, and a round size."""
    group = draw(st.integers(1, E))
    capacity = draw(st.integers(0, L * E))
    global_scope = draw(st.booleans())
    layer = draw(st.integers(0, L - 1))
    ids = draw(st.permutations(range(L * E)))
    if not draw(st.booleans()):  # else the cache is full, so that rows of evicted experts are needed
        ids = ids[: draw(st.integers(0, L * E))]
    kept, count = [], {0: 0, 1: 0}
    for i in ids:
        if (len(kept) if global_scope else count[i // E]) < capacity:
            kept.append(i)
            count[i // E] += 1
    slots = capacity if global_scope else L * capacity
    rows = slots + 2 * group
    placed = draw(st.permutations(range(rows)))[: len(kept)]
    slot_of, owner = np.full((L, E), -1, np.int32), np.full(rows, -1, np.int32)
    slot_of.reshape(-1)[kept] = placed
    owner[placed] = kept
    return {
        "need": np.array(draw(st.lists(st.booleans(), min_size=E, max_size=E))),
        "slot_of": slot_of,
        "owner": owner,
        "table": np.array(draw(st.lists(st.integers(0, 3), min_size=L * E, max_size=L * E)), np.float32).reshape(L, E),
        "layer": layer,
        "capacity": capacity,
        "global_scope": global_scope,
        "forced_admit": draw(st.booleans()),
        "group": group,
    }


def planned(xp, event):
    """(plan, schedule) of an event."""
    table = xp.asarray(event["table"])
    state = {name: xp.asarray(event[name]) for name in ("need", "slot_of", "owner")}
    plan = plan_event(
        xp,
        **state,
        priority=lambda layer, expert, t: table[layer, expert],
        layer=event["layer"],
        capacity=event["capacity"],
        global_scope=event["global_scope"],
        forced_admit=event["forced_admit"],
        t=0,
        assign_rows=False,
    )
    return plan, schedule_rounds(xp, plan, **state, group=event["group"])


@settings(deadline=None, max_examples=300)
@given(events(), st.booleans())
def test_every_expert_is_in_its_row_when_it_is_computed(event, move_early):
    """Moves of round r + 1 run beside the compute of round r: before all of it and after all of it must be right."""
    plan, order = planned(np, event)
    layer, group, need = event["layer"], event["group"], event["need"]
    bank = event["owner"].copy()  # label of what lies in each row
    computed, moved = [], []

    def span(r):
        return range(order.bounds[r], order.bounds[r + 1])

    def move(r):
        for p in span(r):
            if order.src[p] >= 0:
                bank[order.row[p]] = layer * E + order.src[p]
                moved.append(int(order.src[p]))

    expert_at = np.argsort(order.position)
    assert not any(order.src[p] >= 0 for p in span(0)), "nothing can have arrived before round 0"
    assert order.rounds <= max_rounds(E, group)
    for r in range(order.rounds):
        if move_early:
            move(r + 1)
        for p in span(r):
            assert bank[order.row[p]] == layer * E + expert_at[p], f"round {r}"
            computed.append(int(expert_at[p]))
        if not move_early:
            move(r + 1)
    assert sorted(computed) == np.flatnonzero(need).tolist()
    assert sorted(moved) == np.flatnonzero(plan.miss).tolist(), "each missing expert moves exactly once"

    slot_of, owner = event["slot_of"].copy(), event["owner"].copy()
    apply(np, plan._replace(dest=order.dest), slot_of, owner)
    check_invariants(slot_of, owner)
    occupied = np.flatnonzero(owner >= 0)
    np.testing.assert_array_equal(bank[occupied], owner[occupied])


@settings(deadline=None, max_examples=200)
@given(events())
def test_a_round_fetches_no_more_than_its_rows_hold(event):
    """Bypassed experts share 2G scratch rows, so at most G of them may arrive in one round."""
    plan, order = planned(np, event)
    expert_at = np.argsort(order.position)
    for r in range(order.rounds):
        arriving = [expert_at[p] for p in range(order.bounds[r], order.bounds[r + 1]) if order.src[p] >= 0]
        assert sum(bool(plan.bypass[e]) for e in arriving) <= event["group"]


@pytest.fixture(scope="module")
def jitted():
    """`planned` compiled; one program for all values of an event of the same shapes."""

    @partial(jax.jit, static_argnums=0)
    def run(group, event):
        return planned(jnp, event | {"group": group})

    return run


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31 - 1))
def test_numpy_and_compiled_jax_agree(jitted, seed):
    rng = np.random.default_rng(seed)
    group, capacity = 2, int(rng.integers(0, 9))
    rows = 16 + 2 * group
    ids = rng.permutation(L * E)[: rng.integers(0, capacity + 1)]
    slot_of, owner = np.full((L, E), -1, np.int32), np.full(rows, -1, np.int32)
    place = rng.permutation(rows)[: len(ids)]
    slot_of.reshape(-1)[ids] = place
    owner[place] = ids
    event = {
        "need": rng.random(E) < 0.6,
        "slot_of": slot_of,
        "owner": owner,
        "table": rng.integers(0, 3, (L, E)).astype(np.float32),
        "layer": np.int32(rng.integers(L)),
        "capacity": np.int32(capacity),
        "global_scope": np.bool_(rng.random() < 0.5),
        "forced_admit": np.bool_(rng.random() < 0.5),
    }
    _, wanted = planned(np, event | {"group": group, "global_scope": bool(event["global_scope"])})
    _, got = jitted(group, event)
    rounds = int(wanted.rounds)
    assert int(got.rounds) == rounds
    served = wanted.bounds[rounds]
    for name in ("position", "row", "src"):
        np.testing.assert_array_equal(getattr(got, name)[:served], getattr(wanted, name)[:served], err_msg=name)
    np.testing.assert_array_equal(got.dest, wanted.dest)
    np.testing.assert_array_equal(got.bounds, wanted.bounds)


def test_hits_fill_all_rounds_evenly():
    """Ten hits and eight misses in rounds of two: the hits are spread over the five rounds, not spent in the first."""
    many = 18
    slot_of = np.full((1, many), -1, np.int32)
    slot_of[0, :10] = np.arange(10)
    owner = np.concatenate([np.arange(10), np.full(12, -1)]).astype(np.int32)
    need = np.ones(many, bool)
    plan = plan_event(
        np,
        need=need,
        slot_of=slot_of,
        owner=owner,
        priority=lambda layer, expert, t: -expert.astype(np.float32),
        layer=0,
        capacity=10,
        global_scope=False,
        forced_admit=False,
        t=0,
        assign_rows=False,
    )
    order = schedule_rounds(np, plan, need, slot_of, owner, group=2)
    expert_at = np.argsort(order.position)
    assert order.rounds == 5
    hits = [sum(expert_at[p] < 10 for p in range(order.bounds[r], order.bounds[r + 1])) for r in range(5)]
    assert hits == [2, 2, 2, 2, 2]


@pytest.mark.parametrize("experts, group, rounds", ((8, 8, 3), (8, 4, 4), (8, 3, 5), (8, 1, 10), (1, 1, 3)))
def test_bound_of_rounds(experts, group, rounds):
    assert max_rounds(experts, group) == rounds
