"""The floors: arithmetic against hand-made numbers, and rates that are rates."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_jax.errors import ConfigError
from moe_jax.floors import Ceilings, decode_floor, dense_bytes_read, find_ceilings, kv_tokens_read
from moe_jax.models.qwen3_moe.config import Qwen3MoeConfig

CEILINGS = Ceilings(link_gbps=50, memory_gbps=4000, link_source="given", memory_source="given")


def config(**changes):
    return Qwen3MoeConfig.from_hf(
        {
            "vocab_size": 1000,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            **changes,
        }
    )


def test_floor_of_a_run():
    # 10 steps: 30 misses of 80 accesses, rows of 1 MB; 4 MB of dense weights and 0.6 MB of KV cache a step.
    decode = {"steps": 10, "accesses": 80, "bytes_moved": 30_000_000}
    floor = decode_floor(decode, CEILINGS, dense_bytes=4_000_000, row_bytes=1_000_000, kv_bytes=6_000_000)
    assert floor.link_ms == pytest.approx(3e6 / 50e9 * 1e3)  # 3 MB a step at 50 GB/s
    assert floor.memory_ms == pytest.approx((4e6 + 8e6 + 0.6e6) / 4e12 * 1e3)
    assert floor.total_ms == pytest.approx(0.06 + 0.00315)
    assert floor.efficiency(2 * floor.total_ms) == pytest.approx(0.5)


def test_nothing_decoded_has_no_floor():
    decode = {"steps": 0, "accesses": 0, "bytes_moved": 0}
    assert decode_floor(decode, CEILINGS, dense_bytes=1, row_bytes=1, kv_bytes=0) is None


def test_an_embedding_counts_only_where_it_is_the_head():
    assert dense_bytes_read(config(tie_word_embeddings=True), "bfloat16", 500_000) == 500_000
    assert dense_bytes_read(config(tie_word_embeddings=False), "bfloat16", 500_000) == 500_000 - 1000 * 64 * 2
    assert dense_bytes_read(config(tie_word_embeddings=False), "float32", 500_000) == 500_000 - 1000 * 64 * 4


def test_cached_tokens_of_a_run():
    # Prompt 5, three new tokens: the first comes from prefill, two are fed and see 6 and 7 tokens.
    assert kv_tokens_read([5], [3]) == 13
    assert kv_tokens_read([5, 2], [3, 1]) == 13
    assert kv_tokens_read([5], [0]) == kv_tokens_read([5], [1]) == 0
    assert kv_tokens_read([5], [3], window=4) == 8
    with pytest.raises(ValueError):
        kv_tokens_read([5, 6], [3])


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), max_size=4), st.none() | st.integers(1, 50))
def test_cached_tokens_equal_a_walk_over_the_steps(rows, window):
    walked = 0
    for prompt, new in rows:
        length = prompt
        for _ in range(new - 1):
            length += 1
            walked += length if window is None else min(length, window)
    assert kv_tokens_read([p for p, _ in rows], [n for _, n in rows], window) == walked


def test_measured_rates_and_given_ones():
    measured = find_ceilings()
    assert 0.1 < measured.link_gbps < 1000 and 0.1 < measured.memory_gbps < 1000
    assert "no GPU" in measured.link_source and "host memory" in measured.memory_source
    given_rates = find_ceilings(50, 4000)
    assert given_rates == dataclasses.replace(CEILINGS)
    for bad in (0, -1, float("inf"), float("nan"), "fast"):
        with pytest.raises(ConfigError, match="link_gbps="):
            find_ceilings(bad, 1)
        with pytest.raises(ConfigError, match="hbm_gbps="):
            find_ceilings(1, bad)


def test_every_pass_of_the_memory_measure_is_executed():
    # If XLA merged the chained reductions, the rate would rise with their number.
    import jax

    from moe_jax import floors

    assert jax.devices()[0].platform == "cpu"
    few = floors.measure_memory(32 << 20)
    reads = floors.READS["cpu"]
    floors.READS["cpu"] = 8 * reads
    try:
        many = floors.measure_memory(32 << 20)
    finally:
        floors.READS["cpu"] = reads
    assert np.log2(many / few) < 2, (few, many)
