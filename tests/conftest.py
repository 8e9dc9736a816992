"""Settings and fixtures that the whole suite shares.

JAX is configured here, before any test module imports it: the CPU backend only, dispatch that waits (a host callback
that enters JAX again can otherwise deadlock), products in full fp32, and a compilation cache that ends with the run.
"""

from __future__ import annotations

import gc
import os
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
from jax._src import compiler  # noqa: E402  (jax has no public way to give XLA an option for every program)

jax.config.update("jax_cpu_enable_async_dispatch", False)
jax.config.update("jax_default_matmul_precision", "highest")

# The first example of a test may compile: hypothesis' default deadline of 200 ms would call that a failure.
# Continuous integration draws the same examples each time: what it judges is the change. Others look further.
settings.register_profile("moe-jax", deadline=None, max_examples=25, derandomize=bool(os.environ.get("CI")))
settings.load_profile("moe-jax")

# Compilation was three quarters of the suite's time, so programs are barely optimised: without most of LLVM's passes,
# and with loops from XLA's older emitter, which takes no trip through MLIR. Both together compile in less than half of
# the time; the older emitter alone would cost more. HLO is optimised as always. `usual_emitter` marks tests that
# compare programs bit for bit (the older one sums in another order in each), `fully_optimised` those of how programs
# compute, or for how long: they get what users get, as do processes that tests start.
# A field of the message that holds the options is merged with what follows it, and has no attribute in Python:
# executable_build_options (3), debug_options (3), xla_backend_extra_options (500), of one key without a value.
OLDER_EMITTER = b"\x1a,\x1a*\xa2\x1f'\n#xla_cpu_disable_new_fusion_emitters\x12\x00"
_compile_options = compiler.get_compile_options
_older_emitter = True


def _options_of_tests(*args, **kwargs):
    options = _compile_options(*args, **kwargs)
    if _older_emitter:
        options = type(options).ParseFromString(options.SerializeAsString() + OLDER_EMITTER)
    return options


compiler.get_compile_options = _options_of_tests
jax.config.update("jax_disable_most_optimizations", True)


@pytest.hookimpl(tryfirst=True)  # before a fixture of the test compiles
def pytest_runtest_setup(item: pytest.Item) -> None:
    global _older_emitter
    fully = item.get_closest_marker("fully_optimised") is not None
    older = not fully and item.get_closest_marker("usual_emitter") is None
    if (not fully, older) != (jax.config.read("jax_disable_most_optimizations"), _older_emitter):
        jax.config.update("jax_disable_most_optimizations", not fully)
        _older_emitter = older
        jax.clear_caches()  # jax does not find a compiled function by these settings


# The longest files, the longest first. A worker takes the next file when it is done with one: a long one that is
# taken last leaves the others idle. (By itself xdist begins with the files that hold the most tests.)
LONGEST = (
    "moe_jax/test_lossless_families.py",
    "pallas_kernels/test_expert_spec.py",
    "moe_jax/models/test_parity.py",
    "moe_jax/test_lossless.py",
    "experiments/test_documents.py",
    "experiments/test_bench_kernels.py",
    "experiments/test_run_generate.py",
    "moe_jax/models/test_packed_dense.py",
    "moe_jax/conversion/test_rows.py",
    "moe_jax/test_encoder_decoder.py",
    "host_offload/test_simulate.py",
    "host_offload/policies/test_engine.py",
    "moe_jax/test_lookahead.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
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
