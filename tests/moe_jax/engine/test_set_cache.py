"""`set_cache` and the life of a model: what is kept, what is compiled, what is given back."""

import gc
import weakref

import jax
import numpy as np
import pytest

from host_offload.policy import LRU, PolicySet, StaticPin
from moe_jax import MoE
from moe_jax.engine import loading
from moe_jax.errors import ConfigError, MoEJaxError

pytestmark = pytest.mark.slow

PROMPT = np.random.default_rng(11).integers(3, 256, 12)
NEW = 6
CONFIG = {
    "cache_rate": 0.5,
    "progress": False,
    "max_batch": 1,
    "max_sequence_length": 32,
    "page_size": 32,
    "decode_chunk": 4,
}


def run(moe):
    return moe.generate(PROMPT, NEW, eos_token_id=[]).tolist()


def compilations(moe):
    return moe._engine.programs.compilations


def addresses(moe):
    pool = moe._builder.pool
    return [pool.address(layer, name, 0) for layer in range(pool.spec.L) for name in pool.spec.tensors]


@pytest.fixture(scope="module")
def loaded(tiny):
    """One model a transport for the module; tests leave it with other settings, never closed."""
    made = {}

    def get(transport):
        if transport not in made:
            made[transport] = MoE(tiny("mixtral"), CONFIG | {"transport": transport})
            run(made[transport])
        return made[transport]

    yield get
    for moe in made.values():
        moe.close()


@pytest.fixture(params=("device", "callback"))
def moe(request, loaded):
    moe = loaded(request.param)
    moe.set_cache(policy="lru", cache_rate=0.5, scope="layer", contract="atomic-bypass", transport=request.param)
    run(moe)
    return moe


SETTINGS = (
    {"policy": "lfu"},
    {"policy": "lfru", "contract": "atomic-forced-admit"},
    {"policy": "static", "slots": 7},
    {"slots": [1, 4, 2]},
    {"scope": "global", "slots": 5},
    {"cache_rate": 0.3},
    {"expert_cache_bytes": "500kB", "scope": "layer"},
    {"policy": "lru", "contract": "atomic-bypass"},
)


def test_settings_are_values_of_the_compiled_step(moe):
    wanted, compiled, pool = run(moe), compilations(moe), addresses(moe)
    banks = {name: bank.unsafe_buffer_pointer() for name, bank in moe._engine.cache.banks.items()}
    for setting in SETTINGS:
        moe.set_cache(**setting)
        assert moe.stats()["occupied_slots"] == 0, "the new cache starts empty"
        assert run(moe) == wanted, setting
        moe.verify_slots()
        stats = moe.stats()
        for key in ("policy", "scope", "contract"):
            if key in setting:
                assert stats[key] == setting[key]
        assert stats["occupied_slots"] <= stats["slots"]["total"]
    assert compilations(moe) == compiled
    assert addresses(moe) == pool
    assert {name: bank.unsafe_buffer_pointer() for name, bank in moe._engine.cache.banks.items()} == banks


def test_what_is_left_out_keeps_its_setting(moe):
    moe.set_cache(policy="lfu", slots=6, scope="global", contract="atomic-forced-admit")
    moe.set_cache(cache_rate=0.5)
    stats = moe.stats()
    assert (stats["policy"], stats["scope"], stats["contract"]) == ("lfu", "global", "atomic-forced-admit")
    assert stats["slots"]["total"] == 12
    assert moe.set_cache() is moe
    assert moe.stats()["slots"]["total"] == 12
    moe.set_cache(scope="layer", slots=[2, 1, 3])
    assert moe.stats()["slots"]["per_layer"] == [2, 1, 3]


def test_settings_have_their_effect(moe):
    moe.set_cache(slots=[1, 4, 2])
    run(moe)
    held = moe.stats()["resident_experts"]
    assert [len(held[layer]) for layer in range(3)] == [1, 4, 2]
    moe.set_cache(policy="static", slots=6)
    run(moe)
    pinned = moe.stats()["resident_experts"]
    needed = {0: 2, 1: 2, 2: 2}
    assert {layer: len(experts) for layer, experts in pinned.items()} == needed
    moe.set_cache(contract="atomic-forced-admit")
    run(moe)
    last = moe.stats()["last"]["decode"]
    assert last["bypasses"] == 0 and last["misses"] > 0, "everything needed was admitted, K fit in the slots"
    moe.set_cache(contract="atomic-bypass", policy="static")
    run(moe)
    assert moe.stats()["last"]["decode"]["bypasses"] > 0


