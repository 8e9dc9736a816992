"""Settings and fixtures that the whole suite shares.

JAX is configured here, before any test module imports it: the CPU backend only, dispatch that waits (a host callback
that enters JAX again can otherwise deadlock), products in full fp32, and a compilation cache that ends with the run.
"""

from __future__ import annotations

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

from collections.abc import Callable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import tiny_models  # noqa: E402
from hypothesis import settings  # noqa: E402

jax.config.update("jax_cpu_enable_async_dispatch", False)
jax.config.update("jax_default_matmul_precision", "highest")

# The first example of a test may compile: hypothesis' default deadline of 200 ms would call that a failure.
# Continuous integration draws the same examples each time: what it judges is the change. Others look further.
settings.register_profile("moe-jax", deadline=None, max_examples=25, derandomize=bool(os.environ.get("CI")))
settings.load_profile("moe-jax")


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


@pytest.fixture(scope="module")
def barely_optimised() -> Iterator[None]:
    """Programs of the module are compiled without most of LLVM's passes, which take half of the time or more.

    For tests of what programs do, not of how exactly they compute: calls, caches, faults. HLO is optimised as always.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()  # the setting is no part of what jax finds a compiled function by: other modules get their own


@pytest.fixture(scope="session")
def expected() -> Callable[[str], dict[str, np.ndarray]]:
    """``expected(name)`` are the arrays that transformers computed from that tiny checkpoint, by name."""
    return tiny_models.expected


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Directory of the bundled demo model."""
    from moe_jax.demo import demo_model_path

    return demo_model_path()
