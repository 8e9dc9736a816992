"""The slot plan kernel with a policy inside decides and counts as the NumPy policy and plan do, to the last bit."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.plan import apply, plan_event
from host_offload.policies.decayed import DecayedLFU
from host_offload.policies.layer_order import LayerAwareLRU
from host_offload.policy import (
    LFRU,
    LFU,
    LRU,
    ElementwisePolicy,
    PolicySet,
    StaticPin,
    get_policy,
    is_elementwise,
    list_policies,
)
from pallas_kernels.slot_plan import slot_plan

L, E, PAIRS = 3, 5, 6
ROWS = L * E + min(E, PAIRS)
RANKS = np.random.default_rng(1).integers(0, 4, (L, E)) / 4

POLICIES = {
    "lru": LRU(),
    "lfu": LFU(),
    "lfu-persistent": get_policy("lfu-persistent"),
    "lfru": LFRU(),
    "static": StaticPin(RANKS),
    "lfu-decayed": DecayedLFU(0.7),
    "set": PolicySet([LRU(), LFU(), LFRU(), StaticPin(RANKS), DecayedLFU(0.7)]),
}


class Host:
    """A cache run by NumPy."""

    def __init__(self, policy, select=None):
        self.policy = policy
        self.state = policy.init(np, L, E, 0)
        if select:
            self.state = policy.with_selected(self.state, select)
        self.slot_of, self.owner = np.full((L, E), -1, np.int32), np.full(ROWS, -1, np.int32)

    def event(self, need, layer, t, **settings):
        self.state = self.policy.observe(np, self.state, layer, need, np.zeros(E, np.float32), t)
        priority = functools.partial(self.policy.priority, np, self.state)
        plan = plan_event(
            np, need=need, slot_of=self.slot_of, owner=self.owner, priority=priority, layer=layer, t=t, **settings
        )
        apply(np, plan, self.slot_of, self.owner)


def flat(state):
    return {k: flat(v) if isinstance(v, dict) else np.asarray(v).tolist() for k, v in state.items()}


def run_both(policy, events, select=None, first_step=0, **settings):
    """Both caches through `events` of (ids, live); tables and the policy's state must agree after each."""
    host = Host(policy, select)
    state = policy.init(jnp, L, E, 0)
    if select:
        state = policy.with_selected(state, select)
    tables = (
        jnp.asarray(host.slot_of.reshape(-1)),
        jnp.asarray(host.owner),
        jnp.zeros(4 * L, jnp.int32),
        jnp.zeros(1, jnp.int32),
    )
    control = np.full(L + 2, settings["capacity"], np.int32)
    control[L:] = settings["global_scope"], settings["forced_admit"]
    for i, (ids, live) in enumerate(events):
        step, layer = first_step + i // L, i % L
        ids, live = np.asarray(ids, np.int32), np.asarray(live, bool)
        need = np.isin(np.arange(E), ids[live])
        host.event(need, layer, np.int32(step * L + layer), **settings)
        _, tables, state = slot_plan(
            *map(jnp.asarray, (ids, live.astype(np.int32), control)),
            None,
            *tables,
            layer=layer,
            policy=policy,
            state=state,
            step=jnp.int32(step),
            interpret=True,
        )
        np.testing.assert_array_equal(tables[0].reshape(L, E), host.slot_of)
        np.testing.assert_array_equal(tables[1], host.owner)
        assert flat(state) == flat(host.state)
    return host


def random_events(count, seed=3):
    rng = np.random.default_rng(seed)
    return [(rng.integers(0, E, PAIRS), rng.random(PAIRS) < 0.8) for _ in range(count)]


@pytest.mark.parametrize("name, global_scope", [*((name, False) for name in POLICIES if name != "set"), ("set", True)])
def test_equals_numpy(name, global_scope):
    settings = dict(capacity=5 if global_scope else 2, global_scope=global_scope, forced_admit=False)
    host = run_both(POLICIES[name], random_events(15), **settings)
    assert np.count_nonzero(host.owner >= 0) == (5 if global_scope else 2 * L)


@pytest.mark.parametrize("member", POLICIES["set"].names)
def test_a_set_follows_its_selected_member(member):
    settings = dict(capacity=2, global_scope=False, forced_admit=False)
    events = random_events(12, seed=4)
    of_set = run_both(POLICIES["set"], events, select=member, **settings)
    alone = run_both(POLICIES[member], events, **settings)
    np.testing.assert_array_equal(of_set.slot_of, alone.slot_of)


@settings(deadline=None, max_examples=15)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, E - 1), min_size=PAIRS, max_size=PAIRS),
            st.lists(st.booleans(), min_size=PAIRS, max_size=PAIRS),
        ),
        min_size=1,
        max_size=9,
    ),
    st.integers(0, L * E),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**24),
)
def test_random_events_of_a_set(events, capacity, global_scope, forced_admit, first_step):
    run_both(
        POLICIES["set"],
        events,
        select="lfru",
        first_step=first_step,
        capacity=capacity,
        global_scope=global_scope,
        forced_admit=forced_admit,
    )


def test_which_policies_are_elementwise():
    found = {name for name in list_policies() if is_elementwise(get_policy(name))}
    assert found == {"lru", "lfu", "lfu-persistent", "lfru", "lfu-decayed", "static"}
    assert is_elementwise(PolicySet(["lru", "static"])) and not is_elementwise(PolicySet(["lru", "mrs"]))
    assert not is_elementwise(LayerAwareLRU())  # inherits LRU's accounts, but ranks in its own way


class ChangesScalar(ElementwisePolicy):
    name = "changes-scalar"

    def init(self, xp, L, E, seed):
        return {"count": xp.zeros((L, E), xp.int32), "events": xp.zeros((), xp.int32)}

    def seen(self, xp, own, need, t):
        return {**own, "events": own["events"] + 1}

    def worth(self, xp, own, t, L):
        return own["count"].astype(xp.float32)


class Wide(ChangesScalar):
    name = "wide"

    def init(self, xp, L, E, seed):
        return {"count": xp.zeros((L, E + 1), xp.int32)}


@pytest.mark.parametrize(
    "policy, error, message",
    [(ChangesScalar(), TypeError, "changes a scalar"), (Wide(), ValueError, r"\(3, 6\), must be a scalar or \(3, 5\)")],
)
def test_states_that_the_kernel_cannot_keep(policy, error, message):
    i32 = functools.partial(jnp.zeros, dtype=jnp.int32)
    with pytest.raises(error, match=message):
        slot_plan(
            *(i32(n) for n in (PAIRS, PAIRS, L + 2)),
            None,
            *(i32(n) for n in (L * E, ROWS, 4 * L, 1)),
            layer=0,
            policy=policy,
            state=policy.init(jnp, L, E, 0),
            step=i32(()),
            interpret=True,
        )


def test_a_scalar_that_changes_is_refused_everywhere():
    policy = ChangesScalar()
    with pytest.raises(TypeError, match="changes the scalar 'events'"):
        policy.observe(np, policy.init(np, L, E, 0), 0, np.zeros(E, bool), np.zeros(E, np.float32), 0)
