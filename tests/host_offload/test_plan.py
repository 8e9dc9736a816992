"""The slot plan: against a brute-force statement of the two contracts, and NumPy against compiled JAX."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload import plan as plan_module
from host_offload.plan import Plan, apply, check_invariants, plan_event

L, E = 3, 5
ROWS = L * E + E  # enough for any state and any event
TIES_AND_ODDITIES = [0.0, -0.0, 1.0, 2.0, -1.0, 1e-40, -1e-40, math.inf, -math.inf, math.nan]


@st.composite
def events(draw):
    """A consistent state of random fill, an event, and priorities full of ties and odd values."""
    ids = draw(st.lists(st.integers(0, L * E - 1), unique=True, max_size=L * E))
    rows = draw(st.permutations(range(ROWS)))[: len(ids)]
    slot_of, owner = np.full((L, E), -1, np.int32), np.full(ROWS, -1, np.int32)
    slot_of.reshape(-1)[ids] = rows
    owner[rows] = ids
    return {
        "need": np.array(draw(st.lists(st.booleans(), min_size=E, max_size=E))),
        "slot_of": slot_of,
        "owner": owner,
        "table": np.array(
            draw(st.lists(st.sampled_from(TIES_AND_ODDITIES), min_size=L * E, max_size=L * E)), np.float32
        ).reshape(L, E),
        "layer": draw(st.integers(0, L - 1)),
        "capacity": draw(st.integers(0, L * E)),
        "global_scope": draw(st.booleans()),
        "forced_admit": draw(st.booleans()),
    }


def plan_numpy(event):
    arguments = {name: value for name, value in event.items() if name != "table"}
    return plan_event(np, priority=lambda layer, expert, t: event["table"][layer, expert], t=0, **arguments)


def kept_by_definition(event):
    """The set of ids that stays, spelled out: sort all candidates by the contract and take the first `capacity`."""
    base, need = event["layer"] * E, event["need"]
    residents = {int(i) for i in event["owner"] if i >= 0}
    if not event["global_scope"]:
        residents = {i for i in residents if i // E == event["layer"]}
    needed = {base + int(e) for e in np.flatnonzero(need)}

    def by_priority(i):
        value = float(event["table"][i // E, i % E])
        return (math.isnan(value), -value if not math.isnan(value) else 0.0, i)

    ranked = sorted(residents | needed, key=by_priority)
    if event["forced_admit"]:
        processed = sorted(needed & residents) + sorted(needed - residents)
        ranked = processed[::-1] + [i for i in ranked if i not in needed]
    return set(ranked[: event["capacity"]]), residents, needed


@settings(deadline=None, max_examples=300)
@given(events())
def test_plan_keeps_what_the_contract_defines(event):
    kept, residents, needed = kept_by_definition(event)
    plan = plan_numpy(event)
    base = event["layer"] * E
    missing = needed - residents
    assert {base + int(e) for e in np.flatnonzero(plan.hit)} == needed & residents
    assert {base + int(e) for e in np.flatnonzero(plan.miss)} == missing
    assert {base + int(e) for e in np.flatnonzero(plan.admit)} == missing & kept
    assert {base + int(e) for e in np.flatnonzero(plan.bypass)} == missing - kept
    assert set(np.flatnonzero(plan.evict).tolist()) == residents - kept
    assert plan.n_evicted == len(residents - kept)
    free = np.flatnonzero(event["owner"] < 0)
    assert plan.dest[plan.miss].tolist() == free[: len(missing)].tolist()
    assert (plan.dest[~plan.miss] == -1).all()


@settings(deadline=None, max_examples=200)
@given(events())
def test_apply_leaves_a_consistent_state(event):
    kept, residents, _ = kept_by_definition(event)
    before = event["slot_of"].copy()
    plan = plan_numpy(event)
    slot_of, owner = apply(np, plan, event["slot_of"], event["owner"])
    assert slot_of is event["slot_of"] and owner is event["owner"]
    check_invariants(slot_of, owner)
    in_scope = (
        owner[owner >= 0]
        if event["global_scope"]
        else event["layer"] * E + np.flatnonzero(slot_of[event["layer"]] >= 0)
    )
    assert set(in_scope.tolist()) == kept and len(kept) <= event["capacity"]
    stayed = (before >= 0) & (slot_of >= 0)
    assert (before[stayed] == slot_of[stayed]).all()  # nothing moves between rows
    if not event["global_scope"]:
        others = np.arange(L) != event["layer"]
        assert (before[others] == slot_of[others]).all()


@functools.cache
def compiled(static_scope):
    def step(table, need, slot_of, owner, layer, capacity, global_scope, forced_admit):
        plan = plan_event(
            jnp,
            need=need,
            slot_of=slot_of,
            owner=owner,
            priority=lambda layer, expert, t: table[layer, expert],
            layer=layer,
            capacity=capacity,
            global_scope=global_scope,
            forced_admit=forced_admit,
            t=0,
        )
        return plan, apply(jnp, plan, slot_of, owner)

    return jax.jit(step, static_argnames="global_scope" if static_scope else ())


@pytest.mark.parametrize("pairwise", [True, False])
@pytest.mark.parametrize("static_scope", [True, False])
def test_jax_and_numpy_agree_without_recompiling(monkeypatch, static_scope, pairwise):
    monkeypatch.setattr(plan_module, "PAIRWISE_LIMIT", L * E if pairwise else 1)
    compiled.cache_clear()
    program = compiled(static_scope)

    @settings(deadline=None, max_examples=100)
    @given(events())
    def agree(event):
        # The program must not see the arrays that NumPy updates in place below.
        traced, (slot_of, owner) = program(
            **{k: v.copy() if isinstance(v, np.ndarray) else v for k, v in event.items()}
        )
        traced, slot_of, owner = jax.tree.map(np.asarray, (traced, slot_of, owner))
        plan = plan_numpy(event)
        for name, ours, theirs in zip(Plan._fields, plan, traced, strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg=name)
        apply(np, plan, event["slot_of"], event["owner"])
        np.testing.assert_array_equal(slot_of, event["slot_of"])
        np.testing.assert_array_equal(owner, event["owner"])

    agree()
    assert program._cache_size() == (2 if static_scope else 1)


def test_static_layer_gives_the_same_program_result():
    slot_of, owner = np.full((L, E), -1, np.int32), np.full(ROWS, -1, np.int32)
    need = np.array([True, False, True, False, True])

    def step(need, slot_of, owner):
        plan = plan_event(
            jnp,
            need=need,
            slot_of=slot_of,
            owner=owner,
            priority=lambda layer, expert, t: -expert.astype(jnp.float32),
            layer=1,
            capacity=2,
            global_scope=False,
            forced_admit=False,
            t=0,
        )
        return plan.dest, apply(jnp, plan, slot_of, owner)

    dest, (slot_of, owner) = jax.jit(step)(need, slot_of, owner)
    assert dest.tolist() == [0, -1, 1, -1, 2]
    assert owner[:3].tolist() == [E, E + 2, -1]  # expert 4 was bypassed, its row stays free
    check_invariants(slot_of, owner)


def event_of(need, resident, capacity, forced_admit, E=4):
    """One layer whose residents own the first rows."""
    slot_of, owner = np.full((1, E), -1, np.int32), np.full(2 * E, -1, np.int32)
    slot_of[0, resident] = np.arange(len(resident))
    owner[: len(resident)] = resident
    mask = np.isin(np.arange(E), need)
    return plan_event(
        np,
        need=mask,
        slot_of=slot_of,
        owner=owner,
        priority=lambda layer, expert, t: expert.astype(np.float32),
        layer=0,
        capacity=capacity,
        global_scope=False,
        forced_admit=forced_admit,
        t=0,
    )


def test_more_needed_than_slots_keeps_the_last_processed():
    # Processed: hit 3, then the misses 0, 1, 2; the last two of them stay although 3 has the highest priority.
    plan = event_of(need=[0, 1, 2, 3], resident=[3], capacity=2, forced_admit=True)
    assert np.flatnonzero(plan.admit).tolist() == [1, 2]
    assert np.flatnonzero(plan.bypass).tolist() == [0]
    assert np.flatnonzero(plan.evict).tolist() == [3]


def test_bypass_and_forced_admit_differ_on_a_poor_expert():
    assert np.flatnonzero(event_of([0], [2, 3], 2, forced_admit=False).bypass).tolist() == [0]
    assert np.flatnonzero(event_of([0], [2, 3], 2, forced_admit=True).evict).tolist() == [2]


@pytest.mark.parametrize("xp", (np, jnp))
@pytest.mark.parametrize("global_scope", (False, True))
def test_priorities_of_another_number_are_refused(xp, global_scope):
    slot_of, owner = np.full((2, 4), -1, np.int32), np.full(6, -1, np.int32)
    with pytest.raises(ValueError, match=r"priority: has shape \(1,\), must be \([348],\)"):
        plan_event(
            xp,
            need=xp.array([True, True, True, False]),
            slot_of=xp.array(slot_of),
            owner=xp.array(owner),
            priority=lambda layer, expert, t: xp.zeros(1),
            layer=0,
            capacity=2,
            global_scope=global_scope,
            forced_admit=False,
            t=0,
        )


def test_zero_capacity_empties_the_layer():
    for forced_admit in (False, True):
        plan = event_of([0, 2], [2, 3], 0, forced_admit)
        assert not plan.admit.any() and np.flatnonzero(plan.evict).tolist() == [2, 3]


def test_priority_is_not_asked_when_everything_fits():
    slot_of, owner = np.array([[0, -1]], np.int32), np.array([0, -1], np.int32)

    def priority(layer, expert, t):
        raise AssertionError("nothing to rank")

    plan = plan_event(
        np,
        need=np.array([True, True]),
        slot_of=slot_of,
        owner=owner,
        priority=priority,
        layer=0,
        capacity=2,
        global_scope=True,
        forced_admit=False,
        t=0,
    )
    assert plan.admit.tolist() == [False, True] and plan.dest.tolist() == [-1, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"owner": np.array([0, 1], np.int32)}, "misses 2 experts but only 0 of 2 rows are free"),
        ({"capacity": -1}, "capacity: -1 is negative"),
        ({"layer": 1}, "layer: 1 is outside 0..0"),
        ({"need": np.ones(3, bool)}, r"need: expected bool of shape \(4,\)"),
        ({"need": np.ones(4, np.int32)}, "need: expected bool"),
        ({"owner": np.full(8, -1)}, "owner and slot_of: expected int32"),
    ],
)
def test_bad_input_is_named(change, message):
    event = {
        "need": np.array([False, False, True, True]),
        "slot_of": np.array([[0, 1, -1, -1]], np.int32),
        "owner": np.array([0, 1, -1, -1], np.int32),
        "layer": 0,
        "capacity": 2,
    }
    with pytest.raises(ValueError, match=message):
        plan_event(np, priority=None, global_scope=False, forced_admit=False, t=0, **(event | change))


@pytest.mark.parametrize(
    ("slot_of", "owner", "message"),
    [
        ([[0, -1]], [0, 0], r"layer 0 expert 0 owns several rows: \[0, 1\]"),
        ([[0, 1]], [0, -1], "layer 0 expert 1: slot_of says row 1, owner says -1"),
        ([[-1, -1]], [-1, 1], "layer 0 expert 1: slot_of says row -1, owner says 1"),
        ([[2, -1]], [-1, -1], r"slot_of: entry 0 is 2, outside -1..1"),
        ([[-1, -1]], [2, -1], r"owner: entry 0 is 2, outside -1..1"),
    ],
)
def test_check_invariants_says_what_is_wrong(slot_of, owner, message):
    with pytest.raises(ValueError, match=message):
        check_invariants(np.array(slot_of, np.int32), np.array(owner, np.int32))
