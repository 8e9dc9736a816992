"""The documents keep their word: what README.md and docs/policies.md show runs, and their tables match the code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import moe_jax
from host_offload.policy import get_policy, list_policies
from host_offload.transport import TRANSPORTS
from moe_jax import OffloadConfig

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
POLICIES = (ROOT / "docs" / "policies.md").read_text()


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


@pytest.fixture
def shallow(shallow_demo, monkeypatch):
    """What the pages call the demo model has two layers, with which they run in a quarter of the time."""
    monkeypatch.setattr(moe_jax, "demo_model_path", lambda: shallow_demo)


def run_blocks(text: str, name: str) -> dict:
    """Executes all Python blocks of a page in one namespace, with line numbers of the block in a traceback."""
    namespace = {"__name__": name}
    for number, block in enumerate(python_blocks(text)):
        exec(compile(block, f"{name}[{number}]", "exec"), namespace)
    return namespace


@pytest.mark.slow
@pytest.mark.fully_optimised  # many tokens of the demo model
def test_readme_examples_run(shallow, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks(README)
    assert len(blocks) == 5
    namespace = {"__name__": "readme"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"README.md[{number}]", "exec"), namespace)
        if "set_cache(policy" in block:  # "nothing is compiled or loaded again"
            assert namespace["moe"].stats()["last"]["compilations"] == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"^(lru|lfu|lfru) +0\.\d+ +hit rate 0\.\d+, \d\.\d\d MB a token$", out, re.M)) == 6
    assert (tmp_path / "run.npz").exists()
    assert len(namespace["busiest"]) == 2 and all(8 / 32 <= share <= 1 for share in namespace["busiest"])
    assert "share of the 8 busiest" in out


@pytest.mark.slow
@pytest.mark.fully_optimised
def test_policies_page_runs_in_both_transports(shallow, capsys):
    namespace = run_blocks(POLICIES, "policies-page")
    assert isinstance(get_policy("score-average"), namespace["ScoreAverage"])
    lines = re.findall(r"^(device|callback) +(\S+) +hit rate (0\.\d+)  (.+)$", capsys.readouterr().out, re.M)
    assert [line[:2] for line in lines] == [(t, p) for t in ("device", "callback") for p in ("lru", "score-average")]
    rate = {line[:2]: line[2] for line in lines}
    assert len({line[3] for line in lines}) == 1  # "the same text comes four times"
    # The rate of one half is exact in binary, so NumPy and XLA rank alike and keep the same experts.
    for policy in ("lru", "score-average"):
        assert rate["device", policy] == rate["callback", policy]
    assert rate["device", "lru"] != rate["device", "score-average"]
    policy_block = python_blocks(POLICIES)[0]
    assert len(policy_block.strip().splitlines()) <= 20


def table_rows(text: str, heading: str) -> list[list[str]]:
    """Cells of the first table after a heading, without its header."""
    section = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_readme_lists_every_configuration_key_with_its_default():
    listed = {row[0].strip("`"): row[1].strip("`") for row in table_rows(README, "Configuration")}
    defaults = {field.name: repr(field.default).replace("'", '"') for field in dataclasses.fields(OffloadConfig)}
    assert listed == defaults


def test_readme_lists_transports():
    assert {row[0].strip("`") for row in table_rows(README, "Transports")} == set(TRANSPORTS)


def test_policies_page_lists_the_built_in_policies():
    built_in = {name for name in list_policies() if type(get_policy(name)).__module__.startswith("host_offload.")}
    assert {row[0].strip("`") for row in table_rows(POLICIES, "Built in")} == built_in


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{page} links to {target}"


def test_make_targets_in_the_readme_exist():
    targets = set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"\bmake ([a-z]+)", README.split("## Develop")[1])) <= targets
