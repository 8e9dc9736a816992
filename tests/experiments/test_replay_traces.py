"""experiments/replay_traces.py: engine and simulator agree, and what is predicted was not calibrated on."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from host_offload.trace import Trace

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
L, E, K = 2, 8, 2
ALL_HIT, MISS, EVENT = 2e-3, 40e-6, 70e-6


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(EXPERIMENTS))
    spec = importlib.util.spec_from_file_location("replay_traces", EXPERIMENTS / "replay_traces.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["replay_traces"] = module  # typer looks up the annotations there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["replay_traces"]
    sys.path.remove(str(EXPERIMENTS))


def decoded(lengths, seed=0):
    """A trace of requests without prompts, whose experts favour the low ids."""
    rng = np.random.default_rng(seed)
    T = sum(lengths)
    header = {
        "moe_layers": list(range(L)),
        **{"E": E, "K": K, "chunk": 1, "scope": "layer", "slots": L * E, "contract": "atomic-bypass"},
        **{"policy": "none", "model": "made up", "dtype": "none"},
    }
    experts = np.argsort(rng.random((T, L, E)) * np.linspace(1, 2, E), axis=-1)[..., :K]
    request = np.repeat(np.arange(len(lengths)), lengths)
    return Trace.from_rows(experts, rng.random((T, L, K)), np.ones(T, int), request, np.arange(T), header)


def run(script, *options):
    return CliRunner().invoke(script.app, list(map(str, options)))


def test_choice_is_whole_requests_at_odd_places(script):
    served, others = script.choose(decoded((4, 6, 5, 9, 3, 2)), 8)
    assert np.unique(served.request).tolist() == [1, 5] and np.unique(others.request).tolist() == [0, 2, 4]
    assert served.phase.tolist() == [0] + [1] * 5 + [0, 1]


def test_predictions_from_settings_that_were_not_predicted(script, tmp_path, monkeypatch):
    """With times made from the counts, the model that was fitted on LRU predicts the other policies exactly."""
    decoded((30, 25, 20)).save(tmp_path / "t.npz")

    def timed(*arguments, replay=script.replay, **options):
        made = replay(*arguments, **options)
        assert all(seconds > 0 for seconds in made.seconds)
        figures = made.figures
        made.seconds = [ALL_HIT + MISS * figures["misses"] + EVENT * figures["miss_events"]] * len(made.seconds)
        return made

    monkeypatch.setattr(script, "replay", timed)
    monkeypatch.setattr(script, "measure_policies", lambda names, *rest: dict.fromkeys(names, 1e-6))
    options = ("--dry", "--repeats", 1, "--shares", "0.5", "--policies", "lru,static", "--rows", 40)
    done = run(script, tmp_path / "t.npz", *options, "--calibrate", "0.25,0.375,0.75", "--out", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    assert "2 of 2 predictions within 5%" in done.output
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["requests"] == [1]
    assert all(one["hits_equal"] for one in figures["runs"]) and len(figures["runs"]) == 6
    settings = [(one["policy"], one["share"]) for one in figures["runs"]]
    assert settings == [("lru", 1.0), ("lru", 0.25), ("lru", 0.375), ("lru", 0.75), ("lru", 0.5), ("static", 0.5)]
    assert figures["runs"][0]["misses"] == 0 and figures["runs"][1]["misses"] > figures["runs"][3]["misses"] > 0
    cost = figures["cost_model"]["decode"]["callback"]
    assert (cost["miss_seconds"], cost["event_seconds"]) == pytest.approx((MISS, EVENT), rel=1e-3)
    for row in figures["predictions"]:
        assert abs(row["error"]) < 1e-3
        assert row["predicted_ms"] > ALL_HIT * 1e3


def test_wrong_options_end_before_anything_is_loaded(script, tmp_path):
    decoded((4, 6)).save(tmp_path / "t.npz")
    decoded((4,)).save(tmp_path / "one.npz")
    for name, options, message in (
        ("t", ("--calibrate", "0.5,0.9"), "--calibrate [0.5]: a share that is predicted must not be"),
        ("t", ("--shares", "0.5,2"), "--shares 0.5,2: shares lie between 0 and 1"),
        ("t", ("--shares", "half"), "--shares half: could not convert"),
        ("t", ("--transports", "resident"), "--transports ['resident']: not of callback, device"),
        ("t", ("--policies", "lur"), "--policies ['lur']: not of"),
        ("t", ("--rows", 5), "--rows 5: no request at an odd place is that short; 6 would do"),
        ("one", (), "the trace has a single request"),
    ):
        done = run(script, tmp_path / f"{name}.npz", "--dry", *options)
        text = " ".join(done.stderr.replace("│", " ").split())
        assert done.exit_code == 2 and message in text, (options, done.stderr)
