"""Notebooks run from top to bottom in a fresh kernel, show what their text promises and are stored small."""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_BYTES = 300_000  # a notebook with its pictures
SECONDS_A_CELL = 240  # on a busy machine; a notebook alone takes well under a minute


def run(path: Path, monkeypatch) -> nbformat.NotebookNode:
    """The executed notebook; a cell that raises fails the test with its traceback."""
    # The kernel is a process of its own: it finds the packages of this checkout, and inline plots.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.delenv("MPLBACKEND", raising=False)
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=SECONDS_A_CELL, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    return client.execute()


def outputs(notebook, kind: str) -> list[str]:
    """The data of all outputs of a MIME type, or the text printed to standard output."""
    found = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    if kind == "stdout":
        return [output.text for output in found if output.output_type == "stream" and output.name == "stdout"]
    return [output.data[kind] for output in found if kind in output.get("data", {})]


def test_there_are_notebooks():
    assert "quickstart.ipynb" in [path.name for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_valid_small_and_without_errors(path):
    assert path.stat().st_size < MOST_BYTES, "draw smaller pictures, or clear the outputs before committing"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not any(output.output_type == "error" for output in cell.get("outputs", ()))
        for target in re.findall(r"\]\(([^)#]+)\)", cell.source if cell.cell_type == "markdown" else ""):
            assert "://" in target or (path.parent / target).exists(), f"{path.name} links to {target}"


@pytest.mark.slow
def test_quickstart(monkeypatch):
    notebook = run(ROOT / "notebooks" / "quickstart.ipynb", monkeypatch)
    assert len(outputs(notebook, "image/png")) == 2  # hit rate against slots, heat map
    assert any("256 of 256 experts have a slot; device, lru" in text for text in outputs(notebook, "text/plain"))
    printed = "".join(outputs(notebook, "stdout"))
    assert "1 text from 21 caches" in printed  # the text does not depend on the cache
    shared = re.search(r"token before, by layer: \[([\d. ]+)\]", printed)
    assert all(4 / 32 < float(share) < 1 for share in shared[1].split())
