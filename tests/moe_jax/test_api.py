"""`MoE` as a user meets it: inputs, every option of `generate`, streaming, statistics, traces and errors.

One tiny model with a tokenizer of 256 bytes serves all tests; the cache's settings are in `engine/test_set_cache.py`.
"""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer
from transformers import TextIteratorStreamer, TextStreamer

from host_offload.trace import Trace
from moe_jax import MoE
from moe_jax.errors import ConfigError, InputError, MoEJaxError, TokenizerError, TransportError

CONFIG = {
    "transport": "callback",  # compiles in half the time of `device`; losslessness is shown elsewhere
    "cache_rate": 0.25,
    "progress": False,
    "max_batch": 4,
    "max_sequence_length": 64,
    "page_size": 64,
    "decode_chunk": 4,
}


@pytest.fixture(scope="module")
def checkpoint(tiny, tmp_path_factory):
    """The tiny Mixtral with a tokenizer beside it."""
    directory = tmp_path_factory.mktemp("model") / "mixtral-bytes"
    shutil.copytree(tiny("mixtral"), directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def moe(checkpoint):
    with MoE(checkpoint, CONFIG) as moe:
        yield moe


@pytest.fixture(autouse=True)
def nothing_leaks(request):
    """No test leaves KV pages in use or a generation open."""
    yield
    if "moe" in request.fixturenames:
        engine = request.getfixturevalue("moe")._engine
        assert engine._pages.num_free == engine.kv_pages - 1
        assert engine.running is None


PROMPT = np.random.default_rng(3).integers(3, 256, 12)


def new_ids(moe, count=12, prompt=PROMPT, **options) -> list[int]:
    """The new ids of one greedy run that EOS does not stop."""
    options = {"eos_token_id": []} | options
    return moe.generate(prompt, max_new_tokens=count, **options)[len(prompt) :].tolist()


# ---------------------------------------------------------------------------------------------- what goes in and out


@pytest.mark.parametrize("kind", (list, np.asarray, jnp.asarray, lambda ids: np.asarray(ids, np.uint8)))
def test_kinds_of_ids_and_shapes(kind, moe):
    wanted = new_ids(moe)
    one = moe.generate(kind(PROMPT.tolist()), max_new_tokens=12, eos_token_id=[])
    assert one.shape == (24,) and one.dtype == np.int32
    assert one.tolist() == PROMPT.tolist() + wanted
    batch = moe.generate(kind([PROMPT.tolist()]), max_new_tokens=12, eos_token_id=[])
    assert batch.shape == (1, 24) and batch[0].tolist() == one.tolist()
    assert moe(input_ids=kind(PROMPT.tolist()), max_new_tokens=12, eos_token_id=[]).tolist() == one.tolist()


def test_text_in_text_out(moe):
    text = "Once upon"
    ids = moe.tokenizer(text)["input_ids"]
    wanted = moe.tokenizer.decode(new_ids(moe, prompt=np.array(ids)), skip_special_tokens=True)
    assert moe.generate(text, max_new_tokens=12, eos_token_id=[]) == wanted
    both = moe.generate([text, "a"], max_new_tokens=12, eos_token_id=[])
    assert isinstance(both, list) and both[0] == wanted and len(both) == 2


@pytest.mark.parametrize("side", ("left", "right"))
def test_a_batch_of_unequal_prompts_equals_single_runs(side, moe):
    prompts = [PROMPT, PROMPT[3:8], PROMPT[:1]]
    ids, mask = np.zeros((3, 12), int), np.zeros((3, 12), int)
    for row, prompt in enumerate(prompts):
        where = slice(12 - len(prompt), None) if side == "left" else slice(len(prompt))
        ids[row, where], mask[row, where] = prompt, 1
    out = moe.generate(ids, max_new_tokens=12, eos_token_id=[], attention_mask=mask)
    np.testing.assert_array_equal(out[:, :12], ids)
    for row, prompt in enumerate(prompts):
        assert out[row, 12:].tolist() == new_ids(moe, prompt=prompt), f"row {row}"


def test_forward_kinds_and_masks(moe):
    one = moe.forward(PROMPT)
    assert one.shape == (12, 256) and one.dtype == np.float32
    np.testing.assert_array_equal(moe.forward([PROMPT.tolist()])[0], one)
    assert moe.stats()["last"]["prefill"]["tokens"] == 12 and moe.stats()["last"]["decode"]["tokens"] == 0
    ids, mask = np.stack([PROMPT, np.roll(PROMPT, 3)]), np.ones((2, 12), int)
    mask[1, :3] = 0
    both = moe.forward(ids, mask)
    np.testing.assert_allclose(both[0], one, atol=1e-4)
    assert not both[1, :3].any()
    np.testing.assert_allclose(both[1, 3:], one[:9], atol=1e-4)
    with pytest.raises(InputError, match="outside the vocabulary"):
        moe.forward([1, 256])


# ---------------------------------------------------------------------------------------------- when a sequence ends


def test_max_new_tokens_and_its_default(moe):
    long = new_ids(moe, 20)
    for count in (1, 2, 5, 6):  # at, inside and across the edges of decode chunks of four
        assert new_ids(moe, count) == long[:count]
    assert moe.generate(PROMPT, eos_token_id=[]).tolist() == PROMPT.tolist() + long
    assert moe.generate(PROMPT, max_length=17, eos_token_id=[]).tolist() == PROMPT.tolist() + long[:5]


@pytest.mark.parametrize("wrap", (int, lambda eos: [255, eos, 254, 253, 252], lambda eos: (eos,)))
def test_eos_ends_a_sequence_and_is_kept(wrap, moe):
    long = new_ids(moe)
    eos = long[6]
    end = long.index(eos) + 1
    assert new_ids(moe, eos_token_id=wrap(eos)) == long[:end]
    stats = moe.stats()["last"]
    assert stats["overshoot_tokens"] == 0 and stats["decode"]["tokens"] == end - 1


def test_eos_of_generation_config_applies_and_an_empty_list_never_stops(moe):
    long = new_ids(moe)
    kept, moe.generation_config["eos_token_id"] = moe.generation_config.get("eos_token_id"), long[2]
    try:
        assert kept == 2
        assert moe.generate(PROMPT, max_new_tokens=12)[12:].tolist() == long[: long.index(long[2]) + 1]
        assert new_ids(moe) == long
    finally:
        moe.generation_config["eos_token_id"] = kept


def test_rows_that_ended_are_filled_with_the_padding_token(moe):
    longs = [new_ids(moe), new_ids(moe, prompt=np.roll(PROMPT, 1))]
    eos = next(token for token in longs[0] if token not in longs[1])
    end = longs[0].index(eos) + 1
    ids = np.stack([PROMPT, np.roll(PROMPT, 1)])
    out = moe.generate(ids, max_new_tokens=12, eos_token_id=eos, pad_token_id=77)
    assert out[0, 12:].tolist() == longs[0][:end] + [77] * (12 - end)
    assert out[1, 12:].tolist() == longs[1]
    assert moe.generate(ids, max_new_tokens=12, eos_token_id=eos)[0, 12 + end :].tolist() == [eos] * (12 - end)
    assert moe.stats()["last"]["decode"]["tokens"] == end - 1 + 11  # a finished row is not fed


def ascii_stop(moe, ids) -> tuple[str, int]:
    """(a letter that the ids write for the first time inside a decode chunk of four, how many ids that takes)."""
    for at in range(2, len(ids)):
        text = moe.tokenizer.decode([ids[at]])
        if text.isascii() and ids.index(ids[at]) == at and at % 4:
            return text, at + 1
    raise AssertionError("the tiny model writes no ASCII here: choose another prompt")


def test_a_stop_string_cuts_ids_text_and_trace_and_counts_what_was_cut(moe):
    long = new_ids(moe, 20)
    stop, kept = ascii_stop(moe, long)
    out = moe.generate(PROMPT, max_new_tokens=20, eos_token_id=[], stop=stop, trace=True)
    assert out[12:].tolist() == long[:kept]
    # The first token comes alone, then chunks of four: the rest of the chunk had been generated.
    made = min(20, 1 + -(-(kept - 1) // 4) * 4)
    assert moe.stats()["last"]["overshoot_tokens"] == made - kept > 0
    trace = moe.trace()
    assert len(trace.experts) == 12 + kept - 1
    unmatched = moe.generate(PROMPT, max_new_tokens=20, eos_token_id=[], stop=["never written", stop])
    assert unmatched.tolist() == out.tolist()


def test_text_ends_with_the_stop_string(moe):
    prompt = "Once upon"
    long = new_ids(moe, 20, np.array(moe.tokenizer(prompt)["input_ids"]))
    stop, kept = ascii_stop(moe, long)
    wanted = moe.tokenizer.decode(long[:kept], skip_special_tokens=True)
    assert wanted.endswith(stop) and stop not in wanted[:-1]
    assert moe.generate(prompt, 20, eos_token_id=[], stop=stop) == wanted
    assert "".join(moe.stream(prompt, 20, eos_token_id=[], stop=stop)) == wanted


def test_a_stop_string_ends_one_row_and_not_the_others(moe):
    ids = np.stack([PROMPT, np.roll(PROMPT, 1)])
    longs = [new_ids(moe, 20, prompt) for prompt in ids]
    stop, kept = ascii_stop(moe, longs[0])
    other = moe.tokenizer.decode(longs[1])
    out = moe.generate(ids, max_new_tokens=20, eos_token_id=[], stop=stop, pad_token_id=5)
    assert out[0, 12 : 12 + kept].tolist() == longs[0][:kept]
    assert (out[0, 12 + kept :] == 5).all()
    if stop not in other:
        assert out[1, 12:].tolist() == longs[1]


# ---------------------------------------------------------------------------------------------- how tokens are drawn


def sampled(moe, prompt=PROMPT, count=10, **options):
    options = {"do_sample": True, "temperature": 1.5, "top_k": 0, "eos_token_id": []} | options
    return moe.generate(prompt, max_new_tokens=count, **options)[..., prompt.shape[-1] :].tolist()


def test_greedy_in_its_disguises(moe):
    greedy = new_ids(moe, 10)
    for options in ({"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert sampled(moe, **options) == greedy, options
    assert sampled(moe) != greedy


def test_the_seed_decides_the_draws(moe):
    first = sampled(moe, seed=1)
    assert sampled(moe, seed=1) == first
    assert sampled(moe, seed=2) != first
    assert sampled(moe, seed=0) == sampled(moe)  # the configuration's default


def test_draws_do_not_depend_on_batch_cache_or_length(moe):
    alone = sampled(moe, seed=5)
    assert sampled(moe, count=6, seed=5) == alone[:6]
    beside = sampled(moe, np.stack([PROMPT, np.roll(PROMPT, 2), PROMPT]), seed=5)
    assert beside[0] == alone
    assert beside[2] != alone, "sequences of a batch draw on their own"
    before = moe.config
    try:
        moe.set_cache(policy="lfu", slots=3)
        assert sampled(moe, seed=5) == alone
    finally:
        moe.set_cache(policy=before.policy, cache_rate=before.cache_rate)


@pytest.mark.slow
def test_draws_do_not_depend_on_the_decode_chunk(moe, checkpoint):
    with MoE(checkpoint, CONFIG | {"decode_chunk": 1}) as stepwise:
        assert sampled(stepwise, seed=5) == sampled(moe, seed=5)


def test_filters_shape_the_distribution(moe):
    """Against the logits of the prompt: with many seeds, first tokens come from the allowed set only."""
    logits = moe.forward(PROMPT)[-1]
    ranked = np.argsort(-logits)
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    draws = {
        name: {sampled(moe, count=1, seed=seed, **options)[0] for seed in range(40)}
        for name, options in {
            "top_k": {"top_k": 3, "temperature": 4.0},
            "top_p": {"top_p": 0.5, "temperature": 1.0},
            "min_p": {"min_p": 0.3, "temperature": 1.0},
        }.items()
    }
    assert draws["top_k"] <= set(ranked[:3].tolist()) and len(draws["top_k"]) > 1
    nucleus = ranked[: int(np.searchsorted(np.cumsum(shares[ranked]), 0.5)) + 1]
    assert draws["top_p"] <= set(nucleus.tolist())
    assert draws["min_p"] <= set(np.flatnonzero(shares >= 0.3 * shares.max()).tolist())


def test_repetition_penalty_counts_prompt_and_output(moe):
    """A penalty this large forbids every token seen before, as long as another has a positive logit."""
    out = new_ids(moe, 20, repetition_penalty=1e6)
    assert len(set(out)) == 20 and not set(out) & set(PROMPT.tolist())
    assert out != new_ids(moe, 20)
    batch = moe.generate(
        np.stack([PROMPT, np.roll(PROMPT, 1)]), max_new_tokens=20, eos_token_id=[], repetition_penalty=1e6
    )
    assert batch[0, 12:].tolist() == out


# ---------------------------------------------------------------------------------------------- streaming


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.values, self.ended = [], 0

    def put(self, value):
        self.values.append(np.array(value))

    def end(self):
        self.ended += 1


def test_a_streamer_gets_the_prompt_and_every_token(moe):
    streamer = Recorder()
    out = moe.generate(PROMPT[None], max_new_tokens=7, eos_token_id=[], streamer=streamer)
    np.testing.assert_array_equal(streamer.values[0], PROMPT[None])
    assert [value.tolist() for value in streamer.values[1:]] == [[token] for token in out[0, 12:].tolist()]
    assert streamer.ended == 1


def test_a_streamer_of_a_batch_gets_filled_rows(moe):
    longs = [new_ids(moe), new_ids(moe, prompt=np.roll(PROMPT, 1))]
    eos = next(token for token in longs[0][1:] if token not in longs[1])
    streamer = Recorder()
    ids = np.stack([PROMPT, np.roll(PROMPT, 1)])
    out = moe.generate(ids, max_new_tokens=12, eos_token_id=eos, pad_token_id=9, streamer=streamer)
    np.testing.assert_array_equal(np.stack(streamer.values[1:], axis=1), out[:, 12:])


def test_transformers_streamers(moe, capsys):
    text = moe.tokenizer.decode(new_ids(moe), skip_special_tokens=True)
    moe.generate(PROMPT, 12, eos_token_id=[], streamer=TextStreamer(moe.tokenizer, skip_prompt=True))
    assert capsys.readouterr().out == text + "\n"
    pieces = TextIteratorStreamer(moe.tokenizer, skip_prompt=True)
    moe.generate(PROMPT, 12, eos_token_id=[], streamer=pieces)
    assert "".join(pieces) == text


def test_a_streamer_that_raises_leaves_the_model_usable(moe):
    class Broken(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.values) == 4:
                raise OSError("the pipe is closed")

    wanted = new_ids(moe)
    try:
        moe.generate(PROMPT, 12, eos_token_id=[], streamer=Broken())
    except OSError:
        assert new_ids(moe) == wanted  # while the traceback is still held
    else:
        raise AssertionError("the streamer's error was swallowed")


def test_stream_joins_to_the_text_of_generate(moe):
    for prompt in ("Once upon", "é"):
        text = moe.generate(prompt, 20, eos_token_id=[])
        pieces = list(moe.stream(prompt, 20, eos_token_id=[]))
        for piece in pieces:
            assert piece
            piece.encode("utf-8")
        assert "".join(pieces) == text
        assert len(pieces) > 1
    sampled_text = moe.generate("Once", 20, eos_token_id=[], do_sample=True, seed=4)
    assert "".join(moe.stream("Once", 20, eos_token_id=[], do_sample=True, seed=4)) == sampled_text


def test_a_stream_that_fails_gives_the_text_before_it(moe, monkeypatch):
    whole = moe.generate("Once upon", 20, eos_token_id=[])
    mover, calls = moe._engine.transport._calls.mover, [0]
    move = mover.move

    def failing(*args):
        calls[0] += 1
        if calls[0] == 25:
            raise OSError("the link is down")
        return move(*args)

    monkeypatch.setattr(mover, "move", failing)
    pieces = []
    with pytest.raises(TransportError, match="the link is down") as caught:
        pieces.extend(moe.stream("Once upon", 20, eos_token_id=[]))
    monkeypatch.undo()
    # list.extend() keeps what an iterator gave before it raised
    assert "".join(pieces) == caught.value.partial
    assert 0 < len(caught.value.partial) < len(whole) and whole.startswith(caught.value.partial.rstrip("\ufffd"))
    assert moe.generate("Once upon", 20, eos_token_id=[]) == whole


def test_stream_ids_gives_what_generate_gives(moe):
    ids = np.stack([PROMPT, np.roll(PROMPT, 1)])
    out = moe.generate(ids, 11, eos_token_id=[])
    chunks = list(moe.stream_ids(ids, 11, eos_token_id=[]))
    assert [len(chunk[0]) for chunk in chunks] == [1, 4, 4, 2]
    for row in range(2):
        assert [token for chunk in chunks for token in chunk[row]] == out[row, 12:].tolist()


def test_a_stream_closed_early_gives_its_pages_back(moe):
    engine, wanted = moe._engine, new_ids(moe)
    for pieces in (0, 1, 2):
        stream = moe.stream_ids(PROMPT, 30, eos_token_id=[], trace=True)
        for _ in range(pieces):
            next(stream)
        stream.close()
        assert engine._pages.num_free == engine.kv_pages - 1
        moe.verify_slots()
        assert new_ids(moe) == wanted
    assert len(moe.trace().experts) == 12 + 12 + 4  # of the two that ran: prompt, and prompt with a chunk of four


# ---------------------------------------------------------------------------------------------- errors before any work


@pytest.mark.parametrize(
    "call, error, message",
    (
        (lambda moe: moe.generate(), InputError, "first argument or as input_ids"),
        (lambda moe: moe.generate([1], input_ids=[1]), InputError, "one of them"),
        (lambda moe: moe.generate([]), InputError, "prompt 0 is empty"),
        (lambda moe: moe.generate([[]]), InputError, "prompt 0 is empty"),
        (lambda moe: moe.generate(""), InputError, "prompt 0 is empty"),
        (lambda moe: moe.generate([1, 256]), InputError, "token id 256 at position 1 of prompt 0"),
        (lambda moe: moe.generate([-1]), InputError, "token id -1"),
        (lambda moe: moe.generate([1.5]), InputError, "must be integers"),
        (lambda moe: moe.generate([3] * 65, 1), InputError, "limit of 64"),
        (lambda moe: moe.generate([3] * 60, 5), InputError, "at most 4 new tokens"),
        (lambda moe: moe.generate([3], 0), ConfigError, "max_new_tokens=0"),
        (lambda moe: moe.generate([3], temperature=-1), ConfigError, "temperature=-1"),
        (lambda moe: moe.generate([3], temprature=1), ConfigError, "did you mean 'temperature'"),
        (lambda moe: moe.generate([[3]] * 5, 1), InputError, "5 prompts is larger than max_batch=4"),
        (lambda moe: moe.generate([[3, 4]], attention_mask=[[1]]), InputError, "attention_mask has shape"),
        (lambda moe: moe.generate([[3, 4]], attention_mask=[[0, 0]]), InputError, "prompt 0 is empty"),
        (lambda moe: moe.generate([3], streamer=object()), InputError, "has no method put"),
        (lambda moe: moe.generate([3], seed=-1), ConfigError, "seed=-1"),
        (lambda moe: moe.generate([3], seed=1.5), ConfigError, "seed=1.5"),
        (lambda moe: moe.stream(["a", "b"]), InputError, "one prompt, not 2"),
        (lambda moe: moe.stream([256]), InputError, "token id 256"),
        (lambda moe: moe.stream_ids([256]), InputError, "token id 256"),
    ),
)
def test_bad_input_is_refused_before_any_work(call, error, message, moe):
    engine = moe._engine
    before = engine.steps, engine.requests, engine.programs.compilations, moe.stats()["total"]["calls"]
    with pytest.raises(error, match=message):
        call(moe)
    assert (engine.steps, engine.requests, engine.programs.compilations, moe.stats()["total"]["calls"]) == before


def test_a_streamer_is_not_touched_when_the_input_is_bad(moe):
    streamer = Recorder()
    with pytest.raises(InputError):
        moe.generate([300], streamer=streamer)
    assert streamer.values == [] and streamer.ended == 0


def test_text_needs_a_tokenizer(moe):
    kept, moe.tokenizer = moe.tokenizer, None
    try:
        for call, instead in (
            (lambda: moe.generate("text"), "use token ids"),
            (lambda: moe.stream([3]), r"give ids to stream_ids\(\)"),
            (lambda: moe.generate([3], stop="a"), "by eos_token_id"),
        ):
            with pytest.raises(TokenizerError, match=instead):
                call()
    finally:
        moe.tokenizer = kept


@pytest.mark.parametrize(
    "config, message",
    (
        ({"polcy": "lru"}, "did you mean 'policy'"),
        ({"policy": "lur"}, "Did you mean 'lru'"),
        ({"cache_rate": 0.25, "expert_slots": 3}, "keep one of"),
        ({"expert_slots": 2}, "scope 'layer' needs at least 3"),
        ({"expert_slots": [1, 1]}, "2 quotas for 3 MoE layers"),
        ({"max_sequence_length": 1000}, "max_position_embeddings"),
        ({"transport": "resident", "cache_rate": 0.5}, "leave out cache_rate"),
    ),
)
def test_bad_configuration_is_refused(config, message, checkpoint):
    with pytest.raises(ConfigError, match=message):
        MoE(checkpoint, {"progress": False} | config)


# ---------------------------------------------------------------------------------------------- statistics and traces


def test_numbers_of_a_call_add_up(moe):
    moe.set_cache()
    moe.reset_stats()
    assert moe.stats()["last"] is None and moe.stats()["total"]["calls"] == 0
    calls = 3
    for _ in range(calls):
        moe.generate(np.stack([PROMPT, np.roll(PROMPT, 4)]), 9, eos_token_id=[])
    stats = moe.stats()
    last, total = stats["last"], stats["total"]
    row, L, K = stats["experts"]["bytes_each"], stats["experts"]["layers"], 2
    assert row == (2 * 96 * 64 + 64 * 96) * 4 and (L, stats["experts"]["per_layer"]) == (3, 8)
    assert last["prefill"]["tokens"] == 24 and last["prefill"]["steps"] == 1
    assert last["decode"]["tokens"] == 16 and last["decode"]["steps"] == 8
    for phase in ("prefill", "decode"):
        for numbers in (last[phase], total[phase]):
            assert numbers["hits"] + numbers["misses"] == numbers["accesses"] <= numbers["lookups"]
            assert numbers["lookups"] == numbers["tokens"] * L * K
            assert numbers["bytes_moved"] == numbers["misses"] * row
            assert numbers["bypasses"] <= numbers["misses"]
            assert numbers["hit_rate"] == pytest.approx(numbers["hits"] / numbers["accesses"])
            assert numbers["bytes_per_token"] == pytest.approx(numbers["bytes_moved"] / numbers["tokens"])
            assert numbers["tokens_per_second"] == pytest.approx(numbers["tokens"] / numbers["seconds"])
            for name, values in numbers["per_layer"].items():
                assert len(values) == L and sum(values) == numbers[name]
        assert total[phase]["tokens"] == calls * last[phase]["tokens"]
    assert total["calls"] == calls and last["calls"] == 1
    assert last["ttft_seconds"] > 0 and last["seconds_per_token"] > 0
    assert last["compilations"] == 0 and last["compile_seconds"] == 0  # the second and third found the programs
    # A row that enters the cache and does not leave it is in it.
    entered = sum(total[phase]["misses"] - total[phase]["bypasses"] for phase in ("prefill", "decode"))
    left = sum(total[phase]["evictions"] for phase in ("prefill", "decode"))
    assert entered - left == stats["occupied_slots"] == sum(map(len, stats["resident_experts"].values())) == 6

    moe.forward(PROMPT)
    after = moe.stats()
    assert after["last"]["ttft_seconds"] is None
    assert after["total"]["ttft_seconds"] == pytest.approx(total["ttft_seconds"]), "a pass without tokens has no TTFT"
    moe.reset_stats()
    assert moe.stats()["total"]["prefill"]["tokens"] == 0 and moe.stats()["occupied_slots"] == 6


def test_stats_describe_the_cache_and_the_memory(moe):
    stats = moe.stats()
    assert stats["slots"] == {"total": 6, "per_layer": [2, 2, 2], "source": "cache_rate=0.25 of 24 experts"}
    assert stats["transport"] == {"name": "callback", "why": "as configured"}
    assert stats["kernel"] == ["callback/xla"] * 3
    assert (stats["policy"], stats["scope"], stats["contract"]) == ("lru", "layer", "atomic-bypass")
    memory, row = stats["memory"], stats["experts"]["bytes_each"]
    banks = sum(bank.nbytes for bank in moe._engine.cache.banks.values())
    assert memory["slot_bytes"] == 6 * row and memory["slot_bytes"] + memory["spare_bytes"] == banks
    assert memory["pool_bytes"] == 24 * row
    assert memory["kv_bytes"] == sum(leaf.nbytes for leaf in jax.tree.leaves(moe._engine._kv))
    assert memory["dense_bytes"] > 0
    assert 0 < sum(stats["pool_seconds"].values()) < stats["load_seconds"] and min(stats["pool_seconds"].values()) > 0


def test_traces_hold_every_token_that_went_through_the_model(moe, tmp_path):
    with pytest.raises(MoEJaxError, match="pass trace=True"):
        moe.trace()
    first_step, first_request = moe._engine.steps, moe._engine.requests
    lengths = (12, 5)
    ids, mask = np.zeros((2, 12), int), np.zeros((2, 12), int)
    for row, length in enumerate(lengths):
        ids[row, 12 - length :], mask[row, 12 - length :] = PROMPT[:length], 1
    moe.generate(ids, 9, eos_token_id=[], attention_mask=mask, trace=True)
    moe.generate(PROMPT, 3, eos_token_id=[])  # not recorded
    moe.generate(PROMPT, 3, eos_token_id=[], trace=True)
    trace = moe.trace(clear=False)

    assert trace.experts.shape == (12 + 5 + 2 * 8 + 12 + 2, 3, 2)
    for request, (prompt, new) in {0: (12, 9), 1: (5, 9), 3: (12, 3)}.items():
        rows = trace.request == first_request + request
        assert (trace.phase[rows] == 0).sum() == prompt
        assert (trace.phase[rows] == 1).sum() == new - 1
        steps = trace.step[rows & (trace.phase == 1)]
        assert (np.diff(steps) == 1).all()
    assert sorted(set(trace.request - first_request)) == [0, 1, 3]
    # A chunk, eight steps; a chunk and two steps that were not recorded; a chunk, two steps.
    assert sorted(set(trace.step - first_step)) == [*range(9), 12, 13, 14]
    stats = moe.stats()
    assert trace.header["E"] == 8 and trace.header["K"] == 2 and trace.header["moe_layers"] == [0, 1, 2]
    assert trace.header["policy"] == stats["policy"] and trace.header["slots"] == [2, 2, 2]
    assert (np.diff(trace.weights.astype(np.float32), axis=-1) <= 0).all()

    # The last call's counters follow from its rows: each distinct expert of a (step, layer) is one access.
    events = list(trace.events())
    last = sum(len(need) for step, _, need in events if step - first_step >= 12)
    assert last == stats["last"]["prefill"]["accesses"] + stats["last"]["decode"]["accesses"]

    trace.save(tmp_path / "run.npz")
    loaded = Trace.load(tmp_path / "run.npz")
    for name in ("experts", "weights", "phase", "request", "step"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(trace, name))
    assert loaded.header == trace.header

    moe.trace()
    with pytest.raises(MoEJaxError, match="no routing was recorded"):
        moe.trace()


def test_trace_ends_where_eos_ends_a_row(moe):
    long = new_ids(moe)
    eos = long[5]
    kept = long.index(eos) + 1
    moe.generate(PROMPT, 12, eos_token_id=eos, trace=True)
    assert len(moe.trace().experts) == 12 + kept - 1


def test_recording_changes_no_token(moe):
    wanted = new_ids(moe)
    assert new_ids(moe, trace=True) == wanted
    moe.trace()
