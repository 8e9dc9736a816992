"""How fast pinned host memory can be had, by seven ways, and what each is worth afterwards.

    python experiments/bench_pinned.py --gigabytes 8 --out pinned.json

A model's experts rest in pinned memory, and getting it can be most of the time of a load. Each way gets the memory and
pins it, writes all of it with threads as a load does, lets the copy engine read it, and gives it back.
"""

import ctypes
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import typer
from _outputs import check_writable, write_json
from rich.console import Console
from rich.table import Table
from typer import Option

from host_offload.pinned import MAX_THREADS, AllocatedMemory, PinnedMemory, RegisteredMemory, host_view, touched

console = Console(width=150)

SLAB = 1 << 28  # bytes of a slab, as of a layer's tensor of experts
THREADS = min(MAX_THREADS, os.cpu_count() or 1)


def by_pool(kind: type[PinnedMemory], nbytes: int):
    """As a pool has it: a jax array a slab."""
    memory = kind(nbytes)
    return [host_view(memory.take((SLAB,), np.uint8)) for _ in range(nbytes // SLAB)], memory.close


def by_driver(nbytes: int, threads: int):
    """cudaMallocHost of a slab at a time, by so many threads."""
    from host_offload.transport.cuda import check, cudart

    def get(_):
        check(cudart.cudaSetDevice(0))
        return int(check(cudart.cudaMallocHost(SLAB)))

    with ThreadPoolExecutor(threads) as workers:
        addresses = list(workers.map(get, range(nbytes // SLAB)))

    def close():
        for address in addresses:
            check(cudart.cudaFreeHost(address))

    return [np.frombuffer((ctypes.c_char * SLAB).from_address(at), np.uint8) for at in addresses], close


def by_registering(nbytes: int, huge: bool, threads: int):
    """Pages touched by threads, then registered, a slab at a time by so many threads (0: all in one piece)."""
    from host_offload.transport.cuda import check, cudart

    memory = touched(nbytes, huge)
    step = SLAB if threads else nbytes
    places = [(memory.ctypes.data + at, min(step, nbytes - at)) for at in range(0, nbytes, step)]

    def register(place):
        check(cudart.cudaSetDevice(0))
        check(cudart.cudaHostRegister(*place, cudart.cudaHostRegisterMapped))

    with ThreadPoolExecutor(threads or 1) as workers:
        list(workers.map(register, places))
    views = np.split(memory, range(SLAB, nbytes, SLAB))
    del memory

    def close():
        for address, _ in places:
            check(cudart.cudaHostUnregister(address))
        views.clear()  # the last that holds the memory

    return views, close


WAYS = {
    "pinned_memory='allocated'": lambda nbytes: by_pool(AllocatedMemory, nbytes),
    "cudaMallocHost": lambda nbytes: by_driver(nbytes, 1),
    f"cudaMallocHost, {THREADS} threads": lambda nbytes: by_driver(nbytes, THREADS),
    "pages, registered": lambda nbytes: by_registering(nbytes, False, 0),
    "huge pages, registered": lambda nbytes: by_registering(nbytes, True, 0),
    f"huge pages, registered by {THREADS} threads": lambda nbytes: by_registering(nbytes, True, THREADS),
    "pinned_memory='registered'": lambda nbytes: by_pool(RegisteredMemory, nbytes),
}


def copy_rate(memory: np.ndarray) -> float:
    """GB/s of the copy engine from `memory` [bytes] to the device, of eight copies."""
    from host_offload.transport.cuda import H2D, check, cudart

    nbytes = memory.size
    device = check(cudart.cudaMalloc(nbytes))
    check(cudart.cudaMemcpy(device, memory.ctypes.data, nbytes, H2D))
    started = time.perf_counter()
    for _ in range(8):
        check(cudart.cudaMemcpyAsync(device, memory.ctypes.data, nbytes, H2D, 0))
    check(cudart.cudaStreamSynchronize(0))
    rate = 8 * nbytes / (time.perf_counter() - started) / 1e9
    check(cudart.cudaFree(device))
    return rate


def measure(name: str, nbytes: int) -> dict:
    """Seconds to get the memory, rates of writing and copying it, seconds to give it back."""
    started = time.perf_counter()
    views, close = WAYS[name](nbytes)
    got = time.perf_counter() - started
    started = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as workers:
        list(workers.map(lambda view: view.fill(1), views))
    wrote = time.perf_counter() - started
    rate = copy_rate(views[0])
    started = time.perf_counter()
    close()
    return {
        "way": name,
        "seconds": got,
        "gb_per_second": nbytes / got / 1e9,
        "write_gb_per_second": nbytes / wrote / 1e9,
        "copy_gb_per_second": rate,
        "free_seconds": time.perf_counter() - started,
    }


def main(
    gigabytes: Annotated[int, Option(min=1, help="GiB of each way")] = 8,
    out: Annotated[Path | None, Option(help="write figures as JSON")] = None,
):
    """Measures ways to get pinned host memory on a GPU."""
    if out:
        try:
            check_writable("--out", out)
        except OSError as error:
            raise typer.BadParameter(str(error)) from error
    if jax.devices()[0].platform != "gpu":
        raise typer.BadParameter(f"pinned memory is of a CUDA GPU, and jax has a {jax.devices()[0].platform} here")
    rows = []
    for name in WAYS:
        rows.append(measure(name, gigabytes << 30))
        console.print({key: round(value, 2) if key != "way" else value for key, value in rows[-1].items()})
    table = Table("way", "s", "GB/s", "writing GB/s", "copy engine GB/s", "free s", title=f"{gigabytes} GiB")
    for row in rows:
        table.add_row(row["way"], *(f"{value:.2f}" for key, value in row.items() if key != "way"))
    console.print(table)
    if out:
        write_json(out, {"gigabytes": gigabytes, "threads": THREADS, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
