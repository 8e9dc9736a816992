"""experiments/bench_pinned.py needs a GPU, and says so."""

import sys
from pathlib import Path

import pytest
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))
import bench_pinned


def test_without_a_gpu_it_says_so():
    with pytest.raises(typer.BadParameter, match="CUDA GPU"):
        bench_pinned.main(gigabytes=1)


def test_where_it_cannot_write_it_says_so_first(tmp_path):
    with pytest.raises(typer.BadParameter, match="there is no directory"):
        bench_pinned.main(out=tmp_path / "missing" / "pinned.json")