def test_more_slots_than_the_bank_holds_grow_it(tiny):
    with MoE(tiny("mixtral"), CONFIG | {"transport": "callback", "cache_rate": 1 / 8}) as moe:
        wanted, pool = run(moe), addresses(moe)
        rows = moe._engine.transport.rows
        moe.set_cache(slots=24)
        assert moe._engine.transport.rows == rows + 21
        assert run(moe) == wanted and compilations(moe) == 3
        assert moe.stats()["occupied_slots"] > 3
        moe.set_cache(slots=3)
        assert moe._engine.transport.rows == rows + 21, "a larger bank is kept"
        assert run(moe) == wanted and compilations(moe) == 3
        assert addresses(moe) == pool


def test_transports_switch_over_one_pool(tiny):
    with MoE(tiny("mixtral"), CONFIG | {"transport": "callback", "policy": "lfu"}) as moe:
        wanted, pool = run(moe), addresses(moe)
        for transport in ("device", "resident", "callback"):
            moe.set_cache(transport=transport)
            assert moe.stats()["transport"]["name"] == transport
            assert moe.stats()["kernel"] == [f"{transport}/xla"] * 3
            assert run(moe) == wanted, transport
            moe.verify_slots()
            assert moe.stats()["policy"] == "lfu"
            misses = moe.stats()["last"]["prefill"]["misses"]
            assert (misses == 0) == (transport == "resident")
        assert addresses(moe) == pool
        with pytest.raises(ConfigError, match="leave out expert_slots"):
            moe.set_cache(transport="resident", slots=5)


@pytest.mark.parametrize(
    "setting, message",
    (
        ({"slots": 2}, "needs at least 3"),
        ({"slots": [1, 2]}, "2 quotas for 3 MoE layers"),
        ({"slots": [9, 1, 1]}, "9 slots for 8 experts"),
        ({"slots": [1, 1, 1], "scope": "global"}, "scope='global' has one pool"),
        ({"slots": 3, "cache_rate": 0.5}, "keep one of"),
        ({"cache_rate": 1.5}, "cache_rate=1.5"),
        ({"policy": "lur"}, "Did you mean 'lru'"),
        ({"policy": 3}, "expected a name"),
        ({"policy": StaticPin(np.ones((3, 9)))}, r"the model needs \[L, E\] = \(3, 8\)"),
        ({"scope": "layers"}, "did you mean 'layer'"),
        ({"contract": "sequential"}, "contract='sequential'"),
        ({"transport": "auto"}, "is for loading"),
        ({"transport": "devise"}, "did you mean 'device'"),
    ),
)
def test_an_error_leaves_the_cache_as_it_was(setting, message, moe):
    wanted = run(moe)
    moe.set_cache(policy="lfu", slots=7)
    run(moe)
    before, compiled = moe.stats(), compilations(moe)
    with pytest.raises(ConfigError, match=message):
        moe.set_cache(**setting)
    after = moe.stats()
    for key in ("policy", "scope", "contract", "slots", "resident_experts", "transport"):
        assert after[key] == before[key]
    moe.verify_slots()
    assert run(moe) == wanted and compilations(moe) == compiled


def test_a_bank_that_cannot_be_made_leaves_the_old_cache(loaded, monkeypatch):
    moe = loaded("callback")
    moe.set_cache(transport="callback", policy="lru", slots=6, scope="layer", contract="atomic-bypass")
    wanted, compiled = run(moe), compilations(moe)

    def no_room(self, transport, config):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(loading.CacheBuilder, "state", no_room)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        moe.set_cache(transport="device")
    monkeypatch.undo()
    assert moe.stats()["transport"]["name"] == "callback" and moe.stats()["slots"]["total"] == 6
    assert run(moe) == wanted and compilations(moe) == compiled
    moe.verify_slots()


class Own(LRU):
    name = "own"


