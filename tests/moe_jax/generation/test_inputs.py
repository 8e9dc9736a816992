"""Prompts: what is accepted, how padding is stripped, what is refused with which words, and the output's layout."""

import logging
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.demo import demo_model_path
from moe_jax.errors import ConfigError, InputError, TokenizerError
from moe_jax.generation.inputs import assemble, prepare
from moe_jax.generation.sampling import SamplingParams
from moe_jax.generation.text import load_tokenizer

LIMITS = {"vocab_size": 100, "max_length": 16, "params": SamplingParams(max_new_tokens=4)}


class Tensor:
    """Like a torch tensor: no list, but it turns into an array."""

    def __init__(self, values):
        self.values = np.asarray(values)

    def __array__(self, dtype=None, copy=None):
        return self.values if dtype is None else self.values.astype(dtype)


class DeviceTensor:
    """Like a torch tensor on a GPU, which refuses to turn into an array."""

    def __array__(self, dtype=None, copy=None):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


def prompts_of(inputs, attention_mask=None, **params):
    limits = LIMITS | {"params": SamplingParams(**({"max_new_tokens": 4} | params))}
    return [prompt.tolist() for prompt in prepare(inputs, **limits, attention_mask=attention_mask).prompts]


@pytest.mark.parametrize(
    "inputs",
    [
        [[3, 4], [5, 6]],
        ((3, 4), (5, 6)),
        np.array([[3, 4], [5, 6]], np.int64),
        np.array([[3, 4], [5, 6]], np.uint8),
        jnp.array([[3, 4], [5, 6]]),
        Tensor([[3, 4], [5, 6]]),
        [np.array([3, 4]), np.array([5, 6])],
        [Tensor([3, 4]), Tensor([5, 6])],
    ],
    ids=["lists", "tuples", "int64", "uint8", "jax", "tensor", "list of arrays", "list of tensors"],
)
def test_kinds_of_ids(inputs):
    batch = prepare(inputs, **LIMITS)
    assert [prompt.tolist() for prompt in batch.prompts] == [[3, 4], [5, 6]]
    assert all(prompt.dtype == np.int32 for prompt in batch.prompts) and batch.input_ids.dtype == np.int32
    assert batch.was_batched and not batch.from_text
    assert batch.lengths.tolist() == [2, 2]


def test_one_sequence_without_batch():
    batch = prepare([3, 4, 5], **LIMITS, attention_mask=[0, 1, 1])
    assert not batch.was_batched and batch.input_ids.tolist() == [[3, 4, 5]]
    assert [prompt.tolist() for prompt in batch.prompts] == [[4, 5]]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(demo_model_path())


def test_text(tokenizer):
    params = SamplingParams(max_new_tokens=4, pad_token_id=1)
    options = LIMITS | {"vocab_size": 4096, "tokenizer": tokenizer, "params": params}
    one = prepare("Hello there", **options)
    expected = tokenizer("Hello there")["input_ids"]
    assert one.prompts[0].tolist() == expected and one.from_text and not one.was_batched
    many = prepare(["Hello there", "H"], **options)
    assert many.was_batched and many.prompts[1].tolist() == tokenizer("H")["input_ids"]
    assert many.input_ids.tolist() == [expected, [1] * (len(expected) - 1) + tokenizer("H")["input_ids"]]


def test_text_errors(tokenizer):
    with pytest.raises(TokenizerError, match="text prompt needs a tokenizer"):
        prepare("Hello", **LIMITS)
    with pytest.raises(InputError, match="prompt 0 is empty"):
        prepare("", **LIMITS, tokenizer=tokenizer)
    with pytest.raises(InputError, match="prompt 1 is empty"):
        prepare(["H", ""], **LIMITS, tokenizer=tokenizer)
    with pytest.raises(InputError, match=r"prompt 1 holds '\\udcff' at character 2, half a surrogate pair"):
        prepare(["H", b"ab\xff".decode(errors="surrogateescape")], **LIMITS, tokenizer=tokenizer)
    with pytest.raises(InputError, match="prompt 1 is list among texts"):
        prepare(["Hello", [1]], **LIMITS, tokenizer=tokenizer)
    with pytest.raises(InputError, match="leave attention_mask out"):
        prepare("H", **LIMITS, tokenizer=tokenizer, attention_mask=[1])


def test_a_text_that_is_too_long_is_our_error_alone(tokenizer):
    tokenizer.deprecation_warnings.clear()  # transformers logs its own opinion of the length once a tokenizer
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logger = logging.getLogger("transformers")  # does not propagate, so caplog sees nothing of it
    logger.addHandler(handler)
    try:
        with pytest.raises(InputError, match="more than the limit of"):
            prepare("word " * 3000, **LIMITS | {"vocab_size": 4096, "tokenizer": tokenizer})
    finally:
        logger.removeHandler(handler)
    assert not logged


