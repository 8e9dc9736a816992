"""experiments/sweep_policies.py: its cells are plain replays, a stopped run goes on, the report says how."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from host_offload.bounds import belady
from host_offload.cost_model import CostModel, DecodeCost, LinkCurve, predict_ms_per_token
from host_offload.policy import StaticPin
from host_offload.simulate import simulate
from host_offload.trace import Trace

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
L, E, K = 2, 6, 2
QUICK = ["--backend", "numpy", "--no-plots"]


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(EXPERIMENTS))
    spec = importlib.util.spec_from_file_location("sweep_policies", EXPERIMENTS / "sweep_policies.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["sweep_policies"] = module  # typer looks up the annotations there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["sweep_policies"]
    sys.path.remove(str(EXPERIMENTS))


def small_trace(seed=0, requests=5, tokens=9, shared_steps=False):
    """Requests of three prefill rows and then decode, one after the other or (`shared_steps`) side by side."""
    rng = np.random.default_rng(seed)
    T = requests * tokens
    experts = np.argsort(rng.random((T, L, E)) * np.linspace(1, 2, E), axis=-1)[..., :K]
    step = np.tile(np.arange(tokens), requests) if shared_steps else np.arange(T)
    header = {
        "moe_layers": list(range(L)),
        **{"E": E, "K": K, "chunk": 1, "scope": "layer", "slots": L * E, "contract": "atomic-bypass"},
        **{"policy": "lru", "model": "random", "dtype": "none"},
    }
    return Trace.from_rows(
        experts,
        rng.random((T, L, K)),
        np.tile(np.arange(tokens) >= 3, requests).astype(np.uint8),
        np.repeat(np.arange(requests), tokens),
        step,
        header,
    )


@pytest.fixture
def trace_file(tmp_path):
    small_trace().save(tmp_path / "run.npz")
    return tmp_path / "run.npz"


def run(script, *options):
    return CliRunner().invoke(script.app, list(map(str, options)))


def rows_of(script, directory):
    return list(script.Store(directory, {}, script.code_version()).rows.values())


def test_cells_are_the_replays_they_name(script, trace_file, tmp_path):
    out = tmp_path / "out"
    settings = [
        "--scope",
        "layer,global",
        "--contract",
        "atomic-bypass,sequential",
        "--phase",
        "decode",
        "--seeds",
        "0,3",
    ]
    done = run(script, trace_file, "--policies", "random,lfru", "--slots", "2,3", *settings, *QUICK, "--out", out)
    assert done.exit_code == 0, done.stderr
    rows, trace = rows_of(script, out), small_trace()
    assert len(rows) == 2 * 2 * 2 * 2 * 2 + 2 * 2 * 2  # policies, slots, scopes, contracts, seeds; optima
    for row in rows:
        common = {name: row[name] for name in ("scope", "contract", "reset", "slots_per_layer")}
        if row["policy"] == "belady":
            result = belady(trace, phase="decode", **common)
        else:
            result = simulate(trace, row["policy"], phase="decode", seed=row["seed"], backend="numpy", **common)
        assert {name: row[name] for name in ("hits", "misses", "accesses", "lookups", "bypasses", "evictions")} == {
            name: getattr(result, name) for name in ("hits", "misses", "accesses", "lookups", "bypasses", "evictions")
        }
        assert row["hit_rate"] == result.hit_rate and row["share"] == row["slots_per_layer"] / E
        # What the tables and plots are made of is the very result.
        again = sys.modules["_sweep_report"].result_of(row)
        np.testing.assert_array_equal(again.counters, result.counters)
        np.testing.assert_array_equal(again.capacities, result.capacities)
        assert again.in_phase("decode") == result.in_phase("decode")
        assert again.contract["quota"] == result.contract["quota"]
    assert len({row["hits"] for row in rows if row["policy"] == "random" and row["scope"] == "global"}) > 2


def test_parquet_holds_the_same_columns(script, trace_file, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    assert run(script, trace_file, "--policies", "lru", "--slots", "2", *QUICK, "--out", tmp_path / "o").exit_code == 0
    assert parquet.read_table(tmp_path / "o" / "results.parquet").to_pylist() == rows_of(script, tmp_path / "o")


def test_both_back_ends_give_the_same_rows(script, trace_file, tmp_path):
    found = {}
    for backend in ("jax", "numpy"):
        options = ["--policies", "lru,static,arc", "--slots", "2,4", "--backend", backend, "--no-plots"]
        done = run(script, trace_file, *options, "--out", tmp_path / backend)
        assert done.exit_code == 0, done.stderr
        rows = rows_of(script, tmp_path / backend)
        assert {row["policy"]: row["backend"] for row in rows} == {
            **{"belady": "optimum", "lru": backend, "static": backend},
            "arc": "numpy",  # host-only
        }
        found[backend] = {tuple(row[name] for name in script.Cell._fields): row["counters"] for row in rows}
    assert found["jax"] == found["numpy"] and len(found["jax"]) == 10


def test_static_is_fitted_on_other_requests(script, trace_file, tmp_path):
    options = ["--policies", "static,lru", "--slots", "2", *QUICK]
    assert run(script, trace_file, *options, "--out", tmp_path / "split").exit_code == 0
    trace = small_trace()
    even, odd = trace.select([0, 2, 4]), trace.select([1, 3])
    settings = {"slots_per_layer": 2, "backend": "numpy"}
    hits = [simulate(test, StaticPin(fit), **settings).hits for fit, test in ((even, odd), (odd, even))]
    row = {row["policy"]: row for row in rows_of(script, tmp_path / "split")}
    assert row["static"]["hits"] == sum(hits) and row["static"]["accesses"] == row["lru"]["accesses"]
    assert row["static"]["tokens"] == row["lru"]["tokens"] == 45
    unfitted = run(script, trace_file, *options, "--calibrate-split", "none", "--out", tmp_path / "none")
    assert "static (not fitted)" in unfitted.stdout
    row = {row["policy"]: row for row in rows_of(script, tmp_path / "none")}
    assert row["static"]["hits"] == simulate(trace, "static", **settings).hits != sum(hits)


def test_finished_cells_are_not_run_again(script, trace_file, tmp_path, monkeypatch):
    replay, ran = script.replay, []

    def counted(trace, group, backend):
        ran.extend(group)
        return replay(trace, group, backend)

    monkeypatch.setattr(script, "replay", counted)
    out = tmp_path / "out"
    options = [trace_file, "--slots", "2,3", *QUICK, "--out", out]
    assert run(script, *options, "--policies", "lru").exit_code == 0 and len(ran) == 6
    ran.clear()
    done = run(script, *options, "--policies", "lru,lfu")
    assert {cell.policy for cell in ran} == {"lfu"} and len(ran) == 2 and "6 of 8 cells are finished" in done.stderr
    # The report covers all that lies in the directory, whatever the last command ran.
    ran.clear()
    done = run(script, *options, "--policies", "lru")
    assert not ran and "lfu" in done.stdout and "| lfu |" in (out / "report.md").read_text()

    before = (out / "results.csv").read_text()
    monkeypatch.setattr(script, "code_version", lambda extra=(): "other")
    done = run(script, *options, "--policies", "lru")
    assert len(ran) == 6 and "start anew" in done.stderr and "other" in done.stderr
    monkeypatch.undo()

    (out / "results.csv").write_text(before)
    small_trace(seed=1).save(trace_file)
    done = run(script, *options, "--policies", "lru")
    assert "another content of trace 'run'" in done.stderr.replace("\n", " ")
    rates = {row["policy"]: row["hits"] for row in rows_of(script, out) if row["slots_per_layer"] == 2}
    assert rates["lru"] == simulate(small_trace(seed=1), "lru", slots_per_layer=2, backend="numpy").hits
    assert "lfu" not in rates

    (out / "results.csv").write_text(before.replace(",atomic-bypass,", ",atomic-bypass,x", 1))
    assert run(script, *options, "--policies", "lru").exit_code == 0  # a text that differs is another cell
    (out / "results.csv").write_text(re.sub(r"\n(run,lru),2,", r"\n\1,two,", before))
    done = run(script, *options, "--policies", "lru")
    assert done.exit_code == 2 and "is damaged" in done.stderr and "delete the file" in done.stderr
    (out / "results.csv").write_text("a,b\n1,2\n")
    done = run(script, *options, "--policies", "lru")
    assert done.exit_code == 0 and "another format" in done.stderr


def test_an_interrupted_sweep_keeps_its_cells(script, trace_file, tmp_path, monkeypatch):
    replay, ran = script.replay, []

    def stopping(trace, group, backend):
        ran.append(group)
        if len(ran) == 4:
            raise KeyboardInterrupt
        return replay(trace, group, backend)

    monkeypatch.setattr(script, "replay", stopping)
    options = [trace_file, "--slots", "2,3", "--policies", "lru,fifo", *QUICK, "--out", tmp_path / "out"]
    done = run(script, *options)
    assert done.exit_code == 130 and "the same command goes on" in done.stderr.replace("\n", " ")
    assert len(rows_of(script, tmp_path / "out")) == 3 and not (tmp_path / "out" / "report.md").exists()
    assert run(script, *options).exit_code == 0
    assert len(ran) == 4 + 5 and len(rows_of(script, tmp_path / "out")) == 8
    assert not [path for path in (tmp_path / "out").iterdir() if path.suffix not in (".csv", ".parquet", ".md")]


def test_report_states_what_the_figures_depend_on(script, trace_file, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    cost = CostModel("a card", LinkCurve(1e9), 1e12, {"device": DecodeCost(1e-3, 2e-4, L, K, 1000, "lru")})
    cost.save(tmp_path / "cost.json")
    options = ["--policies", "lru,random,static", "--seeds", "0,1", "--slots", "2,4", "--backend", "numpy"]
    done = run(script, trace_file, *options, "--cost", tmp_path / "cost.json", "--out", out)
    assert done.exit_code == 0, done.stderr
    report = (out / "report.md").read_text()
    for field in ("contract", "ties", "reset", "scope and quota", "seeds", "dedup", "phase", "trace", "code", "static"):
        assert re.search(rf"^\| {field} \| .+ \|$", report, re.M), field
    assert "| seeds | 0, 1 |" in report and "fitted on the even requests" in report
    trace = small_trace()
    lru = [simulate(trace, "lru", slots_per_layer=n, backend="numpy") for n in (2, 4)]
    assert f"| lru | {lru[0].hit_rate * 100:.2f} | {lru[1].hit_rate * 100:.2f} |" in report
    best = [belady(trace, slots_per_layer=n) for n in (2, 4)]
    rates = " | ".join(f"{result.hit_rate * 100:.2f}" for result in best)
    assert f"| **optimum, bypass** | {rates} |" in report and "±" in report
    ms = " | ".join(f"{predict_ms_per_token(result, cost):.2f}" for result in lru)
    assert f"| lru | {ms} |" in report and "Predicted ms/token: a card" in report
    pictures = re.findall(r"!\[\w.*\]\((.+\.png)\)", report)
    assert len(pictures) == 4 and "ms_per_token_run_layer_atomic-bypass.png" in pictures
    for name in pictures:
        content = (out / name).read_bytes()
        assert content.startswith(b"\x89PNG") and 5_000 < len(content) < 100_000


def test_host_time_of_a_policy_counts_in_the_callback_transport(script, trace_file, tmp_path):
    decode = {"callback": DecodeCost(1e-3, 2e-4, L, K, 1000, "lru")}
    cost = CostModel("a card", LinkCurve(1e9), 1e12, decode, policy_seconds={"lru": 1e-4, "lfu": 3e-4})
    cost.save(tmp_path / "cost.json")
    options = [trace_file, "--slots", "2", *QUICK, "--cost", tmp_path / "cost.json", "--transport", "callback"]
    done = run(script, *options, "--policies", "lru,lfu", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    section = (tmp_path / "out" / "report.md").read_text().split("### Predicted")[1]
    trace = small_trace()
    for name in ("lru", "lfu"):
        result = simulate(trace, name, slots_per_layer=2, backend="numpy")
        assert f"| {name} | {predict_ms_per_token(result, cost, transport='callback'):.2f} |" in section
    # The optimum is charged what the calibrated policy takes.
    best = belady(trace, slots_per_layer=2)
    best.policy = "lru"
    assert f"| optimum, bypass | {predict_ms_per_token(best, cost, transport='callback'):.2f} |" in section
    done = run(script, *options, "--policies", "fifo", "--out", tmp_path / "out")
    assert done.exit_code == 2 and "'fifo' was not measured" in done.stderr
    # So does one that an earlier run left in the directory: the report would have to show it.
    assert run(script, *options[:-4], "--policies", "fifo", "--out", tmp_path / "out").exit_code == 0
    done = run(script, *options, "--policies", "lru", "--out", tmp_path / "out")
    assert done.exit_code == 2 and "'fifo' was not measured" in done.stderr


def test_gap_lines_name_the_best_policy(script, trace_file, tmp_path):
    out = tmp_path / "out"
    assert run(script, trace_file, "--policies", "lru,lfu,random", "--slots", "3", *QUICK, "--out", out).exit_code == 0
    rows = {(row["policy"], row["contract"]): row for row in rows_of(script, out)}
    best = min((row for (name, _), row in rows.items() if name != "belady"), key=lambda row: row["misses"])
    fewest = rows["belady", "atomic-bypass"]["misses"]
    line = re.search(r"^\| 3 \| (\S+) \| (\S+)% \|", (out / "report.md").read_text(), re.M)
    assert line and line[1] == best["policy"]
    assert float(line[2]) == pytest.approx(100 * (best["misses"] - fewest) / best["misses"], abs=0.05)


def test_policies_of_your_own(script, trace_file, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from host_offload.policy import LRU, register\n\n\n@register\nclass Mine(LRU):\n    name = 'mine'\n"
    )
    options = ["--policies", "mine,lru", "--slots", "2", *QUICK, "--out", tmp_path / "out"]
    done = run(script, trace_file, *options, "--load", tmp_path / "mine.py")
    assert done.exit_code == 0, done.stderr
    from host_offload import policy

    del policy._REGISTRY["mine"]
    lines = dict(re.findall(r"^\| (mine|lru) \| (\S+) \|$", (tmp_path / "out" / "report.md").read_text(), re.M))
    assert lines["mine"] == lines["lru"]


def test_wrong_options_end_before_anything_is_replayed(script, trace_file, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "replay", lambda *args: pytest.fail("a cell was run"))
    small_trace(requests=1).save(tmp_path / "one.npz")
    small_trace(shared_steps=True).save(tmp_path / "batch.npz")
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04nothing")
    (tmp_path / "twin").mkdir()
    small_trace().save(tmp_path / "twin" / "run.npz")
    cost = CostModel("a card", LinkCurve(1e9), 1e12, {"device": DecodeCost(1e-3, 2e-4, 3, K, 1000, "lru")})
    cost.save(tmp_path / "cost.json")
    for options, message in (
        ((trace_file, "--policies", "lruu"), "Did you mean 'lru'"),
        ((trace_file, "--policies", ","), "expected names"),
        ((trace_file, "--slots", "4,7"), "7 is outside 1..6"),
        ((trace_file, "--slots", "4,x"), "expected numbers"),
        ((trace_file, "--slots", "4", "--shares", "0.5"), "not both"),
        ((trace_file, "--shares", "0.1"), "outside 1/6..1"),
        ((trace_file, "--contract", "atomic"), "'atomic' is not one of atomic-bypass"),
        ((trace_file, "--scope", "layers"), "'layers' is not one of layer, global"),
        ((trace_file, "--reset", "always"), "'always' is not one of"),
        ((trace_file, "--phase", "decode,prefill"), "'decode,prefill' is not one of"),
        ((trace_file, "--seeds", "-1"), "at least 0"),
        ((trace_file, "--backend", "torch"), "'torch' is not one of"),
        ((tmp_path / "absent.npz",), "absent.npz"),
        ((tmp_path / "bad.npz",), "bad.npz"),
        ((trace_file, tmp_path / "twin" / "run.npz"), "two files are called 'run'"),
        ((tmp_path / "one.npz", "--policies", "static"), "a single request"),
        ((tmp_path / "batch.npz", "--policies", "static"), "share steps"),
        ((trace_file, "--policies", "static", "--reset", "never"), "--calibrate-split none"),
        ((trace_file, "--policies", "lru", "--cost", tmp_path / "cost.json"), "calibrated with 3 MoE layers"),
        ((trace_file, "--cost", tmp_path / "no.json"), "--cost"),
        (
            (trace_file, "--policies", "lru", "--cost", tmp_path / "cost.json", "--transport", "callback"),
            "'callback' was not measured",
        ),
        ((trace_file, "--transport", "callback"), "give --cost"),
        ((trace_file, "--load", tmp_path / "no.py"), "no such file"),
    ):
        done = run(script, *options, "--out", tmp_path / "out")
        assert done.exit_code == 2 and message in done.stderr.replace("\n", " "), (options, done.stderr, done.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "message"), [("run.npz", "a file of that name exists"), ("/proc/x", "cannot be made")]
)
def test_a_directory_that_cannot_be_made_is_named(script, trace_file, name, message):
    out = trace_file.parent / name
    done = run(script, trace_file, "--policies", "lru", "--slots", "2", *QUICK, "--out", out)
    assert done.exit_code == 2 and done.stderr.startswith(f"sweep_policies: --out {out}: ") and message in done.stderr


def test_help_teaches(script):
    done = run(script, "--help")
    assert done.exit_code == 0
    for word in ("--calibrate-split", "--shares", "bundled", "Ctrl-C", "results.csv"):
        assert word in done.stdout


@pytest.mark.slow
@pytest.mark.skipif("MOE_JAX_TRACES" not in os.environ, reason="MOE_JAX_TRACES names no directory of traces")
def test_anchors_of_a_real_trace(script, tmp_path):
    path = Path(os.environ["MOE_JAX_TRACES"]) / "gptoss20b_routes_mmlu60.npz"
    done = run(script, path, "--policies", "lfru", "--slots", "8", "--no-plots", "--out", tmp_path)
    assert done.exit_code == 0, done.stderr
    rates = {(row["policy"], row["contract"]): round(100 * row["hit_rate"], 3) for row in rows_of(script, tmp_path)}
    assert rates["belady", "atomic-bypass"] == 80.065 and rates["belady", "atomic-forced-admit"] == 76.460