def test_a_policy_object_is_kept_until_another_is_named(tiny):
    own = Own()
    with MoE(tiny("mixtral"), CONFIG | {"transport": "callback"}, policy=own) as moe:
        assert moe.stats()["policy"] == "own" and moe._engine.transport.policy is own
        moe.set_cache(slots=5)
        assert moe.stats()["policy"] == "own" and moe._engine.transport.policy is own
        wanted = run(moe)
        compiled = compilations(moe)
        moe.set_cache(policy="lfu")
        assert moe.stats()["policy"] == "lfu"
        moe.set_cache(slots=4)
        assert moe.stats()["policy"] == "lfu"
        moe.set_cache(policy=PolicySet(["lfru", own]))
        assert moe.stats()["policy"] == "lfru", "the first member is in charge"
        moe.set_cache("own")
        assert moe.stats()["policy"] == "own" and moe._engine.transport.policy.names == ("lfru", "own")
        moe.set_cache(slots=5)
        assert moe.stats()["policy"] == "own" and run(moe) == wanted
        moe.set_cache("fifo")  # no member: the set is gone
        assert moe.stats()["policy"] == "fifo" and moe._engine.transport.policy.name == "fifo"
        moe.set_cache(policy=Own)  # a class will do
        assert moe.stats()["policy"] == "own" and run(moe) == wanted
        moe.set_cache(slots=6)
        assert moe.stats()["policy"] == "own"
        assert compilations(moe) == compiled


def test_members_of_a_set_are_selected_without_compiling(loaded):
    moe = loaded("device")
    moe.set_cache(transport="device", policy="lru", slots=6, scope="layer", contract="atomic-bypass")
    wanted = run(moe)
    moe.set_cache(PolicySet(["lru", "lfu-decayed", StaticPin(np.arange(24.0).reshape(3, 8))]))
    hits = {}
    assert run(moe) == wanted
    compiled = compilations(moe)
    for name in ("lru", "lfu-decayed", "static"):
        moe.set_cache(name, slots=4)
        assert run(moe) == wanted and moe.stats()["policy"] == name
        hits[name] = moe.stats()["last"]["decode"]["hit_rate"]
    assert compilations(moe) == compiled
    assert len(set(hits.values())) > 1, "the selected member decides"


def test_a_policy_of_the_users_own_is_compiled_in_once(loaded):
    moe = loaded("device")
    moe.set_cache(transport="device", policy="lru", slots=6, scope="layer", contract="atomic-bypass")
    wanted = run(moe)
    own = Own()
    moe.set_cache(policy=own)
    assert run(moe) == wanted
    compiled = compilations(moe)
    moe.set_cache(slots=7)
    moe.set_cache(policy=Own())  # as good as the same
    assert run(moe) == wanted and compilations(moe) == compiled and moe.stats()["policy"] == "own"
    moe.verify_slots()


def test_a_name_may_stand_where_an_object_does(tiny):
    with MoE(tiny("mixtral"), CONFIG | {"transport": "device"}, policy="lfu") as moe:
        assert moe.stats()["policy"] == "lfu" and moe.config.policy == "lfu"
        assert int(moe._engine.cache.policy["select"]) == 1
        moe.set_cache(slots=6)
        assert moe.stats()["policy"] == "lfu" and int(moe._engine.cache.policy["select"]) == 1


def test_resident_from_files_cannot_switch(tiny):
    config = {key: value for key, value in CONFIG.items() if key != "cache_rate"}
    with MoE(tiny("mixtral"), config | {"transport": "resident"}) as moe:
        stats = moe.stats()
        assert stats["occupied_slots"] == 24 and stats["memory"]["pool_bytes"] == 0
        with pytest.raises(ConfigError, match="load it with transport='device' or 'callback'"):
            moe.set_cache(transport="device", slots=6)
        with pytest.raises(ConfigError, match="leave out expert_slots"):
            moe.set_cache(slots=6)
        with pytest.raises(MoEJaxError, match="keeps no pool"):
            moe.verify_slots()
        assert moe.stats()["occupied_slots"] == 24


# ---------------------------------------------------------------------------------------------- lifetime


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())


@pytest.fixture
def memory():
    """Bytes of live arrays, device and pinned host alike, before and after the test: equal."""
    before = live_bytes()
    yield before
    assert live_bytes() <= before


def load(tiny, **config):
    return MoE(tiny("mixtral"), CONFIG | {"transport": "callback"} | config)


