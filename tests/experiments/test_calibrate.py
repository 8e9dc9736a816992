"""experiments/calibrate.py: what it measures of an engine is what the simulator counts, and makes a cost model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from host_offload.cost_model import CostModel, LinkCurve
from moe_jax import MoE, OffloadConfig

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(EXPERIMENTS))
    spec = importlib.util.spec_from_file_location("calibrate", EXPERIMENTS / "calibrate.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["calibrate"] = module  # typer looks up the annotations there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["calibrate"]
    sys.path.remove(str(EXPERIMENTS))


def test_levels_are_those_of_the_simulator(script):
    config = OffloadConfig(
        transport="callback", cache_rate=1.0, max_batch=1, max_sequence_length=64, progress=False, decode_chunk=8
    )
    prompt = np.arange(20, dtype=np.int32)
    parts = script.random_parts("qwen3-30b-a3b", **script.small("qwen3-30b-a3b"))
    with MoE.from_parts(parts, config, name="small") as moe:
        spec = moe._engine.transport.spec
        levels = []
        for share in (1.0, 0.5, 0.3, 0.1):
            moe.set_cache("lru", cache_rate=share)
            levels.append(script.measure_decode(moe, "lru", prompt, 12, 2))
        assert all(level["hits_equal"] and level["seconds"] > 0 for level in levels)
        assert levels[0]["misses"] == levels[0]["miss_events"] == 0
        assert 0 < levels[1]["misses"] < levels[3]["misses"]
        for level in levels[1:]:
            assert 0 < level["miss_events"] <= min(spec.L, level["misses"])
        for level in levels:  # times of this machine would be noise: made ones must come back
            level["seconds"] = 1e-3 + 2e-5 * level["misses"] + 1e-5 * level["miss_events"]
        cost = script.fit_levels(levels, L=spec.L, K=8, row_bytes=spec.row_bytes, policy="lru")
        assert cost.all_hit_seconds == pytest.approx(1e-3) and cost.miss_seconds == pytest.approx(2e-5)
        model = CostModel("made up", LinkCurve(1e9), 1e12, {"callback": cost}, {"lru": 1e-5, "lfu": 1e-5})
        row = script.check(moe, model, "callback", "lfu", 0.2, prompt, 12, 1)
    assert row["hits_equal"] and 0 < row["hit_rate"] < 1 and row["predicted_ms"] > 1


def test_host_time_of_policies(script):
    seconds = script.measure_policies(["lru", "static"], 2, 8, 2, 0.5, events=20)
    assert set(seconds) == {"lru", "static"} and all(0 < s < 0.1 for s in seconds.values())
