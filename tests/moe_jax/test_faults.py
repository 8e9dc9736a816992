"""Faults while experts move: what was generated is kept, nothing is lost or leaked, and the next call is as the first.

A fault is put into the policy, into a copy, into the move of a prefill round, or is an interrupt, at a chosen event.
"""

import numpy as np
import pytest

from host_offload.policy import LRU
from moe_jax import MoE
from moe_jax.errors import MoEJaxError, TransportError

pytestmark = pytest.mark.slow

PROMPT = np.random.default_rng(7).integers(3, 256, 12)
BATCH = np.stack([PROMPT, np.roll(PROMPT, 1), np.roll(PROMPT, 2)])
NEW = 12
L = 3
CONFIG = {
    "cache_rate": 0.25,
    "progress": False,
    "max_batch": 4,
    "max_sequence_length": 64,
    "page_size": 64,
    "decode_chunk": 4,
    "trace": True,
}


class Fault(RuntimeError):
    """What the tests inject."""


class FaultyPolicy(LRU):
    """LRU that raises at its n-th observation from now; a prefill or decode step has one for each of the L layers."""

    name = "faulty"

    def __init__(self):
        self.countdown, self.error = None, Fault("policy")

    def observe(self, xp, state, layer, need, scores, t):
        if self.countdown is not None:
            self.countdown -= 1
            if self.countdown < 0:
                self.countdown = None
                raise self.error
        return super().observe(xp, state, layer, need, scores, t)


@pytest.fixture(scope="module")
def policy():
    return FaultyPolicy()


@pytest.fixture(scope="module")
def moe(tiny, policy):
    with MoE(tiny("mixtral"), CONFIG | {"transport": "callback"}, policy=policy) as moe:
        yield moe


@pytest.fixture(scope="module")
def wanted(moe):
    """The fault-free run. All programs that the tests need are compiled here, so that none is compiled later."""
    moe.forward(PROMPT)
    moe.generate(BATCH, NEW, eos_token_id=[])
    return moe.generate(PROMPT, NEW, eos_token_id=[])


@pytest.fixture(autouse=True)
def afterwards(moe, wanted, policy):
    """After every test: no page in use, slots right, the same ids again, and no recompilation."""
    engine = moe._engine
    compiled = engine.programs.compilations
    yield
    assert policy.countdown is None, "the fault never happened"
    assert engine._pages.num_free == engine.kv_pages - 1 and engine.running is None
    moe.verify_slots()
    np.testing.assert_array_equal(moe.generate(PROMPT, NEW, eos_token_id=[]), wanted)
    moe.verify_slots()
    assert engine.programs.compilations == compiled
    moe._routing = []


def expect_partial(moe, wanted, tokens, fault=Fault, **options):
    """Runs into the fault, which must leave exactly `tokens` new ids; returns the error."""
    with pytest.raises(TransportError, match="moving experts failed while") as caught:
        moe.generate(PROMPT, NEW, eos_token_id=[], **options)
    assert isinstance(caught.value.__cause__, fault)
    assert caught.value.partial.tolist() == wanted[: len(PROMPT) + tokens].tolist()
    return caught.value


def test_a_policy_that_fails_in_prefill(moe, wanted, policy):
    for layer in range(L):
        policy.countdown = layer
        error = expect_partial(moe, wanted, 0)
        assert "while prefilling" in str(error) and "policy" in str(error)


@pytest.mark.parametrize("step", (1, 2, 4, 5, 7, NEW - 1))
@pytest.mark.parametrize("layer", (0, L - 1))
def test_a_policy_that_fails_in_a_decode_step(step, layer, moe, wanted, policy):
    """Step n makes token n + 1: the tokens before it stay, at chunk edges (4 steps) and inside of a chunk."""
    policy.countdown = step * L + layer
    error = expect_partial(moe, wanted, step)
    assert "while decoding" in str(error)
    stats = moe.stats()["last"]
    assert stats["decode"]["tokens"] == step - 1
    rows = moe.trace().request == moe._engine.requests - 1
    assert rows.sum() == len(PROMPT) + step - 1


def test_streams_give_the_tokens_before_the_fault(moe, wanted, policy):
    policy.countdown = 6 * L + 1
    got = []
    with pytest.raises(TransportError):
        for chunk in moe.stream_ids(PROMPT, NEW, eos_token_id=[]):
            got += chunk[0]
    assert got == wanted[len(PROMPT) : len(PROMPT) + 6].tolist()


