"""The slot plan kernel decides every event as `host_offload.plan` does, entry by entry and state by state."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.plan import apply, check_invariants, plan_event
from pallas_kernels.slot_plan import slot_plan

# Ties everywhere, and what floats are odd at: -0 equals +0, subnormals count, NaN is below -inf.
PRIORITIES = [0.0, -0.0, 1.0, 1.0, 2.0, -1.0, 1e-40, -1e-40, 3e38, math.inf, -math.inf, math.nan]

# (L, E, pairs): L * E and the number of pairs a power of two, and not.
SHAPES = [(3, 5, 6), (2, 8, 4)]


class Cache:
    """The same slot state twice: as the kernel updates it, and as `plan_event` and `apply` do."""

    def __init__(self, L, E, pairs):
        self.L, self.E, self.pairs = L, E, pairs
        self.rows = L * E + min(E, pairs)
        self.slot_of = np.full((L, E), -1, np.int32)
        self.owner = np.full(self.rows, -1, np.int32)
        self.counters = np.zeros((L, 4), np.int32)
        self.device = (
            jnp.asarray(self.slot_of.reshape(-1)),
            jnp.asarray(self.owner),
            jnp.zeros(4 * L, jnp.int32),
            jnp.zeros(1, jnp.int32),
        )

    def event(self, ids, live, priority, layer, capacity, global_scope=False, forced_admit=False):
        """Runs one event both ways, compares all that the kernel returns, and gives back the `Plan`."""
        ids, live, priority = np.asarray(ids, np.int32), np.asarray(live, bool), np.asarray(priority, np.float32)
        need = np.zeros(self.E, bool)
        need[ids[live]] = True
        plan = plan_event(
            np,
            need=need,
            slot_of=self.slot_of,
            owner=self.owner,
            priority=lambda layer, expert, t: priority[layer * self.E + expert],
            layer=layer,
            capacity=capacity,
            global_scope=global_scope,
            forced_admit=forced_admit,
            t=0,
        )
        # A layer's own capacity must be read: the other layers' entries are wrong on purpose.
        control = np.full(self.L + 2, capacity + 1, np.int32)
        control[layer], control[self.L :] = capacity, (global_scope, forced_admit)
        entries, self.device, _ = slot_plan(
            *map(jnp.asarray, (ids, live.astype(np.int32), control, priority)),
            *self.device,
            layer=layer,
            interpret=True,
        )
        entries = {name: np.asarray(value) for name, value in entries.items()}

        wanted = np.flatnonzero(need)
        count = int(entries["count"][0])
        assert count == len(wanted)
        row = np.where(plan.miss, plan.dest, self.slot_of[layer])[wanted]
        np.testing.assert_array_equal(entries["rows"][:count], row)
        np.testing.assert_array_equal(entries["src"][:count], np.where(plan.miss, np.arange(self.E), -1)[wanted])
        np.testing.assert_array_equal(entries["deposit"][:count], plan.admit[wanted])
        np.testing.assert_array_equal(wanted[entries["entry"][live]], ids[live])
        np.testing.assert_array_equal(entries["entry"][~live], 0)

        self.counters[layer] += [plan.hit.sum(), plan.miss.sum(), plan.bypass.sum(), plan.n_evicted]
        apply(np, plan, self.slot_of, self.owner)
        slot_of, owner, counters, resident = map(np.asarray, self.device)
        np.testing.assert_array_equal(slot_of.reshape(self.L, self.E), self.slot_of)
        np.testing.assert_array_equal(owner, self.owner)
        np.testing.assert_array_equal(counters.reshape(self.L, 4), self.counters)
        assert resident.tolist() == [np.count_nonzero(self.owner >= 0)]
        check_invariants(slot_of.reshape(self.L, self.E), owner)
        return plan


@st.composite
def event_lists(draw, L, E, pairs):
    """Events with duplicate and dead pairs, a capacity that moves up and down, and priorities full of ties."""
    event = st.fixed_dictionaries(
        {
            "ids": st.lists(st.integers(0, E - 1), min_size=pairs, max_size=pairs),
            "live": st.lists(st.sampled_from([True, True, True, False]), min_size=pairs, max_size=pairs),
            "priority": st.lists(st.sampled_from(PRIORITIES), min_size=L * E, max_size=L * E),
            "layer": st.integers(0, L - 1),
            "capacity": st.integers(0, L * E),
            "global_scope": st.booleans(),
            "forced_admit": st.booleans(),
        }
    )
    return draw(st.lists(event, min_size=1, max_size=12))


@pytest.mark.parametrize("shape", SHAPES)
def test_random_events_equal_the_host_plan(shape):
    @settings(deadline=None, max_examples=60)
    @given(event_lists(*shape))
    def run(events):
        cache = Cache(*shape)
        for event in events:
            cache.event(**event)

    run()


@pytest.mark.parametrize("global_scope", [False, True])
@pytest.mark.parametrize("forced_admit", [False, True])
def test_long_run_of_a_small_cache(global_scope, forced_admit):
    """A steady state of hits, misses and evictions: the capacity is fixed, and often below the number needed."""
    L, E, pairs = SHAPES[0]
    cache, rng = Cache(L, E, pairs), np.random.default_rng(7)
    capacity = 5 if global_scope else 2
    for step in range(30):
        cache.event(
            rng.integers(0, E, pairs),
            rng.random(pairs) < 0.9,
            rng.integers(0, 4, L * E),
            step % L,
            capacity,
            global_scope,
            forced_admit,
        )
    assert cache.counters.sum(axis=0).min() > 0 or forced_admit
    assert np.count_nonzero(cache.owner >= 0) == (capacity if global_scope else capacity * L)


@pytest.fixture
def cache():
    """Layer 0 holds experts 0..3 of 5, layer 1 expert 0."""
    cache = Cache(*SHAPES[0])
    everyone = functools.partial(cache.event, priority=np.zeros(15), capacity=15)
    everyone(ids=[0, 1, 2, 3, 3, 3], live=[True] * 6, layer=0)
    everyone(ids=[0] * 6, live=[True] * 6, layer=1)
    return cache


def priorities(layer, values):
    table = np.zeros((3, 5))
    table[layer] = values
    return table.reshape(-1)


def residents(cache, layer=0):
    return np.flatnonzero(cache.slot_of[layer] >= 0).tolist()


ONE = [True] + [False] * 5


def test_hits_change_nothing_but_the_counters(cache):
    before = cache.slot_of.copy(), cache.owner.copy()
    cache.event([2, 1, 2, 1, 1, 1], [True] * 6, priorities(0, [1, 2, 3, 4, 5]), layer=0, capacity=4)
    np.testing.assert_array_equal(cache.slot_of, before[0])
    np.testing.assert_array_equal(cache.owner, before[1])
    assert cache.counters[0].tolist() == [2, 4, 0, 0]


def test_no_live_row_is_an_empty_event(cache):
    cache.event([4] * 6, [False] * 6, priorities(0, [1] * 5), layer=0, capacity=4)
    assert residents(cache) == [0, 1, 2, 3]


def test_ties_the_higher_number_leaves(cache):
    cache.event([0] + [4] * 5, ONE, priorities(0, [0] * 5), layer=0, capacity=3)
    assert residents(cache) == [0, 1, 2]
    cache.event([0] + [4] * 5, ONE, priorities(0, [0] * 5), layer=0, capacity=4, global_scope=True)
    assert (residents(cache), residents(cache, 1)) == ([0, 1, 2], [0])
    cache.event([0] + [4] * 5, ONE, priorities(0, [0] * 5), layer=0, capacity=3, global_scope=True)
    assert (residents(cache), residents(cache, 1)) == ([0, 1, 2], [])


@pytest.mark.parametrize("worst", [math.nan, -math.inf])
def test_nan_leaves_before_minus_infinity(cache, worst):
    """Expert 1 is NaN, and by its number expert 3 of -inf would lose a tie."""
    cache.event([0] * 6, ONE, priorities(0, [0, math.nan, 0, worst, 0]), layer=0, capacity=3)
    assert residents(cache) == ([0, 1, 2] if math.isnan(worst) else [0, 2, 3])


def test_negative_zero_ties_with_zero_and_subnormals_count(cache):
    cache.event([0] * 6, ONE, priorities(0, [1, -0.0, 0.0, 1e-45, 0]), layer=0, capacity=3)
    assert residents(cache) == [0, 1, 3]
    cache.event([0] * 6, ONE, priorities(0, [1, -1e-45, 0, 0.0, 0]), layer=0, capacity=2)
    assert residents(cache) == [0, 3]


def test_a_missing_expert_of_low_priority_is_bypassed_unless_admission_is_forced(cache):
    low = priorities(0, [1, 1, 1, 1, 0])
    plan = cache.event([4] * 6, ONE, low, layer=0, capacity=4)
    assert plan.bypass[4] and residents(cache) == [0, 1, 2, 3]
    plan = cache.event([4] * 6, ONE, low, layer=0, capacity=4, forced_admit=True)
    assert plan.admit[4] and residents(cache) == [0, 1, 2, 4]


def test_forced_admission_of_more_than_fit_keeps_the_last_processed(cache):
    """Hits go first, then misses, each ascending, whatever the priorities: of 0, 2, 3 (hits), 4 the last two stay."""
    need_four = dict(ids=[4, 3, 2, 0, 0, 0], live=[True] * 6, priority=priorities(0, [9, math.inf, 9, 0, math.nan]))
    cache.event(**need_four, layer=0, capacity=2, forced_admit=True)
    assert residents(cache) == [3, 4]


def test_a_shrunken_cache_gives_up_rows_at_its_next_event(cache):
    cache.event([3] * 6, ONE, priorities(0, [1, 2, 3, 4, 5]), layer=0, capacity=1)
    assert residents(cache) == [3]
    cache.event([3] * 6, ONE, priorities(0, [1, 2, 3, 4, 5]), layer=0, capacity=0)
    assert residents(cache) == []
