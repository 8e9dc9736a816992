"""Calls of the decode loop that start before the last one is read: same tokens, counts and cache, nothing lost."""

import jax
import numpy as np
import pytest

from moe_jax import MoE
from moe_jax.engine.engine import Run
from moe_jax.generation.sampling import SamplingParams

CONFIG = {
    "transport": "device",
    "cache_rate": 0.4,
    "policy": "lfru",
    "progress": False,
    "max_batch": 2,
    "max_sequence_length": 64,
    "page_size": 64,
    "decode_chunk": 4,
}
PROMPT = np.random.default_rng(3).integers(3, 256, 12)


@pytest.fixture(scope="module")
def moe(tiny):
    with MoE(tiny("mixtral"), CONFIG) as moe:
        yield moe


@pytest.fixture
def calls(monkeypatch):
    """What a run does, in order: ("begin" or "finish", number of the call)."""
    log, begin, finish = [], Run._begin, Run._finish

    def logged(what):
        log.append((what, sum(before == what for before, _ in log)))

    def numbered(self, *args):
        logged("begin")
        return begin(self, *args)

    def read(self, **options):
        logged("finish")
        return finish(self, **options)

    monkeypatch.setattr(Run, "_begin", numbered)
    monkeypatch.setattr(Run, "_finish", read)
    return log


def new_ids(moe, count, **options):
    return moe.generate(PROMPT, count, **{"eos_token_id": []} | options)[len(PROMPT) :].tolist()


def in_order(numbers, ahead):
    """The log of so many calls, `ahead` of them begun before the one before them is read."""
    log = [("begin", number) for number in range(min(ahead, numbers))]
    for number in range(numbers):
        log += [("begin", number + ahead)] * (number + ahead < numbers) + [("finish", number)]
    return log


@pytest.mark.parametrize(("tokens", "numbers"), [(1, 0), (2, 1), (5, 1), (6, 2), (13, 3), (14, 4)])
def test_one_call_is_under_way_while_another_is_read_and_none_is_begun_for_nothing(moe, calls, tokens, numbers):
    assert len(new_ids(moe, tokens)) == tokens
    assert calls == in_order(numbers, ahead=1)


def run_of(moe, tokens, **options):
    return moe._engine.start([PROMPT], [SamplingParams(max_new_tokens=tokens, eos_token_id=[])], seed=0, **options)


def test_where_the_caller_may_stop_rows_each_call_is_read_before_the_next(moe, calls):
    run = run_of(moe, 12, stops=True)
    for number, _ in enumerate(run.tokens()):
        if number == 2:
            run.stop(0)
    assert calls == in_order(2, ahead=0)
    assert run.stats.decode.tokens == 8
    with pytest.raises(ValueError, match=r"stop\(0\).*stops=True"):
        run_of(moe, 12).stop(0)


def state_after(moe, tokens, chunk, **options):
    """(ids, statistics, and what the cache holds and remembers) of two runs from an empty cache."""
    engine = moe._engine
    moe.set_cache(policy="lfu")
    moe.set_cache(policy=CONFIG["policy"])
    engine.decode_chunk, steps = chunk, engine.steps
    try:
        ids = [new_ids(moe, tokens, **options), new_ids(moe, 3)]
    finally:
        engine.decode_chunk = CONFIG["decode_chunk"]
    cache = engine.cache
    kept = cache.slot_of, cache.owner, cache.resident, cache.step, cache.policy
    stats = moe.stats()["last"]
    counts = [
        stats[phase][name] for phase in ("prefill", "decode") for name in ("tokens", "steps", "lookups", "per_layer")
    ]
    return ids, counts, engine.steps - steps, jax.tree.map(lambda a: np.asarray(a).tolist(), kept)


@pytest.mark.parametrize("tokens", (2, 5, 8, 11))
def test_tokens_counts_and_cache_do_not_depend_on_where_calls_end(moe, tokens):
    moe.verify_slots()
    assert state_after(moe, tokens, chunk=4) == state_after(moe, tokens, chunk=1)
    moe.verify_slots()


def test_nor_with_an_end_that_the_host_does_not_foresee(moe, calls):
    ids = new_ids(moe, 20)
    eos = next(token for at, token in enumerate(ids) if 1 < at < 8 and token not in ids[:at])
    calls.clear()
    ahead = state_after(moe, 20, chunk=4, eos_token_id=eos)
    assert len(ahead[0][0]) == ids.index(eos) + 1
    begun = [number for what, number in calls if what == "begin"]
    assert len(begun) > sum(what == "finish" for what, _ in calls)  # one was under way and is not read
    assert ahead == state_after(moe, 20, chunk=1, eos_token_id=eos)


def test_a_stream_that_is_left_counts_what_was_under_way_and_gives_it_to_nobody(moe):
    whole = new_ids(moe, 20)
    pieces = []
    before = moe.stats()["total"]["overshoot_tokens"]
    stream = moe.stream_ids(PROMPT, 20, eos_token_id=[])
    for chunk in stream:
        pieces += chunk[0]
        if len(pieces) > 1:
            break
    stream.close()
    assert pieces == whole[:5]
    last = moe.stats()["last"]
    assert last["overshoot_tokens"] == 4 and last["decode"]["tokens"] == 8
    assert moe.stats()["total"]["overshoot_tokens"] == before + 4
    assert last["decode"]["hits"] + last["decode"]["misses"] == last["decode"]["lookups"]  # one row: all distinct
    assert new_ids(moe, 20) == whole
    moe.verify_slots()
