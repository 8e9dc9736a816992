"""Tokenizer loading, the incremental decoder against `tokenizer.decode`, and transformers' own streamers."""

import shutil
import subprocess
import sys

import hypothesis.strategies as st
import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast, TextIteratorStreamer, TextStreamer

from moe_jax.demo import demo_model_path
from moe_jax.errors import InputError, TokenizerError
from moe_jax.generation.text import IncrementalDecoder, StreamerFeed, load_tokenizer, require_tokenizer

TEXTS = [
    "Once upon a time, there was a little girl.",
    "Le cœur a ses raisons, que la raison ne connaît point ; où êtes-vous, ô Noël ?",
    "🙂👍🏽 👩‍👩‍👧‍👦 mixed 漢字 and ไทย, עברית, e\u0301!",
    "  two spaces,\n\nlines\tand a tab \n",
    "",
]


@pytest.fixture(scope="module")
def demo():
    return load_tokenizer(demo_model_path())


def sentencepiece_like():
    """A tokenizer with byte fallback and leading-space marks, as Mixtral's is; ids 3..258 are the bytes."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", "▁Hello", "▁world", "lo", "é", "▁été", ".", "▁.", "'", "▁'", "▁n't", "s", "\ufffd", "▁a", "abc"]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def cleaning():
    """The same, removing spaces before punctuation."""
    tokenizer = sentencepiece_like()
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    return tokenizer


TOKENIZERS = {"demo": load_tokenizer(demo_model_path()), "bytes": sentencepiece_like(), "cleaning": cleaning()}


def check_pieces(tokenizer, ids, chunk, skip):
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
    pieces = [decoder.push(ids[i : i + chunk]) for i in range(0, len(ids), chunk)]
    shown = "".join(pieces)
    rest = decoder.pending()
    assert decoder.flush() == rest
    for piece in pieces:
        piece.encode("utf-8")  # a lone surrogate would raise
    assert shown + rest == tokenizer.decode(ids, skip_special_tokens=skip)
    assert decoder.flush() == "" and decoder.pending() == ""
    return pieces


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_pieces_of_text(demo, text, chunk):
    pieces = check_pieces(demo, demo(text)["input_ids"], chunk, False)
    assert "\ufffd" not in "".join(pieces)


@given(st.binary(max_size=60), st.integers(1, 5))
@example(b"\xff" * 40, 1)
@example("é".encode() * 5 + b"\xc3", 1)
@example(b"\xe2\x82\xe2\x82\xac\xf0\x9f\x98", 1)
def test_random_bytes_through_byte_level_bpe(data, chunk):
    tokenizer = TOKENIZERS["demo"]
    alphabet = bytes_to_ids(tokenizer)
    check_pieces(tokenizer, [alphabet[byte] for byte in data], chunk, False)


def bytes_to_ids(tokenizer):
    """Ids of the 256 single bytes: the byte-level alphabet, in the order GPT-2's table gives it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = {byte: chr(byte) for byte in printable}
    for n, byte in enumerate(byte for byte in range(256) if byte not in characters):
        characters[byte] = chr(256 + n)
    return [tokenizer.convert_tokens_to_ids(characters[byte]) for byte in range(256)]


@given(st.lists(st.integers(0, 4100), max_size=40), st.integers(1, 5), st.booleans())
def test_random_ids_of_the_demo_model(ids, chunk, skip):
    """Special tokens (0, 1) and ids beyond the tokenizer's vocabulary (4096 and up) included."""
    check_pieces(TOKENIZERS["demo"], ids, chunk, skip)


ids_with_bytes = st.lists(
    st.integers(0, 280) | st.integers(255, 275) | st.sampled_from([1, 2, 13, 198, 172, 133]), max_size=40
)


@given(ids_with_bytes, st.integers(1, 5), st.booleans(), st.sampled_from(["bytes", "cleaning"]))
@example([260, 2, 261], 1, True, "bytes")  # a special token between words must not eat the space
@example([260, 13, 198, 172, 260], 1, False, "bytes")
@example([259] * 12, 1, False, "bytes")
@example([260, 268, 259, 265, 266, 261, 269, 270, 265], 1, False, "cleaning")
def test_random_ids_with_byte_fallback(ids, chunk, skip, name):
    check_pieces(TOKENIZERS[name], ids, chunk, skip)


def test_text_is_given_out_as_soon_as_it_is_certain(demo):
    ids = demo("Hello, the world")["input_ids"]
    decoder = IncrementalDecoder(demo)
    assert [decoder.push([token]) for token in ids] == [demo.decode([token]) for token in ids]


def test_a_split_character_waits(demo):
    ids = demo("🙂")["input_ids"]
    assert len(ids) > 1
    decoder = IncrementalDecoder(demo)
    assert [decoder.push([token]) for token in ids] == [""] * (len(ids) - 1) + ["🙂"]


