"""experiments/check_plan.py: what it compares, and when it fails."""

import json
import mmap
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))
import check_plan
from check_plan import Snapshot, compare, resident_bytes, warm_up

MEMORY = {
    "dense_bytes": 400,
    "kv_bytes": 100,
    "state_bytes": 0,
    "slot_bytes": 300,
    "spare_bytes": 100,
    "staging_bytes": 100,
    "prefetch_bytes": 0,
    "workspace_bytes": 200,
    "pool_bytes": 4000,
    "transfer_bytes": 1000,
}
RESIDENT, AVAILABLE = "host, loaded, resident memory", "host, loaded, available memory"


@pytest.fixture(autouse=True)
def everything_is_judged(monkeypatch):
    monkeypatch.setattr(check_plan, "LEAST", 0)


def rows(before, loaded, ran, tolerance=0.03, way="registered", held=0):
    stats = {"memory": MEMORY, "pinned_memory": way}
    return {row["what"]: row for row in compare(stats, before, loaded, ran, tolerance, held)}


def ok(*snapshots):
    """Of all lines but that of the available memory, which is not judged here."""
    found = {what: row["ok"] for what, row in rows(*snapshots).items()}
    assert found.pop(AVAILABLE) is None
    return found


def test_each_figure_is_held_against_its_part_of_the_plan():
    before = Snapshot(50, 60, 9000, 700)
    # 900 bytes of jax's allocator and 100 of staging memory, which is outside of it.
    exact = ok(before, Snapshot(950, 950, 0, 5700), Snapshot(950, 1150, 0, 0))
    assert exact == {"device, loaded": True, "device, peak": True, RESIDENT: True}
    more = ok(before, Snapshot(981, 981, 4000, 5851), Snapshot(981, 1151, 0, 0))
    assert more == {"device, loaded": False, "device, peak": False, RESIDENT: False}
    less = ok(before, Snapshot(919, 981, 4000, 5549), Snapshot(981, 1000, 0, 0))
    assert less == {"device, loaded": False, "device, peak": True, RESIDENT: False}
    assert all(ok(before, Snapshot(930, 930, 0, 5600), Snapshot(930, 930, 0, 0)).values())
    earlier = Snapshot(50, 2000, 9000, 700)
    peak = rows(earlier, Snapshot(950, 2000, 4000, 5700), Snapshot(950, 2000, 4000, 0))["device, peak"]
    assert peak["measured"] is None and peak["ok"] is None


def test_the_host_is_judged_by_the_memory_that_its_pool_counts_as():
    before, loaded = Snapshot(50, 60, 9000, 700), Snapshot(950, 950, 3900, 5699)
    for way, judged, other in (("registered", RESIDENT, AVAILABLE), ("allocated", AVAILABLE, RESIDENT)):
        found = rows(before, loaded, loaded, way=way)
        assert list(found)[2:] == [judged, other], "the judged one first"
        assert (found[RESIDENT]["measured"], found[AVAILABLE]["measured"]) == (4999, 5100)
        for what in (judged, other):  # the pool and the transfers
            assert found[what]["planned"] == 5000
            assert found[what]["error"] == pytest.approx(found[what]["measured"] / 5000 - 1)
        assert found[judged]["ok"] is True and found[other]["ok"] is None
        strict = rows(before, loaded, loaded, tolerance=0.001, way=way)
        assert strict[judged]["ok"] is (way == "registered") and strict[other]["ok"] is None
    unknown = rows(Snapshot(50, 60, 9000, None), Snapshot(950, 950, 4000, None), loaded)
    assert unknown[RESIDENT]["measured"] is None and [unknown[w]["ok"] for w in (RESIDENT, AVAILABLE)] == [None, None]


def test_what_xla_keeps_since_an_earlier_model_is_not_planned_again():
    before, loaded = Snapshot(50, 60, 9000, 700), Snapshot(950, 950, 4000, 4700)
    for held, planned in ((0, 5000), (600, 4400), (1000, 4000), (3000, 4000)):
        found = rows(before, loaded, loaded, held=held)[RESIDENT]
        assert (found["planned"], found["ok"]) == (planned, planned == 4000)


