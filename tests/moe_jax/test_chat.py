"""`MoE.chat` and `MoE.stream_chat`: what they return, the defaults they take, and models without tokenizer."""

import json
import shutil

import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer

from moe_jax import MoE
from moe_jax.errors import ConfigError, InputError, MoEJaxError, TokenizerError, TransportError
from moe_jax.generation.chat import encode_chat

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TALK = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Once?"}]
PROMPT = "system: Be kind.\nuser: Once?\nassistant:"
NO_EOS = {"eos_token_id": []}
CONFIG = {
    "transport": "callback",
    "cache_rate": 0.5,
    "progress": False,
    "max_batch": 1,
    "max_sequence_length": 64,
    "page_size": 64,
    "decode_chunk": 4,
}


@pytest.fixture(scope="module")
def moe(tiny, tmp_path_factory):
    """The tiny Mixtral with a tokenizer that has a chat template, and defaults in generation_config.json."""
    directory = tmp_path_factory.mktemp("model") / "mixtral-chat"
    shutil.copytree(tiny("mixtral"), directory)
    byte_tokenizer(chat_template=TEMPLATE).save_pretrained(directory)
    assert (directory / "chat_template.jinja").exists()
    assert json.loads((directory / "config.json").read_text())["eos_token_id"] == 2
    settings = {"max_new_tokens": 7, "eos_token_id": [254, 255], "pad_token_id": 0}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    with MoE(directory, CONFIG) as moe:
        yield moe


@pytest.fixture(scope="module")
def new_ids(moe):
    """Twelve greedy ids after the conversation."""
    ids = moe.tokenizer(PROMPT)["input_ids"]
    return moe.generate(ids, 12, **NO_EOS)[len(ids) :].tolist()


def test_an_answer_is_what_generate_writes_after_the_rendered_prompt(moe, new_ids):
    answer = moe.chat(TALK, 12, **NO_EOS)
    assert answer == moe.generate(PROMPT, 12, **NO_EOS) == moe.tokenizer.decode(new_ids)
    assert moe.stats()["last"]["prefill"]["tokens"] == len(PROMPT)
    assert moe.chat(TALK, 12, chat_template="{{ messages[0].content }}", **NO_EOS) == moe.generate(
        "Be kind.", 12, **NO_EOS
    )


def test_pieces_add_up_to_the_answer(moe):
    pieces = list(moe.stream_chat(TALK, 12, **NO_EOS))
    assert "".join(pieces) == moe.chat(TALK, 12, **NO_EOS) and len(pieces) > 1


def test_closing_a_stream_ends_the_generation(moe):
    stream = moe.stream_chat(TALK, 12, **NO_EOS)
    assert next(stream)
    with pytest.raises(MoEJaxError, match="a generation is open"):
        moe.chat(TALK)
    stream.close()
    assert moe.chat(TALK, 2, **NO_EOS)


def test_defaults_are_those_of_generation_config(moe, new_ids, monkeypatch):
    params = moe.sampling_params()
    # The list there replaces the id of config.json.
    assert (params.max_new_tokens, params.eos_token_id, params.pad_token_id) == (7, (254, 255), 0)
    assert moe.chat(TALK, **NO_EOS) == moe.tokenizer.decode(new_ids[:7])
    second = next(token for token in new_ids[1:] if token != new_ids[0])
    monkeypatch.setattr(moe, "generation_config", {"eos_token_id": [253, second]})
    end = new_ids.index(second) + 1
    assert moe.chat(TALK, 12) == moe.tokenizer.decode(new_ids[:end])
    assert "".join(moe.stream_chat(TALK, 12)) == moe.tokenizer.decode(new_ids[:end])


def test_padding_tokens_of_a_template_are_part_of_the_prompt(moe):
    pad = moe.tokenizer("?")["input_ids"][0]
    options = NO_EOS | {"pad_token_id": pad}
    assert moe.chat(TALK, 6, **options) == moe.chat(TALK, 6, **NO_EOS)
    assert moe.stats()["last"]["prefill"]["tokens"] == len(PROMPT)