def test_text_before_a_run_of_byte_tokens_does_not_wait():
    tokenizer = TOKENIZERS["bytes"]
    decoder = IncrementalDecoder(tokenizer)
    newline = 3 + 0x0A
    assert decoder.push([260, newline]) == "Hello"
    assert decoder.pending() == "\n"
    assert decoder.push([261]) == "\n world"


def test_window_stays_short(demo):
    """Constant cost a token: the ids that are decoded again do not grow with the text."""
    longest = []
    original = IncrementalDecoder._decode

    class Counting(IncrementalDecoder):
        def _decode(self, ids):
            longest.append(len(ids))
            return original(self, ids)

    alphabet = bytes_to_ids(demo)
    for ids in (demo("word " * 300)["input_ids"], [alphabet[0xFF]] * 300, [alphabet[0xE2]] * 300, [0] * 300):
        longest.clear()
        decoder = Counting(demo, skip_special_tokens=True)
        for token in ids:
            decoder.push([token])
        assert max(longest, default=0) <= 8


def test_numpy_ids(demo):
    ids = np.asarray(demo("Hello there")["input_ids"], np.int32)
    decoder = IncrementalDecoder(demo)
    assert decoder.push(ids) + decoder.flush() == "Hello there"


def test_load_tokenizer_without_files_is_none(tmp_path):
    assert load_tokenizer(tmp_path) is None
    with pytest.raises(TokenizerError, match=r"a text prompt needs a tokenizer.*: give ids"):
        require_tokenizer(None, "a text prompt", "give ids")


def test_broken_tokenizer_is_an_error(tmp_path):
    shutil.copy(demo_model_path() / "tokenizer_config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def test_tokenizer_json_alone_is_enough(demo, tmp_path):
    shutil.copy(demo_model_path() / "tokenizer.json", tmp_path)
    alone = load_tokenizer(tmp_path)
    for text in TEXTS:
        assert alone(text)["input_ids"] == demo(text)["input_ids"]
    assert alone.chat_template is None


@pytest.mark.parametrize("name", ("tokenizer.model", "sentencepiece.bpe.model", "spiece.model"))
def test_a_sentencepiece_file_without_its_package(name, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("moe_jax.generation.text.find_spec", lambda package: None)
    shutil.copy(demo_model_path() / "tokenizer_config.json", tmp_path)
    (tmp_path / name).write_bytes(b"\n\x0e")
    with pytest.raises(TokenizerError, match=rf"only in SentencePiece's format \({name}\).*pip install sentencepiece$"):
        load_tokenizer(tmp_path)
    assert capfd.readouterr().err == ""
    shutil.copy(demo_model_path() / "tokenizer.json", tmp_path)  # which is then read instead
    assert load_tokenizer(tmp_path).decode([41]) == "H"


def test_settings_without_a_vocabulary(tmp_path):
    shutil.copy(demo_model_path() / "tokenizer_config.json", tmp_path)
    with pytest.raises(TokenizerError, match="has tokenizer_config.json but no vocabulary.*tokenizer.json beside it"):
        load_tokenizer(tmp_path)


def test_loading_is_quiet_and_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from moe_jax.generation.text import load_tokenizer\n"
        f"print(load_tokenizer({str(demo_model_path())!r}).decode([41]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "H\n" and done.stderr == ""


def test_text_streamer_of_transformers(demo, capsys):
    prompt, new = (np.asarray(demo(text)["input_ids"], np.int32) for text in ("Once upon", " a time, été 🙂."))
    feed = StreamerFeed(TextStreamer(demo, skip_prompt=True))
    feed.prompt(prompt[None])
    feed.tokens(new[:3, None])
    feed.tokens(new[3:, None])
    feed.end()
    assert capsys.readouterr().out == " a time, été 🙂.\n"


def test_streamer_gets_what_generate_gives():
    calls = []

    class Recorder:
        def put(self, value):
            calls.append((value.shape, value.dtype, value.tolist()))

        def end(self):
            calls.append("end")

    feed = StreamerFeed(Recorder())
    feed.prompt(np.array([[1, 2], [3, 4]], np.int32))
    feed.tokens(np.array([[5, 6], [7, 8]], np.int32))
    feed.end()
    assert calls == [
        ((2, 2), np.int64, [[1, 2], [3, 4]]),
        ((2,), np.int64, [5, 6]),
        ((2,), np.int64, [7, 8]),
        "end",
    ]


def test_iterator_streamer_and_its_refusal_of_batches(demo):
    streamer = TextIteratorStreamer(demo)
    feed = StreamerFeed(streamer)
    feed.prompt(np.asarray([demo("Hello")["input_ids"]]))
    feed.tokens(np.asarray(demo(" there")["input_ids"])[:, None])
    feed.end()
    assert "".join(streamer) == "Hello there"
    with pytest.raises(ValueError, match="batch size 1"):
        StreamerFeed(TextStreamer(demo)).prompt(np.zeros((2, 3)))


def test_object_that_is_no_streamer():
    with pytest.raises(InputError, match=r"streamer of type list has no method put\(\)"):
        StreamerFeed([])
