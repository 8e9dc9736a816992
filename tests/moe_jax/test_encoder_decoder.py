"""An encoder-decoder end to end: transformers, resident against offloaded, arguments, statistics, trace and faults."""

import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
import torch_files
from tiny_recipes_nllb import FORCED, PAD, START
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TextStreamer

from host_offload.trace import load_trace
from moe_jax import MoE
from moe_jax.checkpoint import convert_bin
from moe_jax.errors import CheckpointError, ConfigError, InputError, TransportError

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4  # logits have a standard deviation of about 2.2
CONFIG = {
    "dtype": "float32",
    "progress": False,
    "max_batch": 2,
    "max_sequence_length": 64,
    "page_size": 32,
    "decode_chunk": 4,
}
NEW = 8
# Pairs of settings, each with the fewest runs; the bank holds half of the 16 experts, so nothing is compiled again.
SETTINGS = (
    {"policy": "lru", "scope": "layer", "contract": "atomic-bypass", "slots": 8},
    {"policy": "lfu", "scope": "global", "contract": "atomic-bypass", "slots": 5},
    {"policy": "lfru", "scope": "layer", "contract": "atomic-forced-admit", "slots": [1, 3, 2, 1]},
    {"policy": "static", "scope": "global", "contract": "atomic-forced-admit", "slots": 8},
    {"policy": "lfru", "scope": "global", "contract": "atomic-bypass", "slots": 1},
)


def generate(moe, ids, **options):
    """New ids [B, 8] of a greedy run that never stops."""
    out = moe.generate(ids, NEW, forced_bos_token_id=FORCED, eos_token_id=[], **options)
    assert (out[..., 0] == START).all() and (out[..., 1] == FORCED).all()
    return out[..., 1:]


