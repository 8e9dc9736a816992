"""EOS sets as arrays and stop strings against a search over the whole decoded text."""

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from moe_jax.demo import demo_model_path
from moe_jax.generation.stopping import NO_TOKEN, StopMatch, StopMatcher, eos_array, is_eos
from moe_jax.generation.text import load_tokenizer

PIECES = ["st", "op", "opera", "tion", "sto", "pper", "las", "topper", "s", "to", "pped", "stop", "at", " ", "<|end|>"]


@pytest.fixture(scope="module")
def words():
    """A tokenizer whose tokens are the pieces above, as in the examples of transformers' documentation."""
    backend = tokenizers.Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="s"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def ids_of(*pieces):
    return [PIECES.index(piece) for piece in pieces]


def test_eos_array_is_padded_and_wide_enough():
    eos = eos_array([(7,), (), (1, 2, 3, 4, 5)])
    assert eos.dtype == np.int32 and eos.shape == (3, 8)
    assert eos[0].tolist() == [7] + [NO_TOKEN] * 7 and set(eos[1].tolist()) == {NO_TOKEN}
    assert eos_array([(7,)]).shape == eos_array([()]).shape == (1, 4)


def test_is_eos():
    eos = eos_array([(7, 9), (), (0,), (0,)])
    assert jax.jit(is_eos)(np.array([9, 9, 0, 1], np.int32), eos).tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    "pieces", [["st", "op"], ["stop"], ["st", "opera"], ["sto", "pper"], ["las", "topper"], ["s", "to", "pped"]]
)
def test_stop_string_across_tokens(words, pieces):
    """The examples of transformers' StopStringCriteria: the token that completes "stop" is the last that stays."""
    ids = ids_of("at", *pieces, "at", "st", "op")
    expected = StopMatch("stop", 1 + len(pieces), 3)
    assert StopMatcher(words, ["stop"]).push(ids) == expected
    one_by_one = StopMatcher(words, ["stop"])
    found = [one_by_one.push([token]) for token in ids]
    assert found[: expected.kept] == [None] * len(pieces) + [StopMatch("stop", expected.kept, 0)]
    assert found[-1] == expected


def test_no_match(words):
    matcher = StopMatcher(words, ["stop", "nope"])
    assert matcher.push(ids_of("st", "at", "op", "to", "pped")) is None
    assert matcher.push([]) is None


def test_the_match_that_begins_first_names_the_stop_string(words):
    assert StopMatcher(words, ["to", "stop", "t"]).push(ids_of("at", "stop")) == StopMatch("t", 1, 1)
    assert StopMatcher(words, ["to", "stop"]).push(ids_of("at", "stop")) == StopMatch("stop", 2, 0)


def test_special_token_as_stop_string(words):
    assert StopMatcher(words, ["<|end|>"]).push(ids_of("at", "<|end|>", "at")) == StopMatch("<|end|>", 2, 1)


def test_stop_string_may_begin_in_the_prompt_but_not_end_there(words):
    assert StopMatcher(words, ["stop"], ids_of("at", "s")).push(ids_of("topper")) == StopMatch("stop", 1, 0)
    matcher = StopMatcher(words, ["stop", "at st"], ids_of("at", " ", "stop"))
    assert matcher.push(ids_of("at", "las")) is None


def test_newline_as_byte_token_is_found_at_once():
    """SentencePiece vocabularies spell a newline as the byte <0x0A>, which a decoder gives out one token late."""
    vocab = {"<unk>": 0, "<0x0A>": 1, "a": 2}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert StopMatcher(tokenizer, ["\n"], [2, 1]).push([2, 1, 2]) == StopMatch("\n", 2, 1)
    assert StopMatcher(tokenizer, ["\n\n"], [2, 1]).push([1, 2]) == StopMatch("\n\n", 1, 1)


def first_match(tokenizer, stops, prompt, ids):
    """Number of tokens up to the first that completes a stop string, by decoding everything every time."""
    before = tokenizer.decode(prompt)
    for n in range(1, len(ids) + 1):
        text = tokenizer.decode(prompt + ids[:n])
        unchanged = 0
        while unchanged < min(len(before), len(text)) and before[unchanged] == text[unchanged]:
            unchanged += 1
        for stop in stops:
            at = text.rfind(stop)
            if at >= 0 and at + len(stop) > unchanged:
                return n
        before = text
    return None


DEMO = load_tokenizer(demo_model_path())
letters = [DEMO(letter)["input_ids"][0] for letter in "abé🙂 "]
split_characters = DEMO("🙂é漢")["input_ids"]
few_ids = st.sampled_from(letters + split_characters + DEMO("ab ba aab")["input_ids"])


@given(
    st.lists(st.text("abé🙂 ", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(few_ids, max_size=6),
    st.lists(few_ids, max_size=20),
    st.integers(1, 5),
)
@example(["é"], DEMO("é")["input_ids"][:1], DEMO("é")["input_ids"][1:], 1)
@example(["aa"], [letters[0]], [letters[0]], 1)
def test_matches_a_search_over_the_whole_text(stops, prompt, ids, chunk):
    expected = first_match(DEMO, stops, prompt, ids)
    matcher = StopMatcher(DEMO, stops, prompt)
    match = None
    for start in range(0, len(ids), chunk):
        match = matcher.push(ids[start : start + chunk])
    if expected is None:
        assert match is None
    else:
        assert (match.kept, match.overshoot) == (expected, len(ids) - expected)
        assert match.stop in DEMO.decode(prompt + ids[: match.kept])
