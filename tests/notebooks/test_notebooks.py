"""Notebooks run from top to bottom in a fresh kernel, show what their text promises and are stored small."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import re
from pathlib import Path

import nbclient
import nbformat
import numpy as np
import pytest
import torch_reference

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_BYTES = 300_000  # a notebook with its pictures
SECONDS_A_CELL = 240  # on a busy machine; a notebook alone takes well under a minute


def run(path: Path, monkeypatch, **fewer) -> nbformat.NotebookNode:
    """The executed notebook; a cell that raises fails the test with its traceback.

    fewer: what to run instead of some text of a cell, {name: (text, other text)}: the same with fewer repetitions.
    """
    # The kernel is a process of its own: it finds the packages of this checkout, and inline plots.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.delenv("MPLBACKEND", raising=False)
    notebook = nbformat.read(path, as_version=4)
    for old, new in fewer.values():
        (cell,) = (cell for cell in notebook.cells if cell.cell_type == "code" and old in cell.source)
        cell.source = cell.source.replace(old, new)
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
def test_quickstart(shallow_demo, monkeypatch):
    notebook = run(
        ROOT / "notebooks" / "quickstart.ipynb",
        monkeypatch,
        tokens=("text = moe.generate(prompt, 64,", "text = moe.generate(prompt, 12,"),
        slots=("(2, 4, 8, 12, 16, 24, 32)", "(2, 8, 24, 32)"),
        layers=("MoE(demo_model_path()", f"MoE({str(shallow_demo)!r}"),
    )
    assert len(outputs(notebook, "image/png")) == 2  # hit rate against slots, heat map
    assert any("64 of 64 experts have a slot; device, lru" in text for text in outputs(notebook, "text/plain"))
    printed = "".join(outputs(notebook, "stdout"))
    assert "1 text from 12 caches" in printed  # the text does not depend on the cache
    shared = re.search(r"token before, by layer: \[([\d. ]+)\]", printed)
    assert all(4 / 32 < float(share) < 1 for share in shared[1].split())


def printed(name: str, monkeypatch, **fewer) -> tuple[str, int]:
    """What a notebook prints, and how many pictures it draws."""
    notebook = run(ROOT / "notebooks" / f"{name}.ipynb", monkeypatch, **fewer)
    return "".join(outputs(notebook, "stdout")), len(outputs(notebook, "image/png"))


def table(text: str, name: str) -> list[float]:
    """The numbers behind `name` at the start of a line; signs and per cent are allowed."""
    line = re.search(rf"^{re.escape(name)} +([-+\d.% ]+)$", text, re.M)
    return [float(number.rstrip("%")) for number in line[1].split()]


@pytest.mark.slow
def test_caching_policies(monkeypatch):
    text, pictures = printed("caching_policies", monkeypatch)
    assert pictures == 2
    rates = {name: table(text, name) for name in ("random", "lru", "lfu", "lfru")}
    assert all(np.diff(row).min() > 0 for row in rates.values())
    assert all(a < b for a, b in zip(rates["random"], rates["lfu"], strict=True))
    assert len(re.findall(r"slots: best \S+ ?, gap", text)) == 3


@pytest.mark.slow
def test_routing_anatomy(monkeypatch):
    text, pictures = printed("routing_anatomy", monkeypatch)
    assert pictures == 4
    of_one, of_all = table(text, "entropy, one request"), table(text, "entropy, all requests")
    assert all(0 < one < everything <= 5 for one, everything in zip(of_one, of_all, strict=True))
    nearest, chance = re.search(r"same domain for (\d+)% \(chance (\d+)%\)", text).groups()
    assert int(nearest) > 2 * int(chance)


@pytest.mark.slow
def test_write_your_own_policy(shallow_demo, monkeypatch):
    text, pictures = printed(
        "write_your_own_policy",
        monkeypatch,
        memories=("[2, 4, 8, 16, 32, 64, 128]", "[2, 128]"),
        tokens=("max_new_tokens=64", "max_new_tokens=24"),
        layers=("MoE(demo_model_path()", f"MoE({str(shallow_demo)!r}"),
    )
    assert pictures == 1 and "NumPy and jax decide alike: True" in text
    own, lru, optimum = (table(text, name) for name in ("two-speeds", "lru", "optimum"))
    assert all(a < b < c for a, b, c in zip(lru, own, optimum, strict=True))
    live = re.findall(r"^(\S+) +(\d+) hits of (\d+) .*simulator (\d+);", text, re.M)
    assert [name for name, *_ in live] == ["lru", "lfru", "two-speeds"]
    assert all(hits == simulated for _, hits, _, simulated in live)
    assert "1 text from 3 policies" in text


@pytest.mark.slow
def test_prefetch_pays_or_not(monkeypatch):
    text, pictures = printed(
        "prefetch_pays_or_not", monkeypatch, ratios=("[0.1, 0.25, 0.5, 1, 2, 4, 8]", "[0.1, 1, 8]")
    )
    assert pictures == 2
    recall = {name: table(text, name)[0] for name in ("previous-token", "linear-need")}
    assert recall["previous-token"] < recall["linear-need"] < 1
    change = {name: table(text[text.index("layer / copy") :], name) for name in ("previous-token", "oracle")}
    assert change["previous-token"][0] > 0 > min(change["previous-token"])  # where it loses, where it pays
    assert min(change["oracle"]) < -20
    costs = re.findall(r"prediction takes +(\d+) us +[\d.]+ +([\d.]+)", text)
    without = float(re.findall(r"no prefetch +[\d.]+ +([\d.]+)", text)[-1])
    assert [cost for cost, _ in costs] == ["0", "12", "50", "100"]
    assert float(costs[0][1]) < without < float(costs[-1][1])


@pytest.mark.slow
def test_compare_with_pytorch(monkeypatch):
    text, _ = printed("compare_with_pytorch", monkeypatch, times=("for _ in range(4)", "for _ in range(2)"))
    stored = "STORED outputs, no PyTorch here" in text
    assert stored == (importlib.util.find_spec("torch") is None) and stored != ("run here and now" in text)
    assert re.findall(r"([\d.]+)% of the experts in slots: (\d+) of (\d+)", text) == [
        (share, "96", "96") for share in ("100.0", "25.0", "12.5")
    ]
    assert all(float(x) < 1e-3 for x in re.findall(r"differ by at most (\S+)", text))
    assert ("a size, not a comparison" in text) == stored


def test_the_stored_outputs_of_pytorch_are_those_of_the_notebook_s_prompts():
    stored = json.loads((ROOT / "notebooks" / "compare_with_pytorch.json").read_text())
    code, prompts, new_tokens = torch_reference.notebook_code()
    assert stored["prompts"] == prompts and "def run_with_torch(" in code
    assert [len(answer["new_ids"]) for answer in stored["answers"]] == [new_tokens] * len(prompts)
    assert torch_reference.differences(stored, stored) == []
    other = copy.deepcopy(stored)
    other["answers"][1]["new_ids"][3] += 1
    other["answers"][0]["next_token_logits"][5] += 0.01
    assert torch_reference.differences(stored, other) == ["answer 0: next_token_logits", "answer 1: new_ids"]
