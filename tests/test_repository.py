"""The repository as a newcomer meets it: metadata, environment script, demo model, layout."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["moe_jax", "host_offload", "pallas_kernels"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Import name -> distribution, where they differ.
DISTRIBUTION = {"orbax": "orbax-checkpoint", "cuda": "cuda-bindings"}


def requirement_names(requirements) -> set[str]:
    return {re.match(r"[A-Za-z0-9_.-]+", requirement)[0] for requirement in requirements}


def python_files(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_version_is_the_one_in_the_package():
    import moe_jax
    from moe_jax._version import __version__

    assert moe_jax.__version__ == __version__
    assert "version" in PROJECT["dynamic"]


def imports_of(path: Path) -> set[str]:
    """Top-level names of everything the file imports, lazily or not."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.split(".")[0])
    return found


def test_packages_import_only_what_the_project_declares():
    declared = requirement_names(PROJECT["dependencies"]) | requirement_names(
        requirement
        for extra in ("cuda12", "cuda13", "lab", "serve")
        for requirement in PROJECT["optional-dependencies"][extra]
    )
    undeclared = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in python_files(*PACKAGES)
        for name in imports_of(path)
        if name not in sys.stdlib_module_names and name not in PACKAGES and DISTRIBUTION.get(name, name) not in declared
    }
    assert not undeclared


def test_lower_layers_do_not_import_upper_ones():
    allowed = {"pallas_kernels": {"pallas_kernels"}, "host_offload": {"host_offload", "pallas_kernels"}}
    for package, may_import in allowed.items():
        for path in python_files(package):
            upward = imports_of(path) & set(PACKAGES) - may_import
            assert not upward, f"{path.relative_to(ROOT)} imports {sorted(upward)}"


def test_every_source_folder_is_a_package_and_no_test_folder_is():
    # A folder without __init__.py would be missing from the wheel. Test folders mirror package names, so they must not
    # become packages of the same name.
    for folder in {path.parent for path in python_files(*PACKAGES)}:
        assert (folder / "__init__.py").exists(), f"{folder.relative_to(ROOT)} lacks __init__.py"
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_files_stay_short():
    long = {
        str(path.relative_to(ROOT)): lines
        for path in python_files(*PACKAGES, "experiments", "tests")
        if (lines := len(path.read_text().splitlines())) > 600
    }
    assert not long, f"files over 600 lines, split them by idea: {long}"


# ------------------------------------------------------------------------------------------------ demo model


def test_demo_model_is_complete(demo_model):
    index = json.loads((demo_model / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert shards == {path.name for path in demo_model.glob("*.safetensors")}
    names, values = set(), 0
    for shard in shards:
        with open(demo_model / shard, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                assert index["weight_map"][name] == shard
                names.add(name)
                values += entry["data_offsets"][1] - entry["data_offsets"][0]
    assert names == set(index["weight_map"])
    assert values == index["metadata"]["total_size"] == 2 * index["metadata"]["total_parameters"]


def test_demo_tokenizer_round_trips_text(demo_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    text = "Once upon a time, été 42 🙂"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == json.loads((demo_model / "config.json").read_text())["vocab_size"]


def test_notices_travel_with_the_demo_weights(demo_model):
    notices = (demo_model / "LICENSES.md").read_text()
    for notice in (
        "Copyright (c) 2021 OpenAI",
        "WordNet 3.1 Copyright 2011",
        "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2",
    ):
        assert notice in notices
    card, sources = (demo_model / "README.md").read_text(), (demo_model / "SOURCES.md").read_text()
    domains = json.loads((demo_model / "training_stats.json").read_text())["corpus_tokens"]
    for domain in domains:
        assert f"\n| {domain} |" in card and f"\n| {domain} |" in sources
    assert "LICENSES.md" in card and "SOURCES.md" in card


def test_data_is_part_of_the_package():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = setuptools["package-data"]["moe_jax"]
    packed = {path.name for pattern in patterns for path in (ROOT / "moe_jax").glob(pattern)}
    assert packed == {path.name for path in (ROOT / "moe_jax" / "demo_model").iterdir()}


# ------------------------------------------------------------------------------------------------ .ci/env

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="the environment script is bash")


@pytest.fixture
def environment(tmp_path):
    """A stand-in environment whose Python only notes how it was called, and a function that runs .ci/env on it."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    log = tmp_path / "calls"
    python.write_text(
        f'#!/bin/sh\necho "$@" >>{log}\ncase "$*" in *"pip install"*) [ ! -e {tmp_path}/offline ];; esac\n'
    )
    python.chmod(0o755)

    def run(*extras):
        log.write_text("")
        done = subprocess.run([ROOT / ".ci" / "env", tmp_path / "venv", *extras], capture_output=True, text=True)
        installs = [line.split()[-1] for line in log.read_text().splitlines() if "pip install" in line]
        return done, installs

    return run


@needs_bash
def test_environment_installs_once_and_adds_extras(environment):
    assert environment()[1] == ["."]
    assert environment()[1] == []
    assert environment("test")[1] == [".[test]"]
    assert environment("test")[1] == []
    assert environment()[1] == []  # the core is there, `make demo` after `make test` installs nothing
    assert environment("cuda13")[1] == [".[test,cuda13]"]


@needs_bash
def test_environment_is_refreshed_when_it_was_made_for_another_project_state(environment, tmp_path):
    environment("test")
    stamp = tmp_path / "venv" / ".installed"
    stamp.write_text("12345 678\n" + stamp.read_text().splitlines()[1] + "\n")
    assert environment()[1] == [".[test]"]
    assert environment()[1] == []


@needs_bash
def test_environment_has_the_versions_that_were_tested(environment, tmp_path, monkeypatch):
    locked = (ROOT / ".ci" / "constraints.txt").read_text()
    assert {"jax", "numpy", "transformers", "pytest"} <= set(re.findall(r"^([\w.-]+)==", locked, re.M))
    environment()
    assert "--constraint .ci/constraints.txt" in (tmp_path / "calls").read_text()
    newer = tmp_path / "newer.txt"
    newer.write_text("numpy==99\n")
    monkeypatch.setenv("CONSTRAINTS", str(newer))
    assert environment()[1] == ["."]  # a changed list is a changed environment
    assert f"--constraint {newer}" in (tmp_path / "calls").read_text()


@needs_bash
def test_failed_installation_is_not_taken_for_a_finished_one(environment, tmp_path):
    (tmp_path / "offline").touch()
    done, installs = environment("test")
    assert done.returncode != 0 and installs == [".[test]"]
    (tmp_path / "offline").unlink()
    assert environment("test")[1] == [".[test]"]


@needs_bash
def test_missing_python_is_explained(tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "dirname", "cat", "cksum", "env"):
        (tools / tool).symlink_to(shutil.which(tool))
    # On PATH but of no use, as a pyenv shim without a version behind it.
    (tools / "python3.12").write_text("#!/bin/sh\nexit 127\n")
    (tools / "python3.12").chmod(0o755)
    done = subprocess.run(
        [ROOT / ".ci" / "env", tmp_path / "venv"],
        env={"PATH": str(tools), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "Python 3.12 or newer" in done.stderr and "~/.pyenv/versions" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_scripts_are_executable():
    for script in ("run", "env"):
        assert os.access(ROOT / ".ci" / script, os.X_OK)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_help_lists_every_target():
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
    printed = subprocess.run(["make", "-C", ROOT, "help"], capture_output=True, text=True).stdout
    assert {line.split()[1] for line in printed.splitlines() if line.startswith("make ")} == set(phony)
