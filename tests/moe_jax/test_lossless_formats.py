"""Families whose experts are of another kind or format: offloaded runs equal resident ones to the bit."""

import numpy as np
import pytest

from moe_jax import MoE
from moe_jax.engine.loading import CacheBuilder

# (name, format of the experts, what became of the dense weights, transports); each transport costs some compilations,
# and gpt_oss through `device` is in engine/test_parity.py.
BOTH = ("device", "callback")
CASES = (
    ("gpt_oss", "dense", "float32", ("callback",)),
    ("gpt_oss_mxfp4", "mxfp4", "float32", BOTH),
    ("dbrx", "dense", "float32", BOTH),
    ("qwen3_moe_fp8", "fp8", "fp8 -> float32", BOTH),
    ("qwen3_moe_ct", "int4", "int4 -> float32", BOTH),
    ("mixtral_awq", "int4", "int4 -> float32", BOTH),
    ("qwen3_moe_gptq_actorder", "int4", "int4 -> float32", BOTH),
)
POLICY = {"device": "lru", "callback": "lfu"}
TOLERANCE = 1e-4
CONFIG = {
    "dtype": "float32",
    "progress": False,
    "max_batch": 1,
    "max_sequence_length": 64,
    "page_size": 16,
    "decode_chunk": 4,
}
NEW_TOKENS = 6


def run(directory, prompt, forward=True, **config):
    """(logits of the prompt or None, prompt and generated ids, stats)."""
    with MoE(directory, CONFIG | config) as moe:
        logits = moe.forward(prompt) if forward else None
        ids = moe.generate(prompt, max_new_tokens=NEW_TOKENS, eos_token_id=[])
        stats = moe.stats()
        if config["transport"] != "resident":
            moe.verify_slots()
    return logits, ids, stats


@pytest.mark.parametrize(("name", "form", "dense", "transports"), CASES, ids=[name for name, *_ in CASES])
def test_a_quarter_of_the_experts_in_slots_changes_no_bit(name, form, dense, transports, tiny, expected):
    want = expected(name)
    prompt = want["input_ids"]
    logits, ids, stats = run(tiny(name), prompt, transport="resident")
    np.testing.assert_array_equal(ids[0, prompt.shape[1] :], want["gen_ids"].ravel()[:NEW_TOKENS])
    assert stats["last"]["decode"]["misses"] == 0
    assert stats["experts"]["format"] == {"gate_up": form, "down": form} and stats["dense_weights"] == dense
    assert np.abs(logits - want["logits"]).max() <= TOLERANCE
    for transport in transports:
        config = {"transport": transport, "policy": POLICY[transport], "cache_rate": 0.25}
        forward = transport == transports[0]  # one more program would cost more than it shows
        other, same, stats = run(tiny(name), prompt, forward, **config)
        if forward:
            assert other.tobytes() == logits.tobytes(), f"{transport}: prompt logits differ"
        np.testing.assert_array_equal(same, ids, err_msg=transport)
        assert stats["last"]["decode"]["misses"] > 0, "this is about offloaded experts"
        assert set(stats["kernel"]) == {f"{transport}/xla"}


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("gpt_oss", "pallas-interpret"),
        ("gpt_oss_mxfp4", "pallas-interpret"),
        ("qwen3_moe_gptq_actorder", "xla (no kernel undoes the column order of int4 rows)"),
    ],
    ids=["gpt_oss", "gpt_oss_mxfp4", "qwen3_moe_gptq_actorder"],
)
def test_a_gpus_code_path_in_the_interpreter(name, kernel, tiny, expected, monkeypatch):
    """Slot plans are kernels for every format; experts that the kernels do not serve say so in stats."""
    original = CacheBuilder.__init__

    def interpreted(self, *args):
        original(self, *args)
        self.implementation = "interpret"

    monkeypatch.setattr(CacheBuilder, "__init__", interpreted)
    want = expected(name)
    with MoE(tiny(name), CONFIG | {"transport": "device", "cache_rate": 0.25}) as moe:
        ids = moe.generate(want["input_ids"], max_new_tokens=4, eos_token_id=[])
        np.testing.assert_array_equal(ids[0, want["input_ids"].shape[1] :], want["gen_ids"].ravel()[:4])
        stats = moe.stats()
        assert set(stats["kernel"]) == {f"device/{kernel}"}
        assert stats["last"]["decode"]["misses"] > 0
        moe.verify_slots()
