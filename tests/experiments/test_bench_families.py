"""experiments/bench_families.py: writes, loads, decodes, compares and cleans up; a wrong token fails it."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))
import bench_families

QUICK = dict(dry=True, tokens=6, context=8, repeats=1, decode_chunk=6, link_gbps=50.0, hbm_gbps=100.0)


def run(directory, **arguments) -> int:
    settings = dict(make=None, layers=None, shares="0.5", transports="device", out=None)
    with pytest.raises(typer.Exit) as stop:
        bench_families.main(directory, **settings | QUICK | arguments)
    return stop.value.exit_code


@pytest.mark.slow
def test_a_packed_checkpoint_end_to_end(tmp_path):
    out = tmp_path / "figures.json"
    assert run(tmp_path / "model", make="gpt-oss-20b", shares="0.25,1.0", out=out) == 0
    assert not (tmp_path / "model").exists()
    found = json.loads(out.read_text())
    assert [(row["transport"], row["share"]) for row in found["rows"]] == [
        ("resident", None),
        ("device", 1.0),
        ("device", 0.25),
    ]
    resident, every, quarter = found["rows"]
    assert all(row["equal"] == "yes" and row["us_per_layer"] > 0 for row in found["rows"])
    assert every["hit_rate"] == 1.0 and every["megabytes_per_token"] == 0 and resident["hit_rate"] is None
    moved = found["load"]["experts"]["bytes_each"] * quarter["misses_per_step"] / 1e6
    assert quarter["hit_rate"] < 1 and np.isclose(quarter["megabytes_per_token"], moved) and moved > 0
    assert quarter["compile_seconds"] == 0  # a smaller cache is a value
    assert quarter["us_per_layer"] == pytest.approx(quarter["ms_per_token"] * 1e3 / 4)
    assert found["load"]["experts"]["format"] == {"gate_up": "mxfp4", "down": "mxfp4"}
    assert 0 < found["load"]["pool_fill_seconds"] < found["load"]["load_seconds"]


def test_a_wrong_token_fails(tmp_path, monkeypatch, capsys):
    def decode(moe, prompt, tokens, repeats, ceilings, head):
        transport = moe.stats()["transport"]["name"]
        ids = np.arange(7) + (transport == "device") * (np.arange(7) == 3)
        return {"transport": transport, "ms_per_token": 1.0}, ids

    monkeypatch.setattr(bench_families, "decode", decode)
    monkeypatch.setattr(bench_families, "head_seconds", lambda moe: 0.0)
    # With the lengths that the script takes by itself.
    assert run(tmp_path / "model", make="mixtral-8x7b", tokens=64, context=None) == 1
    assert "tokens differ from resident: device 0.5" in capsys.readouterr().out
    assert not (tmp_path / "model").exists()


def test_what_the_model_cannot_do_is_said(tmp_path):
    with pytest.raises(typer.BadParameter, match="max_sequence_length=1065: the model was made for 128 positions"):
        run(tmp_path / "model", make="gpt-oss-20b", tokens=64, context=1000)
    assert not (tmp_path / "model").exists()


def test_bad_arguments(tmp_path):
    for arguments, message in (
        (dict(make="gpt-oss"), "unknown model 'gpt-oss'"),
        (dict(make=None), "--layers and --dry belong to --make"),
        (dict(make="mixtral-8x7b", transports="resident"), "resident must be device or callback"),
    ):
        with pytest.raises(typer.BadParameter, match=message):
            bench_families.main(
                tmp_path / "model", **dict(layers=None, shares="0.5", transports="device", out=None) | QUICK | arguments
            )
    assert not (tmp_path / "model").exists()


def test_the_source_of_a_load_is_named(tmp_path, monkeypatch):
    mounts = "/dev/vda / ext4 rw 0 0\ntmpfs /ram tmpfs rw 0 0\n/dev/vdb /ram/disk ext4 rw 0 0\n"
    monkeypatch.setattr(Path, "read_text", lambda self: mounts)
    assert bench_families.source_of(Path("/ram/model"), True) == "memory (tmpfs)"
    assert bench_families.source_of(Path("/ram/disk/model"), True) == "page cache"
    assert bench_families.source_of(Path("/ramp/model"), False) == "disk or page cache"
