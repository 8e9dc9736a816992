"""Parts of the simulator's compiled back end: dealing of requests to lanes, the ranking as words, one trace a call."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload import bundled_trace, simulate_jax, simulate_many
from host_offload.plan import INF_BITS, NAN_KEY
from host_offload.policy import LRU


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=90), st.integers(1, 5))
def test_every_step_is_dealt_once_and_requests_stay_whole(lengths, parts):
    first = np.cumsum([0, *lengths[:-1]])
    table = SimpleNamespace(S=sum(lengths), start=np.isin(np.arange(sum(lengths)), first))
    dealt = simulate_jax._deal(table, SimpleNamespace(reset="request"), parts)
    assert dealt.shape[0] <= parts and dealt.shape[0] * dealt.shape[1] <= simulate_jax.MAX_LANES
    assert sorted(dealt[dealt >= 0].tolist()) == list(range(table.S))
    for lane in dealt.reshape(-1, dealt.shape[-1]):
        steps = lane[lane >= 0]
        assert (lane[len(steps) :] == -1).all()
        breaks = steps[1:][np.diff(steps) != 1]  # a lane goes on elsewhere only where a request begins
        assert table.start[breaks].all() and (len(steps) == 0 or table.start[steps[0]])


def test_equal_requests_leave_no_lane_idle():
    table = SimpleNamespace(S=120, start=np.arange(120) % 10 == 0)
    assert (simulate_jax._deal(table, SimpleNamespace(reset="request"), 2) >= 0).all()
    assert simulate_jax._deal(table, SimpleNamespace(reset="never"), 2).shape == (1, 1, 120)


@pytest.mark.parametrize("E", [1, 5, 32, 33, 70])
def test_ranking_by_words_is_the_ranking_by_pairs(E):
    rng = np.random.default_rng(E)
    extremes = np.array([NAN_KEY, NAN_KEY + 1, -INF_BITS, 0, 1, INF_BITS], np.int32)
    for key in (rng.integers(-3, 3, E).astype(np.int32), rng.choice(extremes, E)):
        mine, other, expert = key[:, None], key[None, :], np.arange(E)
        stays = (other > mine) | ((other == mine) & (expert[None, :] < expert[:, None]))
        words = jax.jit(simulate_jax._before)(jnp.asarray(key))
        np.testing.assert_array_equal(simulate_jax._unpack(np.asarray(words).T, E), stays)


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_the_number_of_cores_changes_nothing(scope, monkeypatch):
    trace = bundled_trace()
    runs = []
    for cores in (1, 3):
        monkeypatch.setattr(simulate_jax.os, "cpu_count", lambda cores=cores: cores)
        runs.append(simulate_many(trace, ["lfru"], [2, 3], scope=scope, events=True))
    for one, three in zip(*runs, strict=True):
        np.testing.assert_array_equal(one.counters, three.counters)
        for name in ("hit", "admit", "evictions"):
            np.testing.assert_array_equal(getattr(one.events, name), getattr(three.events, name))


def test_a_policy_is_traced_once_a_call(monkeypatch):
    traced = []

    class Counted(LRU):
        name = "test-counted"

        def reset(self, xp, state):
            traced.append(xp)
            return super().reset(xp, state)

    monkeypatch.setattr(simulate_jax, "_program", lambda *_: pytest.fail("not reached: the keys come first"))
    with pytest.raises(pytest.fail.Exception):
        simulate_many(bundled_trace(), [Counted()], [2, 3, 4, 5])
    assert len(traced) == 1