def test_a_streamer_gets_the_prompt_and_each_token(moe):
    values = []

    class Streamer:
        put = staticmethod(lambda value: values.append(value.shape))
        end = staticmethod(lambda: values.append("end"))

    moe.chat(TALK, 3, streamer=Streamer(), **NO_EOS)
    assert values == [(1, len(PROMPT)), (1,), (1,), (1,), "end"]


def test_options_of_generate_reach_the_session(moe, monkeypatch):
    class Seen(Exception):
        pass

    def session(moe, request, trace):
        raise Seen(request.params, trace)

    monkeypatch.setattr("moe_jax.api.Session", session)
    monkeypatch.setattr("moe_jax.session.Session", session)
    for method in (moe.chat, moe.stream_chat):
        with pytest.raises(Seen) as caught:
            method(TALK, 5, seed=4, trace=True, do_sample=True, temperature=1.5, stop=["x"])
        params, trace = caught.value.args
        assert trace is True
        assert params == moe.sampling_params(5, seed=4, do_sample=True, temperature=1.5, stop=["x"])


@pytest.mark.parametrize(
    ("options", "error", "says"),
    (
        ({"messages": []}, InputError, "messages is empty"),
        ({"chat_template": "none"}, ConfigError, "neither Jinja text"),
        ({"chat_template_kwargs": {"tokenize": 1}}, ConfigError, "has 'tokenize'"),
        ({"max_new_tokens": 0}, ConfigError, "max_new_tokens=0"),
        ({"max_new_tokens": 60}, InputError, "more than the limit of 64"),
        ({"attention_mask": [1]}, ConfigError, "attention_mask"),
        ({"topk": 3}, ConfigError, "did you mean 'top_k'"),
    ),
)
def test_errors_come_before_any_work(options, error, says, moe):
    before = moe.stats()["last"]
    for method in (moe.chat, moe.stream_chat):
        with pytest.raises(error, match=says):
            method(**({"messages": TALK} | options))
    assert moe.stats()["last"] == before


def test_a_fault_keeps_the_text_before_it(moe, new_ids, monkeypatch):
    engine, start = moe._engine, moe._engine.start

    def breaking(*args, **options):
        run = start(*args, **options)
        tokens = run.tokens

        def few():
            for number, chunk in enumerate(tokens()):
                if number == 2:
                    raise TransportError("the link is down")
                yield chunk

        run.tokens = few
        return run

    monkeypatch.setattr(engine, "start", breaking)
    with pytest.raises(TransportError, match="link is down") as caught:
        moe.chat(TALK, 12, **NO_EOS)
    assert caught.value.partial == moe.tokenizer.decode(new_ids[:5])  # one id, then a chunk of four
    pieces = []
    with pytest.raises(TransportError, match="link is down"):
        pieces.extend(piece for piece in moe.stream_chat(TALK, 12, **NO_EOS))
    monkeypatch.undo()
    assert moe.chat(TALK, 5, **NO_EOS) == caught.value.partial


def test_without_a_tokenizer_ids_still_work(moe, new_ids, monkeypatch):
    ids = encode_chat(moe.tokenizer, TALK)
    monkeypatch.setattr(moe, "tokenizer", None)
    for method in (moe.chat, moe.stream_chat):
        with pytest.raises(TokenizerError, match=r"a chat needs a tokenizer.*give the ids of the whole conversation"):
            method(TALK)
    out = moe.generate(ids, 12, **NO_EOS)
    np.testing.assert_array_equal(out, [*ids, *new_ids])


def test_a_tokenizer_that_cannot_be_loaded_is_a_warning(tiny, tmp_path):
    shutil.copytree(tiny("mixtral"), tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    with pytest.warns(UserWarning, match="tokenizer in .* cannot be loaded.*input_ids") as caught:
        broken = MoE(tmp_path / "m", CONFIG)
    assert [warning.filename for warning in caught] == [__file__]
    with broken:
        assert broken.tokenizer is None
        with pytest.raises(TokenizerError, match="none that could be loaded"):
            broken.generate("text")
        assert broken.generate([5, 6, 7], 2, **NO_EOS).shape == (5,)