@pytest.mark.parametrize("transport", ("device", "callback"))
def test_close_gives_all_memory_back(transport, tiny, memory):
    moe = load(tiny, transport=transport)
    pool = moe._builder.pool.nbytes
    assert live_bytes() - memory >= pool + sum(bank.nbytes for bank in moe._engine.cache.banks.values())
    if transport == "callback":  # with compiled programs, too
        run(moe)
    moe.close()
    assert live_bytes() <= memory  # while `moe` is still referenced
    moe.close()
    for call in (
        lambda: run(moe),
        lambda: moe.forward(PROMPT),
        lambda: moe.stats(),
        lambda: moe.set_cache(),
        lambda: moe.verify_slots(),
    ):
        with pytest.raises(MoEJaxError, match="this model is closed"):
            call()


def test_with_closes_also_when_the_body_raises(tiny, memory):
    with pytest.raises(ZeroDivisionError), load(tiny) as moe:
        raise ZeroDivisionError
    assert live_bytes() <= memory
    with pytest.raises(MoEJaxError, match="closed"):
        run(moe)


def test_a_model_that_is_dropped_is_freed(tiny, memory):
    moe = load(tiny)
    run(moe)
    gone = weakref.ref(moe)
    del moe
    gc.collect()
    assert gone() is None


def test_closing_with_an_open_stream(tiny, memory):
    moe = load(tiny)
    stream = moe.stream_ids(PROMPT, 20, eos_token_id=[])
    next(stream)
    moe.close()
    with pytest.raises(MoEJaxError, match="closed while it was generating"):
        next(stream)


def test_changing_the_cache_frees_the_old_one(tiny, memory):
    with load(tiny) as moe:
        base = live_bytes()
        for slots in (24, 3, 12, 24):
            moe.set_cache(slots=slots)
        grown = live_bytes() - base
        assert grown == 12 * moe.stats()["experts"]["bytes_each"]  # from 12 to 24 slots, kept
        for transport in ("device", "callback"):
            moe.set_cache(transport=transport)
        assert abs(live_bytes() - base - grown) < 4096  # tables and policy state


def test_two_models_at_once(tiny, memory):
    with load(tiny) as first, load(tiny, policy="lfu", cache_rate=1 / 8) as second:
        wanted = run(first)
        assert run(second) == wanted
        first.set_cache(slots=24)
        assert run(first) == wanted and run(second) == wanted
        first.verify_slots(), second.verify_slots()
        assert first.stats()["total"]["calls"] == 2 and second.stats()["total"]["calls"] == 2
        assert not set(addresses(first)) & set(addresses(second))
        first.close()
        assert run(second) == wanted


def test_a_closed_models_memory_is_used_again(tiny):
    """Loading and closing over and over does not grow the process."""

    def resident_kib():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4

    sizes = []
    for _ in range(12):
        with load(tiny) as moe:
            moe.stats()
        gc.collect()
        sizes.append(resident_kib())
    assert sizes[-1] - sizes[3] < 8 << 10, sizes


@pytest.mark.parametrize("step", ("fill", "transport", "engine", "tokenizer"))
def test_a_load_that_fails_leaks_nothing(step, tiny, memory, monkeypatch):
    def broken(*args, **kwargs):
        raise OSError(f"{step} failed")

    target = {
        "fill": ("host_offload.store.ExpertStore.read", broken),
        "transport": ("moe_jax.engine.loading.CacheBuilder.transport", broken),
        "engine": ("moe_jax.api.build_engine", broken),
        "tokenizer": ("moe_jax.api.load_tokenizer", broken),
    }[step]
    monkeypatch.setattr(*target)
    with pytest.raises(OSError, match=f"{step} failed"):
        load(tiny)
    monkeypatch.undo()
    with load(tiny) as moe:
        assert moe.stats()["occupied_slots"] == 0


def test_a_bad_setting_costs_no_pool(tiny, memory, monkeypatch):
    monkeypatch.setattr(loading, "ExpertPool", None)  # would fail if it were asked for
    for config in ({"expert_slots": 2}, {"policy": "lur"}):
        with pytest.raises(ConfigError):
            load(tiny, **({"cache_rate": None} | config))
    with pytest.raises(ConfigError, match="the model needs"):
        MoE(tiny("mixtral"), CONFIG | {"transport": "device"}, policy=StaticPin(np.ones((1, 1))))
