"""Replaying a trace in the live engine: the traced experts serve, and cache and tokens are those of the traced run."""

import numpy as np
import pytest

from host_offload.policy import get_policy
from host_offload.simulate import COUNTERS, simulate
from host_offload.trace import Trace, concatenate
from moe_jax import MoE
from moe_jax.errors import InputError, TransportError
from moe_jax.replay import with_prompts

pytestmark = pytest.mark.slow

NEW = 6
COUNTED = COUNTERS[:4]
TRANSPORTS = ("callback", "device")


@pytest.fixture(scope="module", params=TRANSPORTS)
def moe(request, tiny):
    config = {
        "transport": request.param,
        "cache_rate": 1.0,
        "dtype": "bfloat16",  # its weights are whole float16 numbers
        "max_batch": 2,
        "max_sequence_length": 64,
        "page_size": 16,
        "decode_chunk": 4,
        "progress": False,
    }
    with MoE(tiny("mixtral"), config) as model:
        yield model


def prompts_of(moe, lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, moe.model_config.vocab_size, n).astype(np.int32) for n in lengths]


def recorded(moe, prompts):
    """(new ids a prompt, trace) of greedy runs, one after the other."""
    ids = [moe.generate(p[None], NEW, eos_token_id=[], do_sample=False, trace=True)[0, len(p) :] for p in prompts]
    return ids, moe.trace()


def counters(moe):
    """[2, L, 4] of the last call."""
    last = moe.stats()["last"]
    phases = [[last[phase]["per_layer"][name] for name in COUNTED] for phase in ("prefill", "decode")]
    return np.array(phases).swapaxes(1, 2)


def made_up(moe, seed, lengths, scores=False, prefill=2):
    """A trace of random routing, requests after one another; the first has no prefill rows."""
    rng, cfg = np.random.default_rng(seed), moe.model_config
    T, shape = sum(lengths), (len(cfg.moe_layers), cfg.num_experts)
    header = {"moe_layers": list(cfg.moe_layers), "E": shape[1], "K": cfg.num_experts_per_tok, "chunk": 64}
    header |= {"scope": "layer", "slots": shape[0] * shape[1], "contract": "atomic-bypass", "policy": "none"}
    every = rng.random((T, *shape)).astype(np.float16)
    experts = np.argsort(-every, kind="stable")[..., : header["K"]]
    phase, step = np.ones(T, int), np.arange(T)
    request = np.repeat(np.arange(len(lengths)), lengths)
    for start in np.flatnonzero(np.diff(request)) + 1:
        phase[start : start + prefill] = 0
        step[start : start + prefill] = start
    return Trace.from_rows(
        experts,
        np.take_along_axis(every, experts, -1),
        phase,
        request,
        step,
        header | {"model": "made up", "dtype": "none"},
        scores=every if scores else None,
    )


def test_own_trace_gives_the_same_tokens_and_hits(moe):
    prompts = prompts_of(moe, (5, 3))
    moe.set_cache("lru", cache_rate=0.5)
    ids, trace = recorded(moe, prompts)
    stats = moe.stats()["total"]
    moe.reset_stats()
    moe.set_cache("lru", cache_rate=0.5)
    again = moe.replay(trace, prompts=prompts, record=True)
    assert [row.tolist() for row in again] == [row.tolist() for row in ids]
    assert moe.stats()["total"]["decode"]["per_layer"] == stats["decode"]["per_layer"]
    assert moe.stats()["total"]["prefill"]["per_layer"] == stats["prefill"]["per_layer"]
    copy = moe.trace()
    np.testing.assert_array_equal(copy.experts, trace.experts)
    np.testing.assert_array_equal(copy.weights, trace.weights)
    np.testing.assert_array_equal(copy.phase, trace.phase)
    np.testing.assert_array_equal(np.diff(copy.step), np.diff(trace.step))


@pytest.mark.parametrize("moe", ["callback"], indirect=True)  # spares a prompt's compilation
def test_weights_and_experts_decide_the_tokens(moe):
    """Other routing gives other tokens, so it is the trace that decides and not the router."""
    prompts = prompts_of(moe, (5,))
    ids, trace = recorded(moe, prompts)
    E = trace.header["E"]
    other = Trace.from_rows(
        (trace.experts + 1) % E, trace.weights[..., ::-1], trace.phase, trace.request, trace.step, trace.header
    )
    assert moe.replay(other, prompts=prompts)[0].tolist() != ids[0].tolist()