def test_a_streamer_gets_the_tokens_before_the_fault_and_its_end(moe, wanted, policy):
    class Recorder:
        values, ended = [], 0

        def put(self, value):
            self.values.append(np.array(value).ravel().tolist())

        def end(self):
            self.ended += 1

    recorder = Recorder()
    policy.countdown = 6 * L
    expect_partial(moe, wanted, 6, streamer=recorder)
    assert sum(recorder.values, []) == wanted[: len(PROMPT) + 6].tolist()
    assert recorder.ended == 1


def test_rows_of_a_batch_keep_their_tokens(moe, policy):
    whole = moe.generate(BATCH, NEW, eos_token_id=[])
    policy.countdown = 5 * L
    with pytest.raises(TransportError) as caught:
        moe.generate(BATCH, NEW, eos_token_id=[])
    np.testing.assert_array_equal(caught.value.partial, whole[:, : len(PROMPT) + 5])


def failing(method, monkeypatch, moe, after, error=None):
    """Makes `method` of the mover raise at its n-th call from now, once."""
    mover, calls = moe._engine.transport._calls.mover, [0]
    original = getattr(mover, method)

    def wrapper(*args, **kwargs):
        calls[0] += 1
        if calls[0] == after:
            raise error or Fault(method)
        return original(*args, **kwargs)

    monkeypatch.setattr(mover, method, wrapper)
    return calls


@pytest.mark.parametrize("after", (1, 2, 5))
def test_a_copy_that_fails_in_prefill(after, moe, wanted, monkeypatch):
    calls = failing("move_ahead", monkeypatch, moe, after)
    expect_partial(moe, wanted, 0)
    assert calls[0] >= after


def test_a_copy_that_fails_in_decode(moe, wanted, monkeypatch):
    moe.set_cache()
    calls = failing("move", monkeypatch, moe, 10**9)
    moe.generate(PROMPT, 1, eos_token_id=[])
    in_prefill = calls[0]  # the NumPy mover serves `move_ahead` by `move`
    moe.generate(PROMPT, NEW, eos_token_id=[])
    monkeypatch.undo()

    moe.set_cache()
    failing("move", monkeypatch, moe, in_prefill + 4)
    with pytest.raises(TransportError, match="while decoding: Fault") as caught:
        moe.generate(PROMPT, NEW, eos_token_id=[])
    got = caught.value.partial.tolist()
    assert got == wanted[: len(got)].tolist() and len(PROMPT) < len(got) < len(wanted)
    fed = moe.stats()["last"]["decode"]["tokens"]
    assert len(got) == len(PROMPT) + 1 + fed


def test_a_table_that_cannot_be_written_back(moe, wanted, monkeypatch):
    """The error word itself cannot be written: the fault is still reported and the call is cut off."""
    mover = moe._engine.transport._calls.mover
    original, broken = mover.store, [True]

    def store(*args):
        if broken[0]:
            raise Fault("store")
        return original(*args)

    monkeypatch.setattr(mover, "store", store)
    with pytest.raises(TransportError, match="Fault") as caught:
        moe.generate(PROMPT, NEW, eos_token_id=[])
    assert any("while reporting it" in note for note in caught.value.__cause__.__notes__)
    broken[0] = False


@pytest.mark.parametrize("where", (1, 4 * L + 1))
def test_an_interrupt_inside_a_callback_stays_an_interrupt(where, moe, policy):
    policy.countdown, policy.error = where, KeyboardInterrupt()
    try:
        with pytest.raises(KeyboardInterrupt):
            moe.generate(PROMPT, NEW, eos_token_id=[])
    finally:
        policy.error = Fault("policy")


