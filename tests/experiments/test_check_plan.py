"""experiments/check_plan.py: what it compares, and when it fails."""

import json
import sys
from pathlib import Path

import pytest
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))
import check_plan
from check_plan import Snapshot, compare

MEMORY = {
    "dense_bytes": 400,
    "kv_bytes": 100,
    "state_bytes": 0,
    "slot_bytes": 300,
    "spare_bytes": 100,
    "staging_bytes": 100,
    "prefetch_bytes": 0,
    "workspace_bytes": 200,
    "pool_bytes": 5000,
}


@pytest.fixture(autouse=True)
def everything_is_judged(monkeypatch):
    monkeypatch.setattr(check_plan, "LEAST", 0)


def ok(before, loaded, ran, tolerance=0.03):
    return {row["what"]: row["ok"] for row in compare(MEMORY, before, loaded, ran, tolerance)}


def test_each_figure_is_held_against_its_part_of_the_plan():
    before = Snapshot(50, 60, 9000)
    # 900 bytes of jax's allocator and 100 of staging memory, which is outside of it.
    exact = ok(before, Snapshot(950, 950, 4000), Snapshot(950, 1150, 4000))
    assert exact == {"device, loaded": True, "device, peak": True, "host, loaded": True}
    more = ok(before, Snapshot(981, 981, 3849), Snapshot(981, 1151, 3849))
    assert more == {"device, loaded": False, "device, peak": False, "host, loaded": False}
    less = ok(before, Snapshot(919, 981, 4151), Snapshot(981, 1000, 3849))
    assert less == {"device, loaded": False, "device, peak": True, "host, loaded": False}
    assert all(ok(before, Snapshot(930, 930, 4100), Snapshot(930, 930, 4100)).values())
    earlier = Snapshot(50, 2000, 9000)
    peak = compare(MEMORY, earlier, Snapshot(950, 2000, 4000), Snapshot(950, 2000, 4000), 0.03)[1]
    assert peak["measured"] is None and peak["ok"] is None


def test_little_is_not_judged(monkeypatch):
    monkeypatch.setattr(check_plan, "LEAST", 2000)
    assert ok(Snapshot(50, 60, 9000), Snapshot(1, 70, 9000), Snapshot(1, 70, 9000)) == {
        "device, loaded": None,
        "device, peak": None,
        "host, loaded": False,
    }


def test_without_figures_of_the_device_the_host_is_compared(tmp_path, monkeypatch):
    out = tmp_path / "plan.json"
    pool = 4 * 8 * 3 * 64 * 32 * 4
    left = iter([10**9, 10**9 - pool, 0] * 2)
    monkeypatch.setattr(check_plan, "snapshot", lambda: Snapshot(None, None, next(left)))
    with pytest.raises(typer.Exit) as stop:
        check_plan.main(tmp_path / "model", make="qwen3-30b-a3b", dry=True, tolerance=0.9, out=out)
    rows = json.loads(out.read_text())["rows"]
    assert [row["transport"] for row in rows] == ["device"] * 3 + ["callback"] * 3
    assert [row["measured"] for row in rows] == [None, None, pool] * 2
    assert [row["ok"] for row in rows[:2]] == [None, None] and rows[2]["ok"] is not None
    assert stop.value.exit_code == int(any(row["ok"] is False for row in rows))
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dry": True}, "belong to --make"),
        ({"transports": "resident"}, "must be device or callback"),
        ({"pinned_memory": "held"}, "pinned_memory"),
        ({"out": Path("/missing/plan.json")}, "there is no directory"),
    ],
)
def test_what_it_refuses(tmp_path, arguments, message):
    with pytest.raises(typer.BadParameter, match=message):
        check_plan.main(tmp_path / "model", **arguments)
