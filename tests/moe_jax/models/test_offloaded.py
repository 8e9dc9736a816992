"""DeepSeek and Jamba end to end with a quarter of the experts cached: resident bit by bit, and transformers.

The other families are in `engine/test_parity.py` and `test_lossless.py`.
"""

import jax
import numpy as np
import pytest

from moe_jax import MoE

NAMES = ("deepseek_v2_lite", "deepseek_v2", "deepseek_v3", "jamba")
TOLERANCE = 1e-4  # logits have a standard deviation of about 2.5
CONFIG = {
    "dtype": "float32",
    "progress": False,
    "max_batch": 2,
    "max_sequence_length": 64,
    "page_size": 64,
    "decode_chunk": 4,
}


def run(directory, want, *, forward=True, **cache):
    """(logits [1, T, V] or None, new ids, statistics) of the prompt and its greedy continuation; checks the slots."""
    with MoE(directory, CONFIG | cache) as moe:
        logits = moe.forward(want["input_ids"]) if forward else None
        ids = moe.generate(want["input_ids"], max_new_tokens=want["gen_ids"].size, eos_token_id=[])
        stats = moe.stats()
        if cache["transport"] != "resident":
            moe.verify_slots()
        pages = {",".join(map(str, pool.shape)) for pool in jax.tree.leaves(moe._engine._kv)}
        for name, text in moe._engine.programs.texts():
            copies = [line for line in text.splitlines() if " copy(" in line and any(f"[{p}]" in line for p in pages)]
            assert not copies, name
    return logits, ids[0, want["input_ids"].shape[1] :], stats


@pytest.mark.parametrize("name", NAMES)
def test_offloaded_equals_resident_and_transformers(name, tiny, expected):
    want = expected(name)
    logits, ids, stats = run(tiny(name), want, transport="resident")
    assert np.abs(logits - want["logits"]).max() <= TOLERANCE
    np.testing.assert_array_equal(ids, want["gen_ids"].ravel())
    memory = stats["memory"]
    assert memory["kv_bytes"] > 0 and (memory["state_bytes"] > 0) == (name == "jamba")
    # V2 and V3 share all but their routers with V2-Lite: the cheaper transport will do.
    transports = ("device", "callback") if name in ("deepseek_v2_lite", "jamba") else ("callback",)
    for transport in transports:
        forward = transport == transports[0]  # compiling one more program costs more than it shows
        offloaded, same, stats = run(tiny(name), want, forward=forward, transport=transport, cache_rate=0.25)
        if forward:
            np.testing.assert_array_equal(offloaded, logits)
        np.testing.assert_array_equal(same, ids)
        assert stats["last"]["decode"]["misses"] > 0, "this is about offloaded experts"


@pytest.mark.parametrize("name", ("deepseek_v3", "jamba"))
def test_left_padded_batch_in_chunks(name, tiny, expected):
    """A chunk of 16 tokens a row: the second row's prompt ends in another chunk than the first row's."""
    want = expected(name)
    mask = want["batch_attention_mask"].astype(bool).copy()
    mask[0, : 22 if name == "deepseek_v3" else 5] = False
    with MoE(tiny(name), CONFIG | {"transport": "callback", "cache_rate": 0.25, "prefill_chunk": 32}) as moe:
        rows = [want["batch_input_ids"][row, mask[row]] for row in range(2)]
        together = moe.generate(want["batch_input_ids"], 5, eos_token_id=[], attention_mask=mask.astype(int))[:, -5:]
        alone = [moe.generate(row, 5, eos_token_id=[])[-5:] for row in rows]
        np.testing.assert_array_equal(together, np.stack(alone))
        assert together[1, 0] == want["batch_logits"][1, -1].argmax()
