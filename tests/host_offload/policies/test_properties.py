"""What holds for every registered policy: NumPy and jax decide alike, state matches the cache, the engine runs it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_replay import Replay, compile_event

import host_offload.policies as policies
from host_offload.plan import check_invariants
from host_offload.policy import PolicySet, fresh_state, get_policy, list_policies

L, E = 2, 5
BUILT_IN = [n for n in list_policies() if type(get_policy(n)).__module__.startswith("host_offload.")]
ON_HOST = [name for name in BUILT_IN if get_policy(name).host_only]
COMPILED = [name for name in BUILT_IN if name not in ON_HOST]
compiled_event = functools.cache(compile_event)

caches = st.fixed_dictionaries(
    {"capacity": st.integers(1, 4), "global_scope": st.booleans(), "forced": st.booleans(), "seed": st.integers(0, 9)}
)


def events(seed, n=24):
    """`n` events of random experts, some of all and some of one, with scores as float16 has them."""
    rng = np.random.default_rng(seed)
    for index in range(n):
        need = rng.random(E) < rng.choice([0.2, 0.4, 0.9])
        need[rng.integers(E)] = True
        yield index % L, need, rng.random(E).astype(np.float16).astype(np.float32)


def follow(cache, seed):
    """Hits [n, E] of the events; checks after each that the tables are sound and the cache within its capacity."""
    hits = []
    for index, (layer, need, scores) in enumerate(events(seed)):
        if index == 14:
            cache.state = cache.policy.reset(cache.xp, cache.state)
        hits.append(cache.step(layer, need, scores))
        check_invariants(cache.slot_of, cache.owner)
        held = np.asarray(cache.slot_of) >= 0
        assert (held.sum() if cache.global_scope else held.sum(axis=1).max()) <= cache.capacity
        if cache.forced and need.sum() <= cache.capacity:
            assert held[layer][need].all()
    return np.array(hits)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
@settings(max_examples=6, deadline=None)
@given(cache=caches)
def test_numpy_and_jax_agree(name, cache):
    run = compiled_event(name)
    traced = Replay(name, L=L, E=E, xp=jnp, compiled=run, **cache)
    plain = Replay(name, L=L, E=E, **cache)
    np.testing.assert_array_equal(follow(traced, cache["seed"]), follow(plain, cache["seed"]))
    jax.tree.map(np.testing.assert_array_equal, plain.state, jax.tree.map(np.asarray, traced.state))
    grid = np.arange(L * E, dtype=np.int32)
    t = np.int32(traced.t)
    ours, theirs = (c.policy.priority(c.xp, c.state, grid // E, grid % E, t) for c in (plain, traced))
    assert ours.dtype == theirs.dtype == np.float32
    np.testing.assert_array_equal(np.asarray(theirs).view(np.int32), ours.view(np.int32))
    assert run._cache_size() == 1  # scope, contract and capacity are values


@pytest.mark.parametrize("name", ON_HOST)
@settings(max_examples=8, deadline=None)
@given(cache=caches)
def test_host_only_policies_keep_within_the_cache(name, cache):
    replay = Replay(name, L=L, E=E, **cache)
    assert follow(replay, cache["seed"]).any() or cache["capacity"] <= 2
    again = Replay(name, L=L, E=E, **cache)
    np.testing.assert_array_equal(follow(again, cache["seed"]), follow(Replay(name, L=L, E=E, **cache), cache["seed"]))
    if isinstance(replay.policy, policies.queues.QueuePolicy):  # the lists hold exactly who has a slot
        listed = [sorted(set().union(*queues.residents())) for queues in replay.state["queues"]]
        held = np.flatnonzero(np.asarray(replay.slot_of).reshape(-1) >= 0)
        assert sorted(sum(listed, [])) == held.tolist()


@pytest.mark.parametrize("name", ["clock", "sieve", "lfu-da"])
@settings(max_examples=10, deadline=None)
@given(cache=caches)
def test_a_scope_that_never_changes_decides_the_same(name, cache):
    fixed = Replay(name, L=L, E=E, **cache)
    capacity = np.full(L, cache["capacity"])
    fixed.state = fresh_state(fixed.policy, np, L, E, cache["seed"], capacity, cache["global_scope"])
    open_ = Replay(name, L=L, E=E, **cache)
    np.testing.assert_array_equal(follow(fixed, cache["seed"]), follow(open_, cache["seed"]))


@settings(max_examples=10, deadline=None)
@given(cache=caches)
def test_least_stale_is_lru(cache):
    runs = [follow(Replay(name, L=L, E=E, **cache), cache["seed"]) for name in ("lru", "least-stale")]
    np.testing.assert_array_equal(*runs)


@settings(max_examples=10, deadline=None)
@given(cache=caches)
def test_layer_aware_lru_is_lru_in_one_layer(cache):
    cache["global_scope"] = False
    runs = [follow(Replay(name, L=L, E=E, **cache), cache["seed"]) for name in ("lru", "lru-layer-aware")]
    np.testing.assert_array_equal(*runs)


def test_random_leaves_everybody_at_the_same_rate():
    policy = get_policy("random")
    state = policy.init(np, 2, 8, 3)
    grid = np.arange(16, dtype=np.int32)
    lowest = [int(np.argmin(policy.priority(np, state, grid // 8, grid % 8, np.int32(t)))) for t in range(3200)]
    counts = np.bincount(lowest, minlength=16)
    assert counts.min() > 140 and counts.max() < 260  # 200 each, four standard deviations are 55
    other = policy.init(np, 2, 8, 4)
    assert not np.array_equal(*(policy.priority(np, s, grid // 8, grid % 8, np.int32(5)) for s in (state, other)))


def test_a_set_tells_its_members_what_the_cache_holds():
    members = PolicySet(["fifo", "lru", "lfu-incache"])
    cache = Replay(members, L=1, E=4, capacity=2)
    cache.state = members.with_selected(cache.state, "lru")
    for expert in (0, 1, 0, 2, 3):
        cache.step(0, np.arange(4) == expert, np.zeros(4))
    held = np.asarray(cache.slot_of)[0] >= 0
    assert held.tolist() == [False, False, True, True]
    assert ((cache.state["fifo"]["since"][0] >= 0) == held).all()
    assert cache.state["lfu-incache"]["count"][0].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("name", ON_HOST)
def test_host_only_policies_refuse_a_compiled_program(name):
    for make in (
        lambda: get_policy(name).init(jnp, L, E, 0),
        lambda: fresh_state(get_policy(name), jnp, L, E, 0, 1, 0),
    ):
        with pytest.raises(ValueError, match=f"{name}.*on the host only.*transport 'callback'.*'numpy'"):
            make()


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("lfu-decayed", {"decay": 1.0}, "lfu-decayed policy: decay is 1.0, expected a number from 0 to 0.999"),
        ("lrfu", {"rate": 0}, "lrfu policy: rate is 0, expected a number from 0.001 to 1"),
        ("mrs", {"top": 0}, "mrs policy: top is 0, expected an integer of at least 1"),
        ("slru", {"protected": "most"}, "slru policy: protected is 'most'"),
        ("hobbit", {"weights": (1, 2)}, "weights has 2 numbers, expected 4"),
        ("hobbit", {"weights": (1, 0, 0, -1)}, r"weights\[3\] is -1"),
        ("moeinf_paper", {"collection": np.ones((2, 3))}, r"counts \[n, L, E\], got shape \(2, 3\)"),
        ("finemoe", {"maps": True}, "maps is True"),
    ],
)
def test_bad_parameters_are_named(name, parameters, message):
    with pytest.raises(ValueError, match=message):
        get_policy(name, **parameters)
