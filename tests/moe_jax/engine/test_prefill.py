"""Long prompts: in chunks, in rounds of few rows, each distinct expert moved at most once a chunk."""

import numpy as np
import pytest

from host_offload import slots
from moe_jax import MoE
from moe_jax.engine.engine import block_rows, power_of_two

pytestmark = pytest.mark.slow

CONFIG = {
    "cache_rate": 0.25,
    "progress": False,
    "max_batch": 2,
    "max_sequence_length": 128,
    "page_size": 16,
    "decode_chunk": 4,
    "trace": True,
    "dtype": "float32",
}
PROMPT = np.random.default_rng(5).integers(3, 256, 75)
L, E, K = 3, 8, 2


@pytest.fixture(scope="module")
def whole(tiny):
    """Ids and logits with everything resident and the prompt in one chunk."""
    config = {key: value for key, value in CONFIG.items() if key != "cache_rate"}
    with MoE(tiny("mixtral"), config | {"transport": "resident"}) as moe:
        yield moe.generate(PROMPT, 6, eos_token_id=[]), moe.forward(PROMPT)


def counted(moe):
    """Checks the counters of the last call's prefill against its routing; returns (chunks, misses)."""
    prefill, row = moe.stats()["last"]["prefill"], moe.stats()["experts"]["bytes_each"]
    trace = moe.trace()
    chunks = [np.zeros(L, int) for _ in range(prefill["steps"])]
    first = trace.step.min()
    for step, layer, experts in trace.events("prefill"):
        chunks[step - first][layer] = len(experts)
    distinct = np.sum(chunks, axis=0)
    layers = prefill["per_layer"]
    assert [h + m for h, m in zip(layers["hits"], layers["misses"], strict=True)] == distinct.tolist()
    assert prefill["misses"] <= distinct.sum(), "an expert moved twice in a chunk"
    assert prefill["bytes_moved"] == prefill["misses"] * row <= distinct.sum() * row
    assert prefill["lookups"] == prefill["tokens"] * L * K
    return prefill["steps"], prefill["misses"]


@pytest.fixture
def moves(monkeypatch):
    """Every row copy that the mover makes: (layer, expert) in order."""
    from host_offload.transport.host_calls import NumpyMover

    seen, move = [], NumpyMover.move

    def recorded(self, ctx, banks, layer, pairs):
        seen.extend((layer, expert) for expert, _ in pairs)
        return move(self, ctx, banks, layer, pairs)

    monkeypatch.setattr(NumpyMover, "move", recorded)
    return seen


@pytest.mark.parametrize("transport, group", (("device", 3), ("callback", 1)))
def test_chunks_and_rounds(transport, group, tiny, whole, moves, monkeypatch):
    """Chunks of 16 tokens; rounds of `group` experts, so a chunk that misses eight takes several."""
    with MoE(tiny("mixtral"), {"progress": False, "transport": "callback", "cache_rate": 0.25}) as probe:
        row = probe.stats()["experts"]["bytes_each"]
    monkeypatch.setattr(slots, "ROUND_BYTES", group * row)
    with MoE(tiny("mixtral"), CONFIG | {"transport": transport, "prefill_chunk": 16}) as moe:
        assert moe._engine.transport.group == group
        assert moe._engine.transport.spare == max(2 * group, min(E, 2 * K)) < E
        ids, logits = whole
        for turn in ("empty", "warm"):
            moves.clear()
            np.testing.assert_array_equal(moe.generate(PROMPT, 1, eos_token_id=[]), ids[: len(PROMPT) + 1])
            moe.verify_slots()
            chunks, misses = counted(moe)
            assert chunks == 5, turn  # 75 tokens: four chunks of 16 and one of 11, padded
            assert len(moves) == misses > group, turn
        for contract in ("atomic-forced-admit", "atomic-bypass"):
            moe.set_cache(contract=contract, policy="lfu", scope="global")
            np.testing.assert_array_equal(moe.generate(PROMPT, 6, eos_token_id=[]), ids)
            moe.verify_slots()
            counted(moe)
        np.testing.assert_allclose(moe.forward(PROMPT), logits, atol=1e-4)
        assert moe.stats()["last"]["prefill"]["steps"] == 5


def test_one_chunk_needs_every_expert_and_moves_each_once(tiny, whole, moves):
    with MoE(tiny("mixtral"), CONFIG | {"transport": "callback"}) as moe:
        np.testing.assert_array_equal(moe.generate(PROMPT, 1, eos_token_id=[]), whole[0][: len(PROMPT) + 1])
        chunks, misses = counted(moe)
        assert chunks == 1
        assert sorted(moves) == [(layer, expert) for layer in range(L) for expert in range(E)]
        assert misses == L * E
        # Bypassed ones were moved, used and not kept: what stays fits the slots.
        prefill = moe.stats()["last"]["prefill"]
        assert prefill["bypasses"] == L * E - 6 and moe.stats()["occupied_slots"] == 6


def test_rows_of_a_batch_share_the_chunk(tiny, whole):
    """Two prompts of different lengths: the shorter one ends in an earlier chunk than the longer one."""
    with MoE(tiny("mixtral"), CONFIG | {"transport": "callback", "prefill_chunk": 32}) as moe:
        ids, mask = np.zeros((2, 75), int), np.zeros((2, 75), int)
        ids[0], mask[0] = PROMPT, 1
        ids[1, 55:], mask[1, 55:] = PROMPT[:20], 1
        out = moe.generate(ids, 6, eos_token_id=[], attention_mask=mask)
        assert moe.stats()["last"]["prefill"]["steps"] == 5  # 32 tokens over two rows are 16 a row
        assert moe.stats()["last"]["prefill"]["tokens"] == 95
        moe.trace()
        np.testing.assert_array_equal(out[0], whole[0])
        alone = moe.generate(PROMPT[:20], 6, eos_token_id=[])
        np.testing.assert_array_equal(out[1, 75:], alone[20:])


def test_padding_sizes():
    assert [power_of_two(n) for n in (0, 1, 2, 3, 4, 5, 64, 65)] == [1, 1, 2, 4, 4, 8, 64, 128]

    class Model:
        num_experts = 16

    for platform in ("cpu", "gpu"):  # small tiles while experts get few rows, larger ones for long chunks
        tiles = [block_rows(platform, 16 * rows, Model) for rows in (1, 4, 16, 64, 256, 1024)]
        assert tiles == sorted(tiles) and tiles[0] <= 16 < tiles[-1]
        assert all(power_of_two(tile) == tile for tile in tiles)