def both_rows(moe, want):
    """(logits, new ids) of the right-padded batch."""
    mask = want["batch_attention_mask"]
    targets = np.repeat(want["decoder_input_ids"], 2, axis=0)
    return moe.forward(want["batch_input_ids"], mask, targets), generate(
        moe, want["batch_input_ids"], attention_mask=mask
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.fixture(scope="module")
def directory(tiny, tmp_path_factory):
    """The tiny model whose experts have little room, with a tokenizer beside it."""
    directory = tmp_path_factory.mktemp("nllb") / "model"
    shutil.copytree(tiny("nllb_moe_capacity"), directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def want(expected):
    return expected("nllb_moe_capacity")


@pytest.fixture(scope="module")
def resident(directory, want):
    """(logits, new ids) of the batch with all experts on the device."""
    with MoE(directory, CONFIG | {"transport": "resident"}) as moe:
        return both_rows(moe, want)


@pytest.fixture(scope="module", params=("device", "callback"))
def moe(request, directory):
    with MoE(directory, CONFIG | {"transport": request.param, "cache_rate": 0.5}) as moe:
        yield moe


# What does not depend on the transport is tested with one of them.
on_device = pytest.mark.parametrize("moe", ["device"], indirect=True)
on_callback = pytest.mark.parametrize("moe", ["callback"], indirect=True)


@pytest.fixture(scope="module")
def counters():
    """What each transport counted under each of SETTINGS."""
    return {}


# ---------------------------------------------------------------------------------------------- results


def test_room_for_all_equals_transformers(tiny, expected):
    want = expected("nllb_moe")
    with MoE(tiny("nllb_moe"), CONFIG | {"transport": "device", "cache_rate": 0.25}) as moe:
        logits, ids = both_rows(moe, want)
        assert np.abs(logits - want["batch_logits"]).max() <= TOLERANCE
        np.testing.assert_array_equal(ids, want["batch_gen_ids"])
        assert moe.stats()["last"]["decode"]["misses"] > 0, "this is about offloaded experts"
        moe.verify_slots()


def test_dropping_equals_transformers(resident, want, moe):
    logits, ids = resident
    assert np.abs(logits - want["batch_logits"]).max() <= TOLERANCE
    np.testing.assert_array_equal(ids, want["batch_gen_ids"])
    np.testing.assert_array_equal(generate(moe, want["input_ids"]), want["gen_ids"])
    alone = generate(moe, want["input_ids"][0])
    assert alone.shape == (NEW,) and alone.tolist() == want["gen_ids"][0].tolist()


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_offloaded_equals_resident_to_the_bit(number, moe, want, resident, counters):
    both_rows(moe, want)
    compiled = moe._engine.programs.compilations
    moe.set_cache(**SETTINGS[number])
    logits, ids = both_rows(moe, want)
    np.testing.assert_array_equal(logits, resident[0])
    np.testing.assert_array_equal(ids, resident[1])
    moe.verify_slots()
    assert moe._engine.programs.compilations == compiled
    last = moe.stats()["last"]
    assert last["encoder"]["misses"] + last["decode"]["misses"] > 0
    counted = {phase: last[phase]["per_layer"] for phase in ("encoder", "prefill", "decode")}
    other = counters.setdefault(number, counted)
    assert counted == other, "both transports count the same events, on the same clock"


def test_nothing_is_copied_in_a_decode_step(moe, want):
    generate(moe, want["input_ids"])
    engine = moe._engine
    (text,) = {t for name, t in engine.programs.texts() if name == "decode" and "f32[1,32,4,16]" in t}
    shapes = [pool.shape for pool in jax.tree.leaves((engine._kv, engine.cache.banks)) if len(pool.shape) > 2]
    for shape in {*shapes, (1, 32, 4, 16)}:  # keys and values of a source of 30 tokens, padded
        sizes = ",".join(map(str, shape))
        assert f"f32[{sizes}]" in text
        assert not [line for line in text.splitlines() if f"f32[{sizes}]" in line and " copy(" in line]


# ---------------------------------------------------------------------------------------------- what it tells


@on_device
def test_statistics_tell_encoder_and_decoder_apart(moe, want):
    moe.set_cache(policy="lru", scope="layer", contract="atomic-bypass", slots=8)
    moe.reset_stats()
    generate(moe, want["batch_input_ids"], attention_mask=want["batch_attention_mask"])
    stats = moe.stats()
    last = stats["last"]
    sizes = {phase: (last[phase]["tokens"], last[phase]["steps"], last[phase]["lookups"]) for phase in counted_phases()}
    # 30 and 25 tokens of the sources; a start token each; all new ones but the last.
    assert sizes == {"encoder": (55, 1, 55 * 4), "prefill": (2, 1, 2 * 4), "decode": (14, 7, 14 * 4)}
    for phase in counted_phases():
        per_layer = np.add(last[phase]["per_layer"]["hits"], last[phase]["per_layer"]["misses"])
        ours = slice(0, 2) if phase == "encoder" else slice(2, 4)
        assert (per_layer[ours] > 0).all() and per_layer.sum() == per_layer[ours].sum()
    assert stats["total"]["encoder"] == last["encoder"] and last["ttft_seconds"] > 0
    memory = stats["memory"]
    # 2 rows of 64 source tokens, keys and values of 64 numbers in 4 layers.
    assert memory["state_bytes"] == 2 * 64 * 2 * 64 * 4 * 4
    assert moe.model_config.source_bytes_per_token(np.float32) == moe.model_config.kv_bytes_per_token(np.float32)
    assert stats["experts"]["layers"] == 4


def counted_phases():
    return ("encoder", "prefill", "decode")


@on_device
def test_a_trace_holds_the_targets_and_the_decoders_layers(moe, want, tmp_path):
    moe.set_cache(policy="lru", scope="layer", contract="atomic-bypass", slots=[1, 2, 3, 2])
    generate(moe, want["batch_input_ids"], attention_mask=want["batch_attention_mask"], trace=True)
    trace = moe.trace()
    assert trace.experts.shape == (16, 2, 2) and sorted(trace.phase.tolist()) == [0] * 2 + [1] * 14
    assert trace.header["moe_layers"] == [5, 7] and trace.header["slots"] == [3, 2]
    assert trace.weights.max() <= 0.8 + 1e-3
    assert (trace.weights == 0).any(), "dropped pairs keep their expert, with the weight 0"
    trace.save(tmp_path / "run.npz")
    np.testing.assert_array_equal(load_trace(tmp_path / "run.npz").experts, trace.experts)
    with pytest.raises(InputError, match="encoder-decoder"):
        moe.replay(trace)


@on_callback
def test_text_and_streams(moe, want):
    text = "Une phrase."
    ids = np.array(moe.tokenizer(text)["input_ids"])
    new = generate(moe, ids)
    wanted = moe.tokenizer.decode(new, skip_special_tokens=True)
    options = {"forced_bos_token_id": FORCED, "eos_token_id": []}
    assert moe.generate(text, NEW, **options) == wanted
    assert moe.generate([text], NEW, **options) == [wanted]
    assert "".join(moe.stream(text, NEW, **options)) == wanted
    chunks = [chunk[0] for chunk in moe.stream_ids(ids, NEW, **options)]
    assert chunks[0] == [FORCED] and sum(chunks, []) == new.tolist()
    printed = []

    class Recorder(TextStreamer):
        def put(self, value):
            printed.append(np.asarray(value).tolist())

        def end(self):
            printed.append("end")

    moe.generate(ids, NEW, streamer=Recorder(moe.tokenizer), **options)
    assert printed == [[[START]], *([token] for token in new.tolist()), "end"], (
        "transformers puts the start token first"
    )
    stop = moe.tokenizer.decode([new[3]])
    assert moe.generate(text, NEW, stop=stop, **options).endswith(stop)


@on_callback
def test_rows_end_apart_and_are_padded(moe, want):
    mask = want["batch_attention_mask"]
    new = generate(moe, want["batch_input_ids"], attention_mask=mask)
    ends = int(new[0, 3])
    assert ends not in new[1]
    out = moe.generate(
        want["batch_input_ids"], NEW, attention_mask=mask, forced_bos_token_id=FORCED, eos_token_id=[ends]
    )
    first = int(np.argmax(new[0] == ends))
    assert out[0, : first + 2].tolist() == [START, *new[0, : first + 1].tolist()]
    assert (out[0, first + 2 :] == PAD).all() and out.shape == (2, 1 + NEW)
    left = np.roll(want["batch_input_ids"], 5, axis=1)  # what was padded on the right is now on the left
    left[1] = want["batch_input_ids"][1]
    moved = np.roll(mask, 5, axis=1)
    moved[1] = 1
    np.testing.assert_array_equal(generate(moe, left, attention_mask=moved), new)
    with pytest.warns(UserWarning, match="padding is left out"):
        np.testing.assert_array_equal(generate(moe, want["batch_input_ids"]), new)


@on_callback
def test_the_first_token_is_free_without_a_forced_one_and_may_be_the_last(moe, want):
    ids = want["input_ids"]
    free = moe.generate(ids, 2, eos_token_id=[])
    logits = moe.forward(ids, decoder_input_ids=[[START]])
    assert free[0].tolist()[:2] == [START, int(logits[0, 0].argmax())]
    other = moe.generate(ids, 2, eos_token_id=[], decoder_start_token_id=9)
    logits = moe.forward(ids, decoder_input_ids=[[9]])
    assert other[0].tolist()[:2] == [9, int(logits[0, 0].argmax())]
    assert moe.generate(ids, NEW, forced_bos_token_id=5, eos_token_id=5).tolist() == [[START, 5]]


@on_callback
def test_generation_config_names_start_and_forced_token(want, moe, monkeypatch):
    settings = {"forced_bos_token_id": FORCED, "decoder_start_token_id": 9, "max_length": 6, "eos_token_id": 2}
    monkeypatch.setattr(moe, "generation_config", settings)
    params = moe.sampling_params()
    assert (params.forced_bos_token_id, params.decoder_start_token_id) == (FORCED, 9)
    out = moe.generate(want["input_ids"], eos_token_id=[])
    assert out[0, :2].tolist() == [9, FORCED] and out.shape == (1, 6)


# ---------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"forced_bos_token_id": 256},
            InputError,
            "forced_bos_token_id=256 is outside the vocabulary: ids go from 0 to 255",
        ),
        ({"decoder_start_token_id": 999}, InputError, "decoder_start_token_id=999 is outside"),
        ({"forced_bos_token_id": -1}, ConfigError, "forced_bos_token_id=-1"),
        ({"forced_bos_token_id": "deu_Latn"}, ConfigError, "forced_bos_token_id='deu_Latn'"),
        ({"max_new_tokens": 64}, InputError, "max_new_tokens=64 are more than the limit of 64: ask for at most 63"),
        ({"max_length": 1}, ConfigError, "max_length=1"),
        ({"decoder_input_ids": [[2]]}, ConfigError, "unknown generation key 'decoder_input_ids'"),
    ],
)
def test_a_wrong_argument_is_named(options, error, message, moe, want):
    with pytest.raises(error, match=message):
        moe.generate(want["input_ids"], **options)


