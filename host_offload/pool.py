"""Expert rows in pinned host memory: one slab a MoE layer and row tensor, filled by threads at memory speed."""

import logging
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from host_offload.pinned import ALLOCATED, MAX_THREADS, host_view, open_pinned, padded

logger = logging.getLogger(__name__)


class ExpertPool:
    """All expert rows of a model at rest: `slabs[l][name]` is a pinned_host array [E, *shape].

    Owner: the engine that made it. Experts are read-only after `fill`, so any thread and the device may read at any
    time. `close()` gives the memory back; the arrays must not be in use by a running program then, nor views of them.
    Raises HostMemoryError. pinned: how its memory is had, see `pinned.open_pinned`.

    Attributes:
      adjacent: True, a tensor's rows of experts e and e + 1 follow each other in memory.
      allocate_seconds: time until all pinned memory was there; fill_seconds: time of `fill`, 0 before it.
    """

    adjacent = True

    def __init__(self, spec, pinned=ALLOCATED):
        self.spec = spec
        self.slabs: list[dict[str, jax.Array]] = []
        self.fill_seconds = 0.0
        started = time.perf_counter()
        self._memory = open_pinned(spec.L * sum(padded(spec.E * spec.nbytes(name)) for name in spec.tensors), pinned)
        try:
            for _ in range(spec.L):
                layer = {n: self._memory.take((spec.E, *shape), dtype) for n, (shape, dtype) in spec.tensors.items()}
                self.slabs.append(layer)
        except BaseException:
            self.close()
            raise
        self._views = [{name: host_view(slab) for name, slab in layer.items()} for layer in self.slabs]
        self._places = [
            {name: (slab.unsafe_buffer_pointer(), spec.nbytes(name)) for name, slab in layer.items()}
            for layer in self.slabs
        ]
        self.allocate_seconds = time.perf_counter() - started

    @property
    def pinned(self) -> str:
        """How its memory was had, one of `pinned.WAYS`."""
        return self._memory.way

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
        self.slabs = []
        self._memory.close()
