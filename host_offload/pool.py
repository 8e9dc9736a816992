"""Expert rows in pinned host memory: one slab a MoE layer and row tensor, filled by threads at memory speed."""

import ctypes
import logging
import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

logger = logging.getLogger(__name__)

# More threads than this do not copy faster (38 GB/s with 16, docs/measurements.md), they only take cores.
MAX_THREADS = 16
HOST_LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


class HostMemoryError(MemoryError):
    """Pinned host memory for the experts could not be had."""


def pinned_zeros(shape, dtype, device=None):
    """A `pinned_host` jax array of zeros on `device` (default: the first)."""
    sharding = SingleDeviceSharding(device or jax.devices()[0], memory_kind="pinned_host")
    # Made on the device and moved: XLA needs a device temporary of this size, which is why slabs are one layer's, not
    # all.
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)()


def host_view(array):
    """The NumPy view (writable, no copy) of a host-memory jax array; valid while the array lives."""
    buffer = (ctypes.c_char * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.frombuffer(buffer, np.uint8).view(array.dtype).reshape(array.shape)


def host_memory_error(error: Exception, done: int, total: int) -> HostMemoryError | None:
    """What to raise for an `error` of an allocation that got `done` of `total` bytes; None: it is no lack of memory."""
    if "RESOURCE_EXHAUSTED" not in str(error) and "out of memory" not in str(error).lower():
        return None
    return HostMemoryError(
        f"pinned host memory ran out after {done / 1e9:.1f} of {total / 1e9:.1f} GB of expert rows: set "
        f"{HOST_LIMIT_VARIABLE}={math.ceil(total / 1e9 * 1.1) + 2} before jax starts "
        f"(now {os.environ.get(HOST_LIMIT_VARIABLE, '64, its default')}), or free host memory"
    )


class ExpertPool:
    """All expert rows of a model at rest: `slabs[l][name]` is a pinned_host array [E, *shape].

    Owner: the engine that made it. Experts are read-only after `fill`, so any thread and the device may read at any
    time. `close()` gives the memory back; the arrays must not be in use by a running program then.

    Attributes:
      adjacent: True, a tensor's rows of experts e and e + 1 follow each other in memory.
      allocate_seconds: time until all pinned memory was there; fill_seconds: time of `fill`, 0 before it.
    """

    adjacent = True

    def __init__(self, spec, device=None):
        self.spec = spec
        self.slabs: list[dict[str, jax.Array]] = []
        self.fill_seconds = 0.0
        started = time.perf_counter()
        try:
            for _ in range(spec.L):
                self.slabs.append({})
                for name, (shape, dtype) in spec.tensors.items():
                    slab = pinned_zeros((spec.E, *shape), dtype, device)
                    self.slabs[-1][name] = jax.block_until_ready(slab)
        except Exception as error:
            done = sum(slab.nbytes for layer in self.slabs for slab in layer.values())
            self.close()
            lack = host_memory_error(error, done, self.nbytes)
            if lack is None:
                raise
            raise lack from error
        self._views = [{name: host_view(slab) for name, slab in layer.items()} for layer in self.slabs]
        self._places = [
            {name: (slab.unsafe_buffer_pointer(), spec.nbytes(name)) for name, slab in layer.items()}
            for layer in self.slabs
        ]
        self.allocate_seconds = time.perf_counter() - started

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return self.spec.L * self.spec.E * self.spec.row_bytes

    def view(self, layer: int, name: str) -> np.ndarray:
        """NumPy view [E, *shape] of a slab, without a copy."""
        return self._views[layer][name]

    def row(self, layer: int, name: str, expert: int) -> np.ndarray:
        """One row tensor [*shape] where it lies."""
        return self._views[layer][name][expert, ...]

    def stored(self, layer: int, name: str, expert: int) -> np.ndarray:
        """One row tensor as it is at rest, for checks: the same."""
        return self.row(layer, name, expert)

    def address(self, layer: int, name: str, expert: int) -> int:
        """Host address of one row tensor."""
        start, nbytes = self._places[layer][name]
        return start + expert * nbytes

    def fill(self, store, threads=None, progress=None):
        """Reads every row from `store` (a `RowSource`) with `threads` threads; returns seconds.

        The first failure of a read stops the load and is raised.
        """
        threads = threads or min(MAX_THREADS, os.cpu_count() or 1)
        if progress is None:
            progress = sys.stderr.isatty()
        started = time.perf_counter()
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with (
            Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not progress) as bar,
            ThreadPoolExecutor(threads, thread_name_prefix="fill") as workers,
        ):
            task = bar.add_task("experts", total=self.nbytes)

            def read(layer, expert):
                for name in self.spec.tensors:
                    # [expert, ...] keeps an array view even for a scalar row
                    store.read(layer, expert, name, self._views[layer][name][expert, ...])
                return self.spec.row_bytes

            jobs = [workers.submit(read, layer, e) for layer in range(self.spec.L) for e in range(self.spec.E)]
            try:
                for job in as_completed(jobs):
                    bar.advance(task, job.result())
            except BaseException:
                workers.shutdown(wait=True, cancel_futures=True)
                raise
        seconds = self.fill_seconds = time.perf_counter() - started
        logger.info("experts: %.2f GB in %.1f s, %.1f GB/s", self.nbytes / 1e9, seconds, self.nbytes / seconds / 1e9)
        return seconds

    def close(self):
        """Frees the slabs now. Safe to call twice."""
        self._views = self._places = []
        for layer in self.slabs:
            for slab in layer.values():
                if not slab.is_deleted():
                    slab.delete()
        self.slabs = []