def test_wrong_calls(moe, want, directory):
    with pytest.raises(InputError, match="decoder_input_ids is missing: .*decoder_start_token_id = 2"):
        moe.forward(want["input_ids"])
    with pytest.raises(InputError, match="decoder_input_ids: token id -3 at position 1"):
        moe.forward(want["batch_input_ids"], decoder_input_ids=[[2, -3], [2, 4]])
    with pytest.raises(InputError, match="decoder_input_ids has 1 rows and input_ids 2"):
        moe.forward(want["batch_input_ids"], decoder_input_ids=want["decoder_input_ids"])
    with pytest.raises(InputError, match="prompt 0 has 65 tokens, more than the limit of 64"):
        moe.generate([5] * 65, 2)
    with pytest.raises(InputError, match="a batch of 3 prompts"):
        moe.generate([[5]] * 3, 2)
    with pytest.raises(ConfigError, match="prefill_chunk=8: an encoder-decoder takes sources and targets whole"):
        MoE(directory, CONFIG | {"prefill_chunk": 8})


def test_a_decoder_refuses_the_arguments_of_an_encoder_decoder(tiny):
    with MoE(tiny("mixtral_swa_tied"), CONFIG | {"cache_rate": 0.5}) as moe:
        for name in ("forced_bos_token_id", "decoder_start_token_id"):
            with pytest.raises(ConfigError, match=f"{name}=3 is for encoder-decoder models.*leave it out"):
                moe.generate([1, 2], 2, **{name: 3})
        with pytest.raises(InputError, match="decoder_input_ids is for encoder-decoder models"):
            moe.forward([1, 2], decoder_input_ids=[1])
        assert "encoder" not in moe.stats()["total"]


