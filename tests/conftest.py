"""Settings and fixtures that the whole suite shares.

JAX is configured here, before any test module imports it: the CPU backend only, dispatch that waits (a host callback
that enters JAX again can otherwise deadlock), products in full fp32, and a compilation cache that ends with the run.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import re
import shutil
import signal
import tempfile

# Set, not defaulted: on a machine with a GPU the suite must test the same code paths as everywhere else.
os.environ["JAX_PLATFORMS"] = "cpu"
# One folder a process, gone with it: nothing of an earlier run is found, and no worker reads a file that another one is
# writing. What is in it serves the process and those that its tests start. Everything is kept in it: hundreds of models
# are loaded, and by default jax compiles anew each time what took less than a second.
_compilation_cache = tempfile.TemporaryDirectory(prefix="moe-jax-tests-")
os.environ["JAX_COMPILATION_CACHE_DIR"] = _compilation_cache.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# Tests press Ctrl-C, here and in processes that they start. What a script runs in the background ignores it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import tiny_models  # noqa: E402
from hypothesis import settings  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402

jax.config.update("jax_cpu_enable_async_dispatch", False)
jax.config.update("jax_default_matmul_precision", "highest")

# The first example of a test may compile: hypothesis' default deadline of 200 ms would call that a failure.
# Continuous integration draws the same examples each time: what it judges is the change. Others look further.
settings.register_profile("moe-jax", deadline=None, max_examples=25, derandomize=bool(os.environ.get("CI")))
settings.load_profile("moe-jax")

# Compilation was three quarters of the suite's time, so programs are barely optimised: without most of LLVM's passes.
# HLO is optimised as always. `fully_optimised` marks tests of how programs compute, or for how long, and those that
# compare with transformers: they get what users get, as do processes that tests start.
jax.config.update("jax_disable_most_optimizations", True)
# `--compiled quickly` leaves those out and halves the time of the others once more: XLA's older loop emitter takes no
# trip through MLIR. It fuses a multiplication and an addition here and not there, depending on what is around them, and
# the losslessness tests compare programs to the bit: AVX has no such instruction. One core compiles a program that is
# not split for several in five sixths of the time. XLA reads flags once a process.
QUICKLY = (
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    "--xla_cpu_max_isa=AVX",
    "--xla_cpu_parallel_codegen_split_count=1",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--compiled",
        choices=("quickly", "fully"),
        help="run only the tests that bear the fastest compilation (quickly), or only those that do not (fully)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.compiled == "quickly" and platform.machine() == "x86_64":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XLA_FLAGS", " ".join((os.environ.get("XLA_FLAGS", ""), *QUICKLY)))
            jax.jit(lambda: 0)()


def _fully(item: pytest.Item) -> bool:
    return item.get_closest_marker("fully_optimised") is not None


@pytest.hookimpl(tryfirst=True)  # before a fixture of the test compiles
def pytest_runtest_setup(item: pytest.Item) -> None:
    if _fully(item) == jax.config.read("jax_disable_most_optimizations"):
        jax.config.update("jax_disable_most_optimizations", not _fully(item))
        jax.clear_caches()  # jax does not find a compiled function by this setting


# The longest files, the longest first. A worker takes the next file when it is done with one: a long one that is
# taken last leaves the others idle. (By itself xdist begins with the files that hold the most tests.)
LONGEST = (
    "moe_jax/test_lossless_families.py",
    "moe_jax/test_prefetch_staged.py",
    "experiments/test_bench_kernels.py",
    "moe_jax/test_lossless.py",
    "notebooks/test_notebooks.py",
    "moe_jax/test_prefetch.py",
    "experiments/test_run_generate.py",
    "moe_jax/engine/test_parity.py",
    "host_offload/policies/test_engine.py",
    "moe_jax/models/test_parity.py",
    "moe_jax/engine/test_set_cache.py",
    "moe_jax/engine/test_programs.py",
    "pallas_kernels/test_expert_spec.py",
    "moe_jax/models/test_packed_dense.py",
    "moe_jax/test_encoder_decoder.py",
    "experiments/test_documents.py",
    "pallas_kernels/test_lowering.py",
    "moe_jax/conversion/test_rows.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (how := config.option.compiled) is not None:
        others = [item for item in items if _fully(item) != (how == "fully")]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if _fully(item) == (how == "fully")]
    if hasattr(config, "workerinput"):
        rank = {f"{Path(__file__).parent}/{name}": number for number, name in enumerate(LONGEST)}
        items.sort(key=lambda item: rank.get(str(item.path), len(rank)))


def pytest_collection_finish() -> None:
    gc.freeze()  # a million objects of the imports, which the collector would look through again and again


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Callable[[str], Path]:
    """``tiny(name)`` is the directory of a tiny checkpoint (``tests/tiny_models.py``), built once by each worker.

    Tests share the directory and must not write into it.
    """
    built: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in built:
            built[name] = tiny_models.build(name, tmp_path_factory.mktemp("tiny") / name)
        return built[name]

    return directory


@pytest.fixture(scope="session")
def expected() -> Callable[[str], dict[str, np.ndarray]]:
    """``expected(name)`` are the arrays that transformers computed from that tiny checkpoint, by name."""
    return tiny_models.expected


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Directory of the bundled demo model."""
    from moe_jax.demo import demo_model_path

    return demo_model_path()


@pytest.fixture(scope="session")
def shallow_demo(demo_model, tmp_path_factory) -> Path:
    """Directory of the demo model's first two layers: no sensible text, but a quarter of the time to compile."""
    directory = tmp_path_factory.mktemp("shallow_demo")
    for path in demo_model.glob("*.json"):
        shutil.copy(path, directory)
    (directory / "model.safetensors.index.json").unlink()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    tensors = {}
    for path in demo_model.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            if (layer := re.match(r"model\.layers\.(\d+)\.", name)) is None or int(layer[1]) < 2:
                tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors")
    return directory
