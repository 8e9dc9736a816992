"""The plan of memory: it is what a load really takes, it fits, and what does not fit is refused with a way out."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moe_jax.engine.loading as loading
from host_offload.disk_tier import tier_bytes
from host_offload.store import RowSpec
from moe_jax import MoE, OffloadConfig
from moe_jax.checkpoint import open_checkpoint
from moe_jax.engine.loading import map_experts, read_model_config
from moe_jax.errors import ConfigError
from moe_jax.models.mixtral.config import MixtralConfig
from moe_jax.models.registry import abstract_params
from moe_jax.planner import WORKSPACE_BYTES, largest_bytes, params_bytes, plan_memory

GIB = 1 << 30
CFG = MixtralConfig.from_hf(
    {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 4096,
    }
)
DTYPE = np.dtype(np.float32)
SPEC = RowSpec({name: (shape, DTYPE) for name, shape in CFG.expert_row_shapes().items()}, L=4, E=8)
ROW, DENSE = SPEC.row_bytes, 10**6
LARGEST, TRANSFER = 60_000, 65_536  # bytes of the largest dense array, and the power of two above
SPARE_ROWS = 8  # both a decode step of 8 sequences and two prefill rounds of half a layer's experts


def plan(device_bytes=2 * GIB, host_bytes=None, largest=LARGEST, **config):
    sizes = {"dense_bytes": DENSE, "largest_dense_bytes": largest}
    sizes |= {"device_bytes": device_bytes, "host_bytes": host_bytes}
    return plan_memory(CFG, DTYPE, OffloadConfig.parse(config), SPEC, **sizes)


# One of each family, with states, latents, sources and packed experts among them.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    (
        "mixtral",
        "qwen3_moe_gptq",
        "qwen3_5_moe",
        "olmoe",
        "deepseek_v2_lite",
        "deepseek_v3_fp8",
        "deepseek_v4_fp4",
        "jamba",
        "gpt_oss_mxfp4",
        "dbrx",
        "nllb_moe",
    ),
)
def test_a_load_takes_what_was_planned_without_weights(name, tiny):
    config = OffloadConfig.parse({"cache_rate": 0.5, "max_batch": 2, "progress": False, "transport": "callback"})
    with open_checkpoint(tiny(name)) as files:
        cfg = read_model_config(files)
        dtype = loading.compute_dtype(config, files)
        _, store, _ = map_experts(files, cfg, dtype)
        params = abstract_params(cfg, dtype)[1]
        dense = {"dense_bytes": params_bytes(params), "largest_dense_bytes": largest_bytes(params)}
        planned = plan_memory(cfg, dtype, config, store.spec, **dense, device_bytes=None)
    with MoE(tiny(name), config) as moe:
        assert planned.memory() == moe.stats()["memory"]
        engine, builder = moe._engine, moe._builder
        assert planned.dense_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(builder.parts.params))
        assert planned.kv_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(engine._kv))
        banks = sum(bank.nbytes for bank in engine.cache.banks.values())
        assert planned.slots.nbytes + planned.spare_bytes == banks
        assert planned.pool_bytes == sum(slab.nbytes for layer in builder.pool.slabs for slab in layer.values())


def test_a_gpus_plan_adds_up():
    found = plan(cache_rate=0.5, kv_cache_ratio=0.001)
    assert (
        found.kv_bytes == found.kv_pages * 64 * 4 * 2 * 2 * 16 * 4
    )  # tokens, layers, k and v, heads, head width, float32
    assert (found.slots.total, found.slots.per_layer, found.spare_rows) == (16, (4, 4, 4, 4), SPARE_ROWS)
    assert found.workspace_bytes == WORKSPACE_BYTES and found.pool_bytes == 32 * ROW
    assert found.staging_bytes == 8 * ROW, "a layer's experts, as these are smaller than 128 MiB"
    assert found.total_device_bytes == DENSE + found.kv_bytes + WORKSPACE_BYTES + (16 + SPARE_ROWS + 8) * ROW
    assert plan(cache_rate=0.5, kv_cache_ratio=0.001, lookahead_rows=3).staging_bytes == 3 * ROW


@pytest.mark.parametrize(("largest", "kept"), [(65_535, 65_536), (65_536, 65_536), (65_537, 131_072)])
def test_a_gpus_plan_counts_what_xla_keeps_for_transfers(largest, kept):
    found = plan(cache_rate=0.5, largest=largest)
    assert found.transfer_bytes == found.fixed()["transfer_bytes"] == found.memory()["transfer_bytes"] == kept
    assert found.total_device_bytes == plan(cache_rate=0.5, largest=1).total_device_bytes, "it is the host's"
    assert plan(cache_rate=0.5, largest=largest, transport="device").pool_bytes == 32 * ROW, "and not the pool's"
    assert plan(device_bytes=None, largest=largest).memory()["transfer_bytes"] == 0, "a CPU transfers nothing"


def test_transfers_are_as_large_as_the_largest_array_in_its_dtype(monkeypatch):
    # The most numbers are not the most bytes.
    params = {"layer": {"many": np.zeros(3000, np.int8), "wide": np.zeros((10, 100), np.float32)}, "few": np.zeros(2)}
    assert (params_bytes(params), largest_bytes(params), largest_bytes({})) == (7016, 4000, 0)
    monkeypatch.setattr(loading, "device_bytes", lambda: 2 * GIB)
    monkeypatch.setattr(loading, "host_memory_bytes", lambda: 0)
    abstract = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), params)
    for arrays in (params, abstract):
        found = loading.plan_parts(CFG, DTYPE, OffloadConfig.parse({"cache_rate": 0.5}), SPEC, arrays)
        assert (found.dense_bytes, found.transfer_bytes) == (7016, 4096)


def test_kv_cache_ratio_sets_the_pages_between_one_and_all_sequences():
    token = CFG.kv_bytes_per_token(DTYPE)
    some = plan(kv_cache_ratio=0.01, max_batch=8, cache_rate=0.5)
    assert some.kv_pages == int(0.01 * 2 * GIB) // (64 * token) + 8 + 1
    assert plan(kv_cache_ratio=0, cache_rate=0.5).kv_pages == 4096 // 64 + 9, "one longest sequence"
    assert plan(kv_cache_ratio=0.3, cache_rate=0.5).kv_pages == 8 * 4096 // 64 + 9, "no more than max_batch of them"


def test_auto_is_resident_where_all_of_it_fits_and_only_there():
    resident = plan(kv_cache_ratio=0)
    assert (resident.transport, resident.slots.total, resident.pool_bytes) == ("resident", 32, 0)
    allowed = 0.75  # of the device
    exact = -int(-resident.total_device_bytes // allowed)
    assert plan(device_bytes=exact, kv_cache_ratio=0).transport == "resident"
    offloaded = plan(device_bytes=exact - 8, kv_cache_ratio=0, lookahead_rows=0)
    assert (offloaded.transport, offloaded.slots.total, offloaded.pool_bytes) == ("device", 31, 32 * ROW)
    assert plan(cache_rate=1.0).transport == "device", "a size was asked for"


def test_what_does_not_fit_is_refused_with_the_bytes_that_lack():
    least = plan(expert_slots=4, kv_cache_ratio=0)
    device = least.total_device_bytes
    assert plan(device, device_memory_ratio=1, expert_slots=4, kv_cache_ratio=0) is not None
    with pytest.raises(ConfigError, match=r"^device memory is 1 bytes too small.*scope='global'.*max_sequence_length"):
        plan(device - 1, device_memory_ratio=1, expert_slots=4, kv_cache_ratio=0)
    with pytest.raises(ConfigError, match=r"What helps: device_memory_ratio=1\.0 \(at most \d+ bytes\), or "):
        plan(device, device_memory_ratio=0.999, expert_slots=4, kv_cache_ratio=0)
    with pytest.raises(ConfigError, match=f"take {5 * ROW} bytes, {ROW} more than .*4 slots would fit"):
        plan(device, device_memory_ratio=1, expert_slots=5, kv_cache_ratio=0)
    short = dict(expert_slots=4, kv_cache_ratio=0, max_sequence_length=64, max_batch=1)
    fits = plan(**short).total_device_bytes
    with pytest.raises(
        ConfigError, match=r"device_memory_ratio=1\.0 .*, together with scope='global'.*, together with"
    ):
        plan(fits - 500_000, device_memory_ratio=0.999, **short)
    with pytest.raises(ConfigError, match=f"a device with {device} bytes; no setting"):
        plan(DENSE, expert_slots=4, kv_cache_ratio=0)
    with pytest.raises(ConfigError, match="transport='device', which leaves"):
        plan(device, device_memory_ratio=1, transport="resident", kv_cache_ratio=0)
    with pytest.raises(ConfigError, match=r"host memory is \d+ bytes too small: the experts take 1572864.*'callback'"):
        plan(host_bytes=32 * ROW, cache_rate=0.5, transport="device")
    assert plan(host_bytes=32 * ROW, transport="resident", kv_cache_ratio=0).pool_bytes == 0
    with pytest.raises(ConfigError, match="max_sequence_length=5000: the model was made for 4096"):
        plan(max_sequence_length=5000)


def test_experts_that_host_memory_does_not_hold_stay_on_disk():
    full = plan(cache_rate=0.5, host_memory_bytes=32 * ROW)
    assert (full.transport, full.host_rows, full.disk_why, full.pool_bytes) == ("device", 32, None, 32 * ROW)
    half = tier_bytes(SPEC, 16)
    found = plan(cache_rate=0.5, host_memory_bytes=half, host_bytes=GIB)
    assert (found.transport, found.host_rows, found.pool_bytes) == ("callback", 16, half)
    assert found.disk_why == f"16 of 32 experts fit into host_memory_bytes={half}"
    assert found.transport_why == f"{found.disk_why}; the host reads the others from disk"
    assert plan(cache_rate=0.5, host_memory_bytes=half - 1).host_rows == 15
    machine = plan(cache_rate=0.5, host_bytes=32 * ROW, transport="callback")
    assert (machine.transport, machine.transport_why) == ("callback", "as configured")
    assert machine.pool_bytes <= 0.8 * 32 * ROW and f"80% of {32 * ROW} bytes" in machine.disk_why
    resident = plan(transport="resident", kv_cache_ratio=0, host_memory_bytes=half)
    assert (resident.host_rows, resident.pool_bytes, resident.disk_why) == (0, 0, None)


def test_host_memory_that_cannot_serve_one_event_is_refused_with_the_bytes_that_can():
    least = tier_bytes(SPEC, SPARE_ROWS)
    assert plan(cache_rate=0.5, host_memory_bytes=least).host_rows == SPARE_ROWS
    with pytest.raises(ConfigError, match=f"is 1 bytes too small: .* hold 7 .* may need 8 .*at least {least}$"):
        plan(cache_rate=0.5, host_memory_bytes=least - 1)
    with pytest.raises(ConfigError, match="host_memory_bytes=1400000 is more than 90% of 1500000 bytes"):
        plan(cache_rate=0.5, host_memory_bytes=1_400_000, host_bytes=1_500_000)
    with pytest.raises(ConfigError, match="host_memory_bytes=1000 allows 1000. What helps: transport='callback'"):
        plan(cache_rate=0.5, host_memory_bytes=1000, transport="device")


def test_host_memory_holds_transfers_beside_the_experts():
    exact = -int(-(32 * ROW + TRANSFER) // 0.9)
    assert plan(host_bytes=exact, cache_rate=0.5).host_rows == 32
    lacking = f"is 1 bytes too small: .* 90% of {exact - 1} bytes of host memory .less {TRANSFER} for transfers to the"
    with pytest.raises(ConfigError, match=f"{lacking} device. allows {32 * ROW - 1}. What helps"):
        plan(host_bytes=exact - 1, cache_rate=0.5, transport="device")
    without = -int(-(32 * ROW) // 0.9)
    assert plan(device_bytes=None, host_bytes=without, cache_rate=0.5).host_rows == 32
    with pytest.raises(ConfigError, match=f"90% of {without - 1} bytes of host memory allows {32 * ROW - 1}. What"):
        plan(device_bytes=None, host_bytes=without - 1, cache_rate=0.5, transport="device")

    tier = plan(host_bytes=exact - 1, cache_rate=0.5)
    assert tier.pool_bytes <= 0.8 * (exact - 1) - TRANSFER < tier_bytes(SPEC, tier.host_rows + 1)
    named = f"{exact - 1} bytes of host memory (less {TRANSFER} for transfers to the device)"
    assert tier.disk_why == f"{tier.host_rows} of 32 experts fit into 80% of {named}"
    most = 32 * ROW - 1
    assert plan(host_bytes=exact - 1, cache_rate=0.5, host_memory_bytes=most).host_rows == 31, "it is for experts alone"
    with pytest.raises(
        ConfigError, match=f"host_memory_bytes={most} is more than 90% .* device.: give at most {most - 1},"
    ):
        plan(host_bytes=exact - 2, cache_rate=0.5, host_memory_bytes=most)
    with pytest.raises(ConfigError, match="allows 0, which hold 0 experts"):
        plan(host_bytes=TRANSFER, cache_rate=0.5)


@given(
    st.integers(GIB, 2 * GIB),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from([{}, {"cache_rate": 0.3}, {"expert_slots": 7}, {"expert_cache_bytes": 500_000}]),
    st.sampled_from(["layer", "global"]),
    st.sampled_from(["auto", "device", "callback"]),
)
def test_a_plan_fits_or_says_why_not(device, ratio, kv, size, scope, transport):
    config = size | {"device_memory_ratio": ratio, "kv_cache_ratio": kv, "scope": scope, "transport": transport}
    try:
        found = plan(device, **config)
    except ConfigError as error:
        assert "bytes too small" in str(error) or "slots" in str(error)
    else:
        assert found.total_device_bytes <= ratio * device
        assert found.slots.total >= (4 if scope == "layer" else 1)
        assert found.kv_pages >= 4096 // 64 + 9
        others = ("kv_pages", "device_bytes", "pool_bytes", "transfer_bytes")
        assert sum(v for k, v in found.memory().items() if k not in others) == found.total_device_bytes


def test_a_load_that_does_not_fit_touches_no_weight(tiny, monkeypatch):
    def loaded(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr(loading, "device_bytes", lambda: GIB)
    monkeypatch.setattr(loading, "load_params", loaded)
    with pytest.raises(ConfigError, match="device memory is .* bytes too small"):
        MoE(tiny("mixtral"), {"progress": False})
