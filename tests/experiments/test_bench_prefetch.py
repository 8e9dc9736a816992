"""experiments/bench_prefetch.py: every setting gives the same tokens and hits, and the table is made of what it ran."""

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


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(EXPERIMENTS))
    spec = importlib.util.spec_from_file_location("bench_prefetch", EXPERIMENTS / "bench_prefetch.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_prefetch"] = module  # typer looks up the annotations there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_prefetch"]
    sys.path.remove(str(EXPERIMENTS))


@pytest.fixture
def routes(tmp_path):
    rng = np.random.default_rng(0)
    lengths = (20, 25, 15)
    T = sum(lengths)
    header = {
        "moe_layers": list(range(L)),
        **{"E": E, "K": K, "chunk": 1, "scope": "layer", "slots": L * E, "contract": "atomic-bypass"},
        **{"policy": "none", "model": "made up", "dtype": "none"},
    }
    experts = np.argsort(rng.random((T, L, E)) * np.linspace(1, 2, E), axis=-1)[..., :K]
    request = np.repeat(np.arange(len(lengths)), lengths)
    trace = Trace.from_rows(experts, rng.random((T, L, K)), np.ones(T, int), request, np.arange(T), header)
    trace.save(tmp_path / "routes.npz")
    return tmp_path / "routes.npz"


def run(script, *options):
    return CliRunner().invoke(script.app, list(map(str, options)))


@pytest.mark.slow
def test_a_dry_run_of_a_trace(script, routes, tmp_path):
    options = ("--predictors", "cross-layer+temporal", "--shares", "0.25", "--rows", 40, "--repeats", 2)
    done = run(script, routes, "--dry", *options, "--out", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    figures = json.loads((tmp_path / "out.json").read_text())
    assert [row["predictor"] for row in figures["table"]] == ["none", "cross-layer+temporal", "oracle", "none"]
    assert all(row["equal"] and len(row["seconds_of_runs"]) == 2 and row["ms"] > 0 for row in figures["table"])
    oracle = figures["table"][2]["prefetch"]
    # On a busy machine the trials may have found that nothing pays.
    assert oracle["rows"]["useful"] or not any(layer["on"] for layer in oracle["layers"])
    assert not oracle["rows"]["harmful"] and all(row["trial_ms"] > 0 for row in figures["table"])
    learned = figures["table"][1]["prefetch"]
    assert learned["learned_requests"] == 2  # those that are not replayed


@pytest.mark.slow
def test_a_dry_run_of_the_compiled_transport(script, routes, tmp_path):
    options = ("--transport", "device", "--predictors", "cross-layer+temporal", "--shares", "0.25", "--rows", 40)
    done = run(script, routes, "--dry", *options, "--repeats", 1, "--budget", "4KiB", "--out", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["transport"] == "device" and all(row["equal"] for row in figures["table"])
    learned, oracle = (row["prefetch"] for row in figures["table"][1:3])
    assert learned["budget"] == 4096 and learned["rows"]["useful"] and learned["learned_requests"] == 2
    # What waits for the first layer when the program without prefetch takes its turn is dropped.
    assert oracle["precision"] > 0.9 and set(oracle["per_layer"]["wasted"][1:]) == {0}
    assert "on time" in done.output and "of a row" in done.output


def test_lines_of_the_table_come_from_the_runs(script):
    def made(predictor, seconds, ids=((1,),)):
        layers = [{"on": True}, {"on": False}]
        prefetch = {"rows": {"useful": 3, "on_time": 2, "late": 1, "wasted": 1}, "layers": layers, "precision": 0.75}
        prefetch["trial"] = {"state": "off" if predictor == "a" else "on"}
        return script.Run(
            predictor, 0.5, 0.02, seconds, list(ids), [], True, 6, 0.5, None if predictor == "none" else prefetch
        )

    runs = [made("none", [0.010]), made("a", [0.009, 0.009]), made("oracle", [0.006]), made("none", [0.010])]
    rows = {row["predictor"]: row for row in script.report(runs, "title")}
    assert rows["a"]["change"] == pytest.approx(-0.1) and rows["a"]["of_the_oracle"] == pytest.approx(0.25)
    assert (rows["a"]["coverage"], rows["a"]["layers_on"]) == (0.5, 1) and rows["none"]["coverage"] is None
    assert [script.stages(rows[name]) for name in ("none", "a", "oracle")] == ["-", "off", "1 of 2"]
    assert all(row["equal"] for row in rows.values())
    other = script.report([*runs, made("b", [0.02], ids=((2,),))], "title")
    assert [row["predictor"] for row in other if not row["equal"]] == ["b"]


def test_wrong_options_end_before_anything_is_loaded(script, routes, tmp_path):
    for options, message in (
        (("--predictors", "linear-need"), "cannot learn while a model runs"),
        (("--predictors", "nothing"), "unknown name 'nothing'"),
        (("--predictors", "gate-1"), "routers guess from hidden states"),
        (("--model", "x"), "--model x replays its own runs"),
        (("--shares", "2"), "--shares 2: shares lie between 0 and 1"),
        (("--transport", "resident"), "--transport resident: must be one of callback, device"),
        (("--transport", "device", "--predictors", "eamc-mean"), "grows with the requests"),
        (("--budget", "much"), "--budget='much' is not allowed"),
        (("--out", tmp_path / "none" / "out.json"), "there is no directory"),
    ):
        done = run(script, routes, "--dry", *options)
        text = " ".join(done.stderr.replace("│", " ").split())
        assert done.exit_code == 2 and message in text, (options, done.stderr)


def test_a_trace_that_is_not_there_is_one_line(script, tmp_path):
    done = run(script, tmp_path / "nowhere.npz", "--dry")
    assert done.exit_code == 2 and "No such file or directory" in done.output and "Traceback" not in done.output