# ---------------------------------------------------------------------------------------------- faults and files


def test_a_copy_that_fails_in_the_encoder(moe, want, monkeypatch):
    mover = moe._engine.transport._calls.mover
    wanted = generate(moe, want["input_ids"])
    moe.set_cache(
        policy="lru", scope="layer", contract="atomic-bypass", slots=8
    )  # empties it: there is something to move

    def broken(*args):
        raise OSError("link down")

    with monkeypatch.context() as patch:
        patch.setattr(mover, "move_ahead", broken)
        with pytest.raises(TransportError, match="while encoding: .*link down") as caught:
            moe.generate(want["input_ids"], NEW, forced_bos_token_id=FORCED, eos_token_id=[])
    assert caught.value.partial.tolist() == [[START]]
    engine = moe._engine
    assert engine._pages.num_free == engine.kv_pages - 1 and engine.running is None
    np.testing.assert_array_equal(generate(moe, want["input_ids"]), wanted)
    moe.verify_slots()


def test_a_converted_pytorch_checkpoint_gives_the_same(directory, want, resident, tmp_path):
    source = tmp_path / "released"
    shutil.copytree(directory, source)
    tensors = safetensors.numpy.load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    torch_files.write_state(source / "pytorch_model.bin", tensors)
    with pytest.raises(CheckpointError, match="python -m moe_jax.convert"):
        MoE(source, CONFIG)
    # The programs are those of `resident`, which the compilation cache has.
    with MoE(convert_bin(source, tmp_path / "converted", progress=False), CONFIG | {"transport": "resident"}) as moe:
        np.testing.assert_array_equal(both_rows(moe, want)[1], resident[1])
        assert moe.tokenizer is not None
