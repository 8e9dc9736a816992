"""experiments/bench_disk.py: decodes with experts on disk, compares tokens, counts what was read."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))
import bench_disk

QUICK = dict(make="qwen3-30b-a3b", layers=None, dry=True, share=0.25, host_share=0.5, tokens=6, context=8, repeats=1)


def run(directory, **arguments) -> int:
    settings = dict(predictors="none", offload_path=None, out=None)
    with pytest.raises(typer.Exit) as stop:
        bench_disk.main(directory, **settings | QUICK | arguments)
    return stop.value.exit_code


@pytest.mark.slow
def test_tokens_and_reads_with_packed_rows_and_a_predictor(tmp_path):
    out = tmp_path / "figures.json"
    options = dict(predictors="none,gate-1", offload_path=tmp_path / "rows", out=out)
    assert run(tmp_path / "model", **options) == 0
    assert not (tmp_path / "model").exists()
    found = json.loads(out.read_text())
    assert [row["predictor"] for row in found["rows"]] == ["resident", "none", "gate-1"]
    assert found["disk_gbps"] > 0 and found["disk_how"] in ("direct", "buffered")
    for row in found["rows"][1:]:
        assert row["equal"] == "yes" and 0.4 < row["host_share"] < 0.6
        assert row["megabytes_read_per_token"] > 0 and row["gb_per_second"] > 0


def test_a_wrong_token_fails(tmp_path, monkeypatch, capsys):
    calls = []

    def decode(moe, prompt, tokens, repeats):
        calls.append(len(prompt))
        return {"ms_per_token": 1.0}, np.arange(7) + (len(calls) == 2)

    monkeypatch.setattr(bench_disk, "decode", decode)
    assert run(tmp_path / "model") == 1
    assert calls == [8, 8]
    assert "tokens differ from resident: none" in capsys.readouterr().out


def test_files_that_are_too_small_and_bad_options_are_said(tmp_path):
    small = tmp_path / "small"
    small.write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="no file holds 4096 bytes"):
        bench_disk.disk_rate([small])
    for options, message in (
        ({"make": None}, "--layers and --dry belong to --make"),
        ({"share": 0.0}, "--share 0.0: a share is more than 0"),
        ({"out": tmp_path}, "is a directory"),
    ):
        with pytest.raises(typer.BadParameter, match=message):
            run(tmp_path / "model", **options)
