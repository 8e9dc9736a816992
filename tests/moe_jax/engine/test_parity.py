"""`forward` and `generate` against transformers (fp32, eager), few experts cached: logits, greedy ids, padded batch."""

import numpy as np
import pytest

from moe_jax import MoE

pytestmark = [pytest.mark.slow, pytest.mark.fully_optimised]

# Every family's tokens and the logits that chose them are compared in `test_lossless_families.py`.
NAMES = ("mixtral_swa_tied", "qwen3_moe", "gpt_oss")
TOLERANCE = 1e-4  # logits have a standard deviation of about 2.5
CONFIG = {
    "transport": "device",
    "cache_rate": 0.25,
    "dtype": "float32",
    "progress": False,
    "max_batch": 2,
    "max_sequence_length": 64,
    "page_size": 64,
    "decode_chunk": 4,
}


@pytest.fixture(scope="module", params=NAMES)
def case(request, tiny, expected):
    """(model, the oracle's arrays)."""
    with MoE(tiny(request.param), CONFIG) as moe:
        yield moe, expected(request.param)


def test_logits(case):
    moe, want = case
    logits = moe.forward(want["input_ids"])
    assert logits.shape == want["logits"].shape
    assert np.abs(logits - want["logits"]).max() <= TOLERANCE
    moe.verify_slots()


def test_greedy_ids(case):
    moe, want = case
    T = want["input_ids"].shape[1]
    count = want["gen_ids"].size
    out = moe.generate(want["input_ids"], max_new_tokens=count, eos_token_id=[])
    np.testing.assert_array_equal(out[0, T:], want["gen_ids"].ravel())
    again = moe.generate(want["input_ids"], max_new_tokens=count, eos_token_id=[], temperature=0, do_sample=True)
    np.testing.assert_array_equal(again, out)
    stats = moe.stats()["last"]
    assert stats["decode"]["misses"] > 0, "this is about offloaded experts"
    moe.verify_slots()


def test_left_padded_batch(case):
    moe, want = case
    mask = want["batch_attention_mask"].astype(bool)
    logits = moe.forward(want["batch_input_ids"], want["batch_attention_mask"])
    assert np.abs(logits - want["batch_logits"])[mask].max() <= TOLERANCE
    assert not logits[~mask].any()
    greedy = want["batch_logits"][:, -1].argmax(-1)
    out = moe.generate(
        want["batch_input_ids"], max_new_tokens=1, eos_token_id=[], attention_mask=want["batch_attention_mask"]
    )
    np.testing.assert_array_equal(out[:, -1], greedy)