@pytest.mark.parametrize("program", ("prefill", "first", "decode"))
@pytest.mark.parametrize("moment", ("before", "after"))
def test_an_interrupt_between_programs(program, moment, moe, monkeypatch):
    """Before a program, and right after it: then its results, which hold the donated banks and pages, are lost."""
    engine = moe._engine
    run = engine.programs.run

    def interrupted(name, *args):
        if name != program:
            return run(name, *args)
        if moment == "after":
            run(name, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.programs, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        moe.generate(PROMPT, NEW, eos_token_id=[])
    monkeypatch.undo()


def test_an_interrupt_after_a_fault_leaves_nothing_to_report(moe, policy, monkeypatch):
    """The call that the fault belonged to is gone; the next one must not be blamed for it."""
    run = moe._engine.programs.run

    def interrupted(*args):
        run(*args)
        raise KeyboardInterrupt

    policy.countdown = 1
    monkeypatch.setattr(moe._engine.programs, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        moe.generate(PROMPT, NEW, eos_token_id=[])
    monkeypatch.undo()


def test_an_interrupt_in_forward(moe, monkeypatch):
    before = moe.forward(PROMPT)
    run = moe._engine.programs.run

    def interrupted(*args):
        run(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(moe._engine.programs, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        moe.forward(PROMPT)
    monkeypatch.undo()
    assert moe.forward(PROMPT).tobytes() == before.tobytes()


def test_a_fault_in_forward_is_reported_and_forgotten(moe, policy):
    before = moe.forward(PROMPT)
    policy.countdown = 1
    with pytest.raises(TransportError, match="while prefilling: Fault"):
        moe.forward(PROMPT)
    assert moe.forward(PROMPT).tobytes() == before.tobytes()


# ---------------------------------------------------------------------------------------------- the other transports


class Untraceable(LRU):
    """Works in NumPy only: compiling it fails."""

    name = "untraceable"

    def priority(self, xp, state, layer, expert, t):
        if xp is not np:
            raise Fault("NumPy only")
        return super().priority(xp, state, layer, expert, t)


@pytest.fixture(scope="module")
def device(tiny):
    with MoE(tiny("mixtral"), CONFIG | {"transport": "device", "policy": "lfu"}) as moe:
        yield moe


def test_device_survives_an_interrupt_with_its_policy(device, wanted, monkeypatch):
    assert device.generate(PROMPT, NEW, eos_token_id=[]).tolist() == wanted.tolist()
    engine = device._engine
    compiled, run = engine.programs.compilations, engine.programs.run
    for name_of_fault in ("prefill", "decode"):

        def interrupted(name, *args, at=name_of_fault):
            out = run(name, *args)
            if name == at:
                raise KeyboardInterrupt
            return out

        monkeypatch.setattr(engine.programs, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            device.generate(PROMPT, NEW, eos_token_id=[])
        monkeypatch.undo()
        assert engine._pages.num_free == engine.kv_pages - 1
        assert int(engine.cache.policy["select"]) == 1, "LFU is still in charge"
        device.verify_slots()
        assert device.generate(PROMPT, NEW, eos_token_id=[]).tolist() == wanted.tolist()
        device.verify_slots()
    assert engine.programs.compilations == compiled


@pytest.mark.parametrize("after", (1, 2, 4))
def test_device_survives_a_copy_that_fails_in_prefill(after, device, wanted, monkeypatch):
    failing("move_ahead", monkeypatch, device, after)
    error = expect_partial(device, wanted, 0)
    assert "while prefilling" in str(error)
    assert device._engine._pages.num_free == device._engine.kv_pages - 1
    device.verify_slots()
    assert device.generate(PROMPT, NEW, eos_token_id=[]).tolist() == wanted.tolist()
    device.verify_slots()


def test_a_policy_that_does_not_compile_can_be_replaced(device, wanted):
    device.set_cache(policy=Untraceable())
    with pytest.raises(Fault, match="NumPy only"):
        device.generate(PROMPT, NEW, eos_token_id=[])
    assert device._engine._pages.num_free == device._engine.kv_pages - 1
    device.set_cache(policy="lfu")
    assert device.generate(PROMPT, NEW, eos_token_id=[]).tolist() == wanted.tolist()


def test_resident_without_a_pool_says_when_its_experts_are_gone(tiny, wanted, monkeypatch):
    config = {key: value for key, value in CONFIG.items() if key != "cache_rate"}
    with MoE(tiny("mixtral"), config | {"transport": "resident"}) as moe:
        assert moe.generate(PROMPT, NEW, eos_token_id=[]).tolist() == wanted.tolist()
        run = moe._engine.programs.run

        def interrupted(*args):
            raise KeyboardInterrupt

        monkeypatch.setattr(moe._engine.programs, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):  # nothing was lost
            moe.generate(PROMPT, NEW, eos_token_id=[])
        monkeypatch.undo()
        assert moe.generate(PROMPT, NEW, eos_token_id=[]).tolist() == wanted.tolist()

        def lost(*args):
            run(*args)
            raise KeyboardInterrupt

        monkeypatch.setattr(moe._engine.programs, "run", lost)
        with pytest.raises(MoEJaxError, match="load the model again"):
            moe.generate(PROMPT, NEW, eos_token_id=[])
        monkeypatch.undo()
        with pytest.raises(MoEJaxError, match="this model is closed"):
            moe.generate(PROMPT, NEW, eos_token_id=[])