def test_hits_are_the_simulators(moe):
    trace = made_up(moe, 1, (11, 9, 7))
    pinned = "static" if moe.config.transport == "device" else get_policy("static", frequency=trace.select([1]))
    for policy, share in (("lru", 0.25), ("lru", 0.5), ("lfru", 0.5), (pinned, 0.75)):
        moe.set_cache(policy, cache_rate=share)
        ids = moe.replay(trace, [2, 0])  # run by first step, whatever the order of the numbers
        assert [len(row) for row in ids] == [11, 6]
        slots = moe.stats()["slots"]["total"]
        # Request 0 has no prompt: its first row is prefilled.
        served = with_prompts(trace.select([0, 2]))
        assert served.phase.tolist() == [0] + [1] * 10 + [0] * 2 + [1] * 5
        result = simulate(served, policy, slots=slots, reset="never", backend="numpy")
        np.testing.assert_array_equal(counters(moe), result.counters[..., :4])
        assert result.in_phase("decode")["misses"]
        for index, phase in enumerate(("prefill", "decode")):
            assert moe.stats()["last"][phase]["tokens"] == result.tokens[index]


@pytest.mark.parametrize("moe", ["callback"], indirect=True)  # spares two compilations
def test_policies_see_the_traced_scores(moe):
    """MRS ranks by scores: those of the trace, or the weights where it has none, as in the simulator."""
    for scores in (True, False):
        trace = made_up(moe, 2, (12,), scores=scores)
        moe.set_cache("mrs", cache_rate=0.5)
        moe.replay(trace)
        slots = moe.stats()["slots"]["total"]
        result = simulate(trace, "mrs", slots=slots, reset="never", backend="numpy")
        np.testing.assert_array_equal(counters(moe).sum(0), result.counters[..., :4].sum(0))
    moe.set_cache("lru")


@pytest.mark.parametrize("moe", ["callback"], indirect=True)  # spares six compilations
def test_a_recorded_batch_is_replayed_as_a_batch(moe):
    rows = np.stack(prompts_of(moe, (4, 4), seed=3))
    moe.set_cache("lru", cache_rate=0.5)
    ids = moe.generate(rows, NEW, eos_token_id=[], do_sample=False, trace=True)[:, 4:]
    before, trace = counters(moe), moe.trace()
    moe.set_cache("lru", cache_rate=0.5)
    assert np.array_equal(moe.replay(trace, prompts=rows), ids)
    np.testing.assert_array_equal(counters(moe), before)


def test_what_cannot_be_replayed(moe):
    trace = made_up(moe, 4, (5, 6))
    wide = made_up(moe, 4, (70,))
    late = concatenate([trace])
    late.step[late.request == 1] -= 2  # begins within request 0
    narrow = concatenate([trace])
    narrow.header["E"] += 1
    mixed = concatenate([trace])
    mixed.phase[-1] = 0
    many = concatenate([trace, made_up(moe, 5, (5,))])
    many.step[:] = np.concatenate([np.arange(n) for n in np.bincount(many.request)])
    for arguments, message in (
        ((None,), "trace: expected a host_offload.trace.Trace, got NoneType"),
        ((narrow,), r"trace: its \{.*'E': 9.*are not the model's .*'E': 8"),
        ((trace, [0, 7]), r"requests: \[7\] not in the trace; it has 0 to 1"),
        ((trace, []), r"requests: \[\] not in the trace"),
        ((wide,), "requests: 0 is 71 tokens long, and this model runs at most 64; raise max_sequence_length"),
        ((late,), "requests: 1 begins at step 3 while request 0 runs since step 0"),
        ((mixed,), "request 1 has prefill rows after decoded ones"),
        ((many,), "batch of 3, and max_batch is 2"),
    ):
        with pytest.raises(InputError, match=message):
            moe.replay(*arguments)
    for prompts, message in (
        ([[1]], "prompts: 1 for the requests"),
        ([[1], [1, 2, 3]], r"prompts\[1\]: int64 \(3,\); request 1 prefills 2 tokens"),
        ([[1.0], [1, 2]], r"prompts\[0\]: float64"),
        ([[1], [1, 10**6]], r"prompts\[1\]: ids 1..1000000 are outside"),
    ):
        with pytest.raises(InputError, match=message):
            moe.replay(trace, prompts=[np.array(ids) for ids in prompts])


# Only this transport runs a policy that can fail in the middle.
@pytest.mark.parametrize("moe", ["callback"], indirect=True)
def test_a_fault_keeps_what_was_made(moe):
    trace = made_up(moe, 6, (5, 6))

    class Failing(type(get_policy("lru"))):
        name = "failing"

        def observe(self, xp, state, layer, need, scores, t):
            if t >= 7 * len(moe.model_config.moe_layers):
                raise RuntimeError("boom")
            return super().observe(xp, state, layer, need, scores, t)

    moe.set_cache(Failing())
    with pytest.raises(TransportError, match="boom") as caught:
        moe.replay(trace)
    assert [len(ids) for ids in caught.value.partial] == [5, 2]
    assert moe.stats()["last"]["calls"] == 2
    moe.set_cache("lru")
    assert [len(ids) for ids in moe.replay(trace)] == [5, 5]