def test_little_is_not_judged(monkeypatch):
    monkeypatch.setattr(check_plan, "LEAST", 2000)
    assert ok(Snapshot(50, 60, 9000, 0), Snapshot(1, 70, 9000, 0), Snapshot(1, 70, 9000, 0)) == {
        "device, loaded": None,
        "device, peak": None,
        RESIDENT: False,
    }


def test_resident_memory_is_what_no_file_holds(tmp_path):
    status = tmp_path / "status"
    status.write_text("VmRSS:\t     700 kB\nRssAnon:\t     400 kB\nRssFile:\t     200 kB\nRssShmem:\t     100 kB\n")
    assert resident_bytes(status) == 500 * 1024
    status.write_text("Name:\tpython\n")
    assert resident_bytes(status) is None and resident_bytes(tmp_path / "none") is None


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell")
def test_touched_memory_is_resident_and_a_mapped_file_is_not(tmp_path):
    size, noise = 1 << 26, 1 << 24
    (tmp_path / "weights").write_bytes(b"\1" * size)
    before = resident_bytes()
    with (tmp_path / "weights").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert np.frombuffer(mapped, np.uint8)[:: mmap.PAGESIZE].all()
        assert abs(resident_bytes() - before) < noise
    touched = np.ones(size, np.uint8)
    assert abs(resident_bytes() - before - touched.nbytes) < noise


def test_jax_has_started_before_the_first_look(tmp_path, monkeypatch):
    seen = []
    moved = jax.device_put

    def put(array):
        seen.append(("moved", type(array)))
        return moved(array)

    def look():
        seen.append("looked")
        return Snapshot(None, None, 0, 0)

    def load(*_):
        seen.append("loaded")
        raise check_plan.MoEJaxError("seen enough")

    compiled = []

    def listen(name, *_, **__):
        compiled.append(name)

    monkeypatch.setattr(jax, "device_put", put)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        warm_up()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert seen == [("moved", np.ndarray)] and any("backend_compile" in name for name in compiled)
    seen.clear()
    monkeypatch.setattr(check_plan, "snapshot", look)
    monkeypatch.setattr(check_plan, "MoE", load)
    with pytest.raises(typer.BadParameter, match="seen enough"):
        check_plan.main(tmp_path, transports="device")
    assert seen == [("moved", np.ndarray), "looked", "loaded"]


def test_without_figures_of_the_device_the_host_is_compared(tmp_path, monkeypatch):
    out = tmp_path / "plan.json"
    pool = 4 * 8 * 3 * 64 * 32 * 4
    left = iter([10**9, 10**9 - pool, 0] * 2)
    monkeypatch.setattr(check_plan, "snapshot", lambda: Snapshot(None, None, next(left), None))
    with pytest.raises(typer.Exit) as stop:
        check_plan.main(tmp_path / "model", make="qwen3-30b-a3b", dry=True, tolerance=0.9, out=out)
    rows = json.loads(out.read_text())["rows"]
    assert [row["transport"] for row in rows] == ["device"] * 4 + ["callback"] * 4
    # A CPU's pool is jax's, whatever was asked for, and nothing is kept for transfers.
    assert [row["what"] for row in rows[2:4]] == [AVAILABLE, RESIDENT]
    assert [row["measured"] for row in rows] == [None, None, pool, None] * 2
    assert [row["ok"] is None for row in rows[:4]] == [True, True, False, True]
    assert stop.value.exit_code == int(any(row["ok"] is False for row in rows))
    assert not (tmp_path / "model").exists()


def test_a_later_model_of_the_process_is_compared_with_what_an_earlier_one_left(tmp_path, monkeypatch):
    look = Snapshot(None, None, 0, 0)
    needed = iter([700, 300, 900])

    def measured(*_):
        memory = MEMORY | {"transfer_bytes": next(needed)}
        return {"memory": memory, "pinned_memory": "registered"}, look, look, look

    monkeypatch.setattr(check_plan, "measure", measured)
    out = tmp_path / "plan.json"
    with pytest.raises(typer.Exit):
        check_plan.main(tmp_path, transports="device,callback,device", out=out)
    found = [row["planned"] for row in json.loads(out.read_text())["rows"] if row["what"] == RESIDENT]
    assert found == [4700, 4000, 4200]


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
