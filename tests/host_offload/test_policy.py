"""Policies: their formulas, the registry, and one compiled program for a sweep over a PolicySet."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from host_offload import policy as policy_module
from host_offload.plan import plan_event
from host_offload.policy import (
    LFU,
    LRU,
    Policy,
    PolicySet,
    StaticPin,
    fresh_state,
    get_policy,
    list_policies,
    register,
    set_row,
)

L, E = 2, 4


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(policy_module, "_REGISTRY", dict(policy_module._REGISTRY))


def run(xp, policy, events, state=None):
    """State after `events`, a list of (step, layer, needed experts)."""
    state = policy.init(xp, L, E, 0) if state is None else state
    for step, layer, experts in events:
        need = xp.asarray(np.isin(np.arange(E), experts))
        state = policy.observe(xp, state, layer, need, xp.zeros(E, xp.float32), step * L + layer)
    return state


def priorities(xp, policy, state, layer, t):
    expert = xp.arange(E, dtype=xp.int32)
    value = policy.priority(xp, state, xp.full_like(expert, layer), expert, t)
    assert value.dtype == xp.float32
    return np.asarray(value).tolist()


EVENTS = [(0, 0, [0, 1]), (0, 1, [3]), (1, 0, [1]), (2, 0, [1, 2]), (2, 1, [3])]


@pytest.mark.parametrize("xp", [np, jnp])
def test_formulas(xp):
    t = 3 * L  # start of step 3
    access = run(xp, get_policy("lru"), EVENTS)
    # Layer 0: expert 0 once at t=0; 1 at t=0, 2, 4; 2 at t=4; 3 never.
    assert priorities(xp, get_policy("lru"), access, 0, t) == [-6, -2, -2, -7]
    assert priorities(xp, get_policy("lfu"), access, 0, t) == [1, 3, 1, 0]
    np.testing.assert_allclose(priorities(xp, get_policy("lfru"), access, 0, t), [1 / 4, 3 / 2, 1 / 2, 0])
    assert priorities(xp, get_policy("lfu"), access, 1, t) == [0, 0, 0, 2]


@pytest.mark.parametrize("xp", [np, jnp])
def test_reset_forgets_counts_but_not_recency(xp):
    for name in ("lru", "lfu", "lfru"):
        policy = get_policy(name)
        state = policy.reset(xp, run(xp, policy, EVENTS))
        assert priorities(xp, get_policy("lfu"), state, 0, 6) == [0, 0, 0, 0]
        assert priorities(xp, get_policy("lru"), state, 0, 6) == [-6, -2, -2, -7]


def test_lru_order_is_exact_late_in_a_run():
    late = 2**30  # float32 holds only multiples of 64 here: the clock itself would tie
    state = {"count": np.zeros((L, E), np.int32), "last": np.full((L, E), late, np.int32)}
    state["last"][0] = [late - 3, late - 1, late - 2, late]
    assert priorities(np, LRU(), state, 0, late) == [-3, -1, -2, 0]


def test_counts_are_integers_beyond_float32():
    state = {"count": np.full((L, E), 2**24, np.int32), "last": np.zeros((L, E), np.int32)}
    assert run(np, LFU(), [(5, 0, [1])], state)["count"][0].tolist() == [2**24, 2**24 + 1, 2**24, 2**24]


def test_numpy_state_is_updated_in_place_and_jax_state_is_not():
    state = LRU().init(np, L, E, 0)
    assert run(np, LRU(), EVENTS, state)["last"] is state["last"]
    traced = LRU().init(jnp, L, E, 0)
    run(jnp, LRU(), EVENTS, traced)
    assert (np.asarray(traced["last"]) == -1).all()


def test_set_row():
    array = np.zeros((2, 3), np.int32)
    assert set_row(np, array, 1, np.array([1, 2, 3])) is array and array[1].tolist() == [1, 2, 3]
    new = jax.jit(lambda a, layer: set_row(jnp, a, layer, jnp.ones(3, jnp.int32)))(array, 0)
    assert new.tolist() == [[1, 1, 1], [1, 2, 3]] and array[0].tolist() == [0, 0, 0]


def test_static_pin_default_keeps_the_lowest_ids():
    policy = get_policy("static")
    state = run(np, policy, EVENTS)
    assert priorities(np, policy, state, 1, 9) == [0, -1, -2, -3]


def test_static_pin_from_table_file_and_trace(tmp_path):
    table = np.arange(L * E).reshape(L, E)
    np.savez(tmp_path / "counts.npz", frequency=table)
    for policy in (get_policy("static", frequency=table), StaticPin(tmp_path / "counts.npz")):
        assert priorities(np, policy, policy.init(np, L, E, 0), 1, 0) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.zeros(3), r"non-negative \[L, E\] table, got shape \(3,\)"),
        (-np.ones((L, E)), "values -1.0 to -1.0"),
        (np.full((L, E), np.inf), "finite"),
    ],
)
def test_static_pin_refuses_bad_tables(table, message):
    with pytest.raises(ValueError, match=message):
        StaticPin(table)


def test_static_pin_refuses_another_models_table():
    with pytest.raises(ValueError, match=r"shape \(3, 4\), the model needs \[L, E\] = \(2, 4\)"):
        StaticPin(np.ones((3, 4))).init(np, L, E, 0)


def test_registry(registry):
    assert {"lfru", "lfu", "lru", "static"} < set(list_policies()) and list_policies() == sorted(list_policies())
    assert isinstance(get_policy("lru"), LRU) and isinstance(get_policy(LRU), LRU)
    instance = LRU()
    assert get_policy(instance) is instance
    with pytest.raises(
        ValueError, match=r"unknown name 'LRUU'. Did you mean 'lru'.*Known policies: 2q, arc, .*, static"
    ):
        get_policy("LRUU")
    with pytest.raises(TypeError, match="expected a name, a Policy subclass or instance, got 3"):
        get_policy(3)
    with pytest.raises(TypeError, match=r"'lru' is already built; parameters \['decay'\]"):
        get_policy(instance, decay=1)


def test_register(registry):
    def define():
        @register
        class Mine(LRU):
            name = "mine"

        return Mine

    first, again = define(), define()  # a notebook cell run twice
    assert first is not again and type(get_policy("mine")) is again

    class Thief(LRU):
        name = "mine"

    with pytest.raises(ValueError, match="policy name 'mine' is taken by .*Mine"):
        register(Thief)
    register(Thief, replace=True)
    assert type(get_policy("mine")) is Thief
    with pytest.raises(ValueError, match="`name` must be a non-empty string, got ''"):
        register(type("Nameless", (LRU,), {"name": ""}))
    with pytest.raises(TypeError, match="expected a subclass or an instance"):
        register(dict)


def test_policy_set_follows_the_selected_member():
    members = PolicySet(["lru", "lfu", "lfru", StaticPin(np.arange(L * E).reshape(L, E))])
    for xp in (np, jnp):
        state = run(xp, members, EVENTS)
        for name, policy in zip(members.names, members.policies, strict=True):
            state = members.with_selected(state, name)
            alone = priorities(xp, policy, run(xp, policy, EVENTS), 0, 6)
            assert priorities(xp, members, state, 0, 6) == alone
    assert sorted(state) == ["access", "select", "static"]  # lru, lfu and lfru share their statistics


def test_policy_set_resets_every_member():
    members = PolicySet(["static", "lfu"])
    state = members.with_selected(run(np, members, EVENTS), "lfu")
    state = members.reset(np, state)
    assert priorities(np, members, state, 0, 6) == [0, 0, 0, 0] and state["select"] == 1


def test_one_program_serves_a_sweep_and_agrees_with_numpy():
    members = PolicySet(["lru", "lfu", "lfru", "static"])
    rng = np.random.default_rng(0)

    @jax.jit
    def step(state, need, layer, t):
        state = members.observe(jnp, state, layer, need, jnp.zeros(E), t)
        grid = jnp.arange(L * E, dtype=jnp.int32)
        return state, members.priority(jnp, state, grid // E, grid % E, t)

    traced, ours = members.init(jnp, L, E, 0), members.init(np, L, E, 0)
    grid = np.arange(L * E, dtype=np.int32)
    for t in range(48):
        name = members.names[t // 12]
        traced, ours = members.with_selected(traced, name), members.with_selected(ours, name)
        need = rng.random(E) < 0.4
        traced, value = step(traced, need, t % L, t)
        ours = members.observe(np, ours, t % L, need, np.zeros(E, np.float32), t)
        np.testing.assert_array_equal(value, members.priority(np, ours, grid // E, grid % E, t))
    assert step._cache_size() == 1
    jax.tree.map(np.testing.assert_array_equal, ours, jax.tree.map(np.asarray, traced))


def test_policy_set_refuses_bad_members():
    with pytest.raises(ValueError, match="at least one"):
        PolicySet([])
    with pytest.raises(ValueError, match=r"names in a PolicySet must differ, got \['lru', 'lru'\]"):
        PolicySet(["lru", LRU()])
    with pytest.raises(ValueError, match="'lfuu' is not in this set. Did you mean 'lfu'.*Members: lru, lfu"):
        members = PolicySet(["lru", "lfu"])
        members.with_selected(members.init(np, L, E, 0), "lfuu")
    with pytest.raises(ValueError, match="'select' is reserved"):
        PolicySet([type("Clash", (LRU,), {"name": "select", "shares": None})()])


def test_a_researchers_policy_runs_in_the_plan():
    class Decayed(Policy):
        """Exponentially decayed router scores."""

        name = "decayed"

        def init(self, xp, L, E, seed):
            return {"score": xp.zeros((L, E), xp.float32)}

        def observe(self, xp, state, layer, need, scores, t):
            return {"score": set_row(xp, state["score"], layer, 0.5 * state["score"][layer] + scores)}

        def priority(self, xp, state, layer, expert, t):
            return state["score"][layer, expert]

    policy = Decayed()
    for xp in (np, jnp):
        slot_of = xp.full((L, E), -1, xp.int32)
        state = policy.init(xp, L, E, 0)
        need = xp.asarray([True, True, True, False])
        state = policy.observe(xp, state, 0, need, xp.asarray([0.1, 0.6, 0.3, 0.0], xp.float32), 0)
        plan = plan_event(
            xp,
            need=need,
            slot_of=slot_of,
            owner=xp.full(E, -1, xp.int32),
            priority=partial(policy.priority, xp, state),
            layer=0,
            capacity=2,
            global_scope=False,
            forced_admit=False,
            t=0,
        )
        assert np.asarray(plan.admit).tolist() == [False, True, True, False]


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            lambda zeros: [zeros],
            "policy 'careless': its state must be a dict of arrays, and state is of type list: return a dict",
        ),
        (lambda zeros: {"a": zeros, "n": 0}, r"and state\['n'\] is of type int: make a number an array"),
        (lambda zeros: {"a": {"b": zeros, "c": None}}, r"and state\['a'\]\['c'\] is of type NoneType"),
    ],
)
def test_a_state_of_other_things_than_arrays_is_refused(xp, state, message):
    class Careless(LRU):
        name = "careless"

        def init(self, xp, L, E, seed):
            return state(xp.zeros((L, E)))

    with pytest.raises(TypeError, match=message):
        fresh_state(Careless(), xp, L, E, 0, np.full(L, 2), False)

    class HostOnly(Careless):
        host_only = True

    assert fresh_state(HostOnly(), np, L, E, 0, np.full(L, 2), False) is not None


def test_policies_do_not_import_jax():
    code = "import sys, host_offload.policy, host_offload.plan, host_offload.trace; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