@pytest.mark.parametrize("dtype", [np.int64, bool, np.float32])
def test_padding_on_either_side_is_stripped(dtype):
    mask = np.array([[0, 0, 1], [1, 1, 0], [1, 1, 1]]).astype(dtype)
    ids = [[-100, 5, 6], [7, 8, 999], [1, 2, 3]]  # ids under the mask may be anything
    batch = prepare(ids, **LIMITS, attention_mask=mask)
    assert [prompt.tolist() for prompt in batch.prompts] == [[6], [7, 8], [1, 2, 3]]
    assert batch.input_ids.tolist() == ids


def test_mask_errors():
    with pytest.raises(InputError, match=r"attention_mask has shape \(1, 2\), input_ids has \(1, 3\)"):
        prepare([[1, 2, 3]], **LIMITS, attention_mask=[[1, 1]])
    with pytest.raises(InputError, match="prompt 1 has a 0 in attention_mask at position 2"):
        prepare([[1, 2, 3, 4]] * 2, **LIMITS, attention_mask=[[1, 1, 1, 1], [0, 1, 0, 1]])
    with pytest.raises(InputError, match="only 1"):
        prepare([[1, 2]], **LIMITS, attention_mask=[[2, 1]])
    with pytest.raises(InputError, match="prompt 0 is empty"):
        prepare([[1, 2]], **LIMITS, attention_mask=[[0, 0]])


def test_padding_is_found_without_a_mask_as_in_transformers():
    ids = [[0, 0, 5], [6, 7, 8]]
    with pytest.warns(UserWarning, match="left out of the prompt"):
        assert prompts_of(ids, pad_token_id=0, eos_token_id=(2,)) == [[5], [6, 7, 8]]
    with pytest.warns(UserWarning, match="also an EOS token"):
        assert prompts_of(ids, pad_token_id=0, eos_token_id=(2, 0)) == ids
    with pytest.warns(UserWarning), pytest.raises(InputError, match="pass attention_mask with 1 there"):
        prompts_of([[5, 0, 6]], pad_token_id=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prompts_of(ids) == ids
        assert prompts_of(ids, pad_token_id=9) == ids
        assert prompts_of([[0, 5]], pad_token_id=0, eos_token_id=(0,)) == [[0, 5]]
        assert prompts_of(ids, pad_token_id=0, attention_mask=np.ones((2, 3))) == ids


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "prompt 0 is empty"),
        ([[]], "prompt 0 is empty"),
        (np.zeros((0, 4), np.int32), "batch of 0"),
        (np.zeros((2, 0), np.int32), "prompt 0 is empty"),
        ([[1, 2], [3]], r"differ in length \(2, 1\).*attention_mask"),
        ([[1, 2], 3], "differ in length"),
        ([1.0, 2.0], "dtype float64: token ids must be integers"),
        (np.array([True]), "dtype bool"),
        (np.zeros((1, 1, 2), np.int32), r"shape \(1, 1, 2\)"),
        (7, r"shape \(\)"),
        (None, "NoneType is not understood"),
        ({"input_ids": [1]}, "dict is not understood.*input_ids and attention_mask"),
        (DeviceTensor(), "cuda:0"),
        ([DeviceTensor()], "cuda:0"),
        ([[[1], [2, 3]]], "cannot be read as an array"),
        ([3, 100], "token id 100 at position 1 of prompt 0 .* 0 to 99"),
        ([[3, 4], [5, -1]], "token id -1 at position 1 of prompt 1"),
        (np.array([2**63 + 5], np.uint64), "outside the vocabulary"),
        ([1] * 13, "prompt 0 has 13 tokens and max_new_tokens=4, more than the limit of 16: ask for at most 3 new"),
    ],
)
def test_refused(inputs, message):
    with pytest.raises(InputError, match=message):
        prepare(inputs, **LIMITS)


def test_limits_are_inclusive():
    assert len(prompts_of([99] * 12)[0]) == 12


def test_max_length_counts_the_padded_prompt():
    limits = LIMITS | {"params": SamplingParams(max_length=8)}
    assert prepare([[0, 0, 5]], **limits, attention_mask=[[0, 0, 1]]).max_new_tokens == 5
    with pytest.raises(ConfigError, match="max_length=8"):
        prepare([1] * 8, **limits)


def test_forward_pass_generates_nothing():
    limits = LIMITS | {"params": None}
    batch = prepare([[0] * 16], **limits)
    assert batch.max_new_tokens == 0 and batch.lengths.tolist() == [16]
    with pytest.raises(InputError, match="prompt 0 has 17 tokens, more than the limit of 16: shorten it"):
        prepare([1] * 17, **limits)


def test_assemble_keeps_left_padding_and_fills_on_the_right():
    mask = [[0, 1, 1], [1, 1, 1]]
    batch = prepare([[9, 5, 6], [1, 2, 3]], **LIMITS, attention_mask=mask)
    out = assemble(batch, [[7], np.array([8, 8])], pad_token_id=0)
    assert out.dtype == np.int32 and out.tolist() == [[9, 5, 6, 7, 0], [1, 2, 3, 8, 8]]
    assert assemble(batch, [[], []], 0).tolist() == batch.input_ids.tolist()
    with pytest.raises(InputError, match="1 rows for a batch of 2"):
        assemble(batch, [[7]], 0)
