"""experiments/bench_simulator.py: the study alone, and the table of each policy in both scopes."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from host_offload import bundled_trace

SCRIPT = Path(__file__).resolve().parents[2] / "experiments" / "bench_simulator.py"


@pytest.fixture(scope="module")
def command():
    spec = importlib.util.spec_from_file_location("bench_simulator", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_simulator"] = module  # typer looks up the annotations there
    spec.loader.exec_module(module)
    app = typer.Typer()
    app.command()(module.main)
    yield app
    del sys.modules["bench_simulator"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "few.npz"
    bundled_trace().select([0, 1]).save(path)
    return path


def run(command, *arguments):
    done = CliRunner().invoke(command, [str(argument) for argument in arguments], env={"COLUMNS": "160"})
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def test_the_study_alone(command, trace):
    shown = run(command, "--trace", trace, "--policies", "lru,fifo,arc", "--study-only")
    tokens = len(bundled_trace().select([0, 1]).step)
    # arc runs on the host and is left out
    assert re.search(rf"^ *{tokens} tokens x 2 policies x 6 capacities .* included: [\d.]+ s; load", shown, re.M)
    assert "global" not in shown


def test_each_policy_in_both_scopes(command, trace):
    shown = run(command, "--trace", trace, "--policies", "fifo", "--pool-requests", 1)
    rows = re.findall(r"^ *fifo \(in-cache\) +(layer|global) +6 +([\d,]+) +[\d.]+ +[\d.]+ M +[\d.]+ M", shown, re.M)
    one, both = (bundled_trace().select(requests) for requests in ([0], [0, 1]))
    steps = {"layer": len(set(both.step)), "global": len(set(one.step))}
    assert {scope: int(events.replace(",", "")) for scope, events in rows} == {k: 8 * n for k, n in steps.items()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policies", "nosuch"), "nosuch"),
        (("--policies", "arc"), "none can be compiled"),
        (("--contract", "foo"), "must be one of"),
        (("--trace", "/missing.npz"), "missing.npz"),
    ],
)
def test_bad_options_are_refused_at_once(command, arguments, message):
    done = CliRunner().invoke(command, arguments, env={"COLUMNS": "160"})
    assert done.exit_code == 2 and message in " ".join(done.output.split())
