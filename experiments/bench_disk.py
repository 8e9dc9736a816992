"""Decodes a checkpoint whose experts do not all fit in host memory, and compares tokens with all of them on the device.

    python experiments/bench_disk.py DIRECTORY --host-share 0.5 --share 0.25
    python experiments/bench_disk.py DIRECTORY --make qwen3-30b-a3b --layers 24 --offload-path ROWS

The rate of the disk is measured on the files that are read, past the page cache, beside what the run read a second.
With `--make` a checkpoint of that model's shapes is written into DIRECTORY first (random_checkpoint.py) and removed
after. Exit 1 if a token differs.
"""

import contextlib
import logging
import mmap
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import typer
from _outputs import check_writable, write_json
from plan import read_model
from random_checkpoint import Directory, Layers, Make, check_make, write_checkpoint
from rich.console import Console
from rich.table import Table
from typer import Option

from host_offload.disk_tier import tier_bytes
from moe_jax import MoE, OffloadConfig
from moe_jax.errors import MoEJaxError

console = Console(width=150)

# What is read at a time at most, by how many threads, and for how long at most, when the rate of a disk is measured.
BLOCK_BYTES, THREADS, SECONDS = 4 << 20, 16, 4.0

# Column of the printed table -> (key of a row, format).
COLUMNS = {
    "predictor": ("predictor", "s"),
    "slots": ("share", ".2f"),
    "hit": ("hit_rate", ".3f"),
    "host rows": ("host_share", ".2f"),
    "host hit": ("host_hit_rate", ".3f"),
    "ms/token": ("ms_per_token", ".2f"),
    "MB read/token": ("megabytes_read_per_token", ".1f"),
    "GB/s while reading": ("gb_per_second", ".2f"),
    "reads": ("reads", "s"),
    "waited": ("waited", ".0%"),
    "equal": ("equal", "s"),
}


def forget(paths: Sequence[Path]) -> None:
    """Asks the system to drop these files from its page cache."""
    os.sync()
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_rate(paths: Sequence[Path]) -> tuple[float, str]:
    """(GB/s of reading blocks of these files by threads for a few seconds, how: "direct" or "buffered").

    Blocks are smaller where every file is smaller. Raises ValueError if no file holds a page.
    """
    forget(paths)
    largest = max((path.stat().st_size for path in paths), default=0)
    block = min(BLOCK_BYTES, largest // mmap.PAGESIZE * mmap.PAGESIZE)
    if not block:
        raise ValueError(f"no file holds {mmap.PAGESIZE} bytes: too little to measure a disk with")
    blocks = [(path, at) for path in paths for at in range(0, path.stat().st_size - block + 1, block)]
    order = np.random.default_rng(0).permutation(len(blocks))
    with contextlib.ExitStack() as opened:

        def descriptors(flags):
            found = {path: os.open(path, os.O_RDONLY | flags) for path in paths}
            for number in found.values():
                opened.callback(os.close, number)
            return found

        try:
            files, how = descriptors(os.O_DIRECT), "direct"
            os.preadv(files[blocks[0][0]], [mmap.mmap(-1, block)], blocks[0][1])
        except OSError:  # a file system without it, such as tmpfs
            files, how = descriptors(0), "buffered"
        started = time.perf_counter()

        def read(share):
            buffer, done = mmap.mmap(-1, block), 0
            for index in share:
                if time.perf_counter() - started > SECONDS:
                    break
                path, at = blocks[index]
                done += os.preadv(files[path], [buffer], at)
            return done

        with ThreadPoolExecutor(THREADS) as workers:
            done = sum(workers.map(read, (order[i::THREADS] for i in range(THREADS))))
        return done / (time.perf_counter() - started) / 1e9, how


def decode(moe: MoE, prompt: np.ndarray, tokens: int, repeats: int) -> tuple[dict, np.ndarray]:
    """(figures of the median run, the new ids), after a call that compiles and fills slots and host memory."""

    def generate():
        ids = moe.generate(prompt, tokens + 1, attention_mask=np.ones_like(prompt), eos_token_id=[])
        return ids[len(prompt) :]

    generate()
    runs = []
    for _ in range(repeats):
        before = moe.stats()["disk"]
        ids = generate()
        stats, after = moe.stats()["last"]["decode"], moe.stats()["disk"]
        run = {"ms_per_token": stats["seconds"] / stats["steps"] * 1e3, "hit_rate": stats["hit_rate"]}
        if after is not None:
            seconds = after["read_seconds"] - before["read_seconds"]
            nbytes = after["bytes_read"] - before["bytes_read"]
            run |= {
                "host_hit_rate": stats["disk"] and stats["disk"]["hit_rate"],
                "megabytes_read_per_token": (stats["disk"] or {"bytes_per_token": 0})["bytes_per_token"] / 1e6,
                "gb_per_second": nbytes / seconds / 1e9 if nbytes else None,
                "waited": (after["wait_seconds"] - before["wait_seconds"]) / (stats["seconds"] or 1.0),
                "reads": after["reads"],
            }
        runs.append(run)
    row = sorted(runs, key=lambda run: run["ms_per_token"])[len(runs) // 2]
    return row | {"ms_per_token_of_runs": [run["ms_per_token"] for run in runs]}, ids


def shown(row: dict) -> list[str]:
    """The cells of a row; a figure that does not exist is a dash."""
    return ["-" if row.get(key) is None else format(row[key], style) for key, style in COLUMNS.values()]


def bench(directory, share, host_share, predictors, offload_path, tokens, context, repeats) -> dict:
    """`disk_gbps`, `disk_how` and `rows`, of which the first has every expert on the device."""
    common = {
        "max_batch": 1,
        "max_sequence_length": context + tokens + 1,
        "device_memory_ratio": 0.95,
        "prefill_chunk": 64,
        "decode_chunk": 8,
    }
    model = read_model(str(directory), OffloadConfig())
    spec = model.spec
    prompt = np.random.default_rng(0).integers(0, model.cfg.vocab_size, context).astype(np.int32)
    with MoE(directory, common | {"transport": "resident"}) as moe:
        row, reference = decode(moe, prompt, tokens, repeats)
        rows = [row | {"predictor": "resident", "equal": "yes"}]
        console.print("  ".join(shown(rows[-1])), highlight=False)
    tier = common | {
        "cache_rate": share,
        "host_memory_bytes": tier_bytes(spec, max(1, int(host_share * spec.L * spec.E))),
        "offload_path": None if offload_path is None else str(offload_path),
    }
    found = {"experts": {"layers": spec.L, "per_layer": spec.E, "bytes_each": spec.row_bytes}, "rows": rows}
    for predictor in predictors:
        with MoE(directory, tier | ({} if predictor == "none" else {"prefetch": predictor})) as moe:
            files = [path for path in (offload_path or directory).rglob("*") if path.is_file()]
            if "disk_gbps" not in found:
                found["disk_gbps"], found["disk_how"] = disk_rate(files)
                console.print(f"disk: {found['disk_gbps']:.2f} GB/s, {found['disk_how']} reads, {THREADS} threads")
            forget(files)
            row, ids = decode(moe, prompt, tokens, repeats)
            stats = moe.stats()["disk"]
            equal = "yes" if np.array_equal(ids, reference) else "NO"
            host = stats["rows"] / stats["experts"]
            rows.append(row | {"predictor": predictor, "share": share, "host_share": host, "equal": equal})
            console.print("  ".join(shown(rows[-1])), highlight=False)
    return found


def main(
    directory: Directory,
    make: Make = None,
    layers: Layers = None,
    dry: Annotated[
        bool, Option("--dry", help="with --make: its tiny configuration, to see on any machine that it runs")
    ] = False,
    share: Annotated[float, Option(help="share of the experts that have a slot")] = 0.25,
    host_share: Annotated[float, Option(help="share of the experts that host memory holds")] = 0.5,
    predictors: Annotated[str, Option(help="none, or what prefetches, with commas")] = "none",
    offload_path: Annotated[
        Path | None, Option(help="directory for packed rows, which are read in one piece; default: the checkpoint")
    ] = None,
    tokens: Annotated[int, Option(min=1, help="decode tokens timed")] = 32,
    context: Annotated[int, Option(min=1, help="prompt tokens")] = 16,
    repeats: Annotated[int, Option(min=1, help="timed runs of each setting; the median is reported")] = 3,
    out: Annotated[Path | None, Option(help="write the figures as JSON")] = None,
):
    """Measures decoding with experts on disk."""
    check_make(make, layers, dry)
    for name, value in (("--share", share), ("--host-share", host_share)):
        if not 0 < value <= 1:
            raise typer.BadParameter(f"{name} {value}: a share is more than 0 and at most 1")
    if out is not None:
        try:
            check_writable("--out", out)
        except OSError as error:
            raise typer.BadParameter(str(error)) from error
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("moe_jax").setLevel(logging.INFO)
    if make is not None:
        try:
            written = write_checkpoint(directory, make, layers, tiny=dry)
        except (ValueError, OSError) as error:
            raise typer.BadParameter(str(error)) from error
        console.print(f"{make}: {written / 1e9:.2f} GB written")
    try:
        found = bench(directory, share, host_share, predictors.split(","), offload_path, tokens, context, repeats)
    except (MoEJaxError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    finally:
        if make is not None:
            shutil.rmtree(directory)
    table = Table(*COLUMNS, title=f"{jax.devices()[0].device_kind}, {make or directory.name}, batch 1")
    for row in found["rows"]:
        table.add_row(*shown(row))
    console.print(table)
    console.print(f"disk: {found['disk_gbps']:.2f} GB/s measured, {found['disk_how']} reads")
    if out:
        write_json(out, {"model": make or directory.name, "device": jax.devices()[0].device_kind, **found})
    different = [row["predictor"] for row in found["rows"] if row["equal"] != "yes"]
    if different:
        console.print(f"[red]tokens differ from resident:[/red] {', '.join(different)}")
    raise typer.Exit(1 if different else 0)


if __name__ == "__main__":
    typer.run(main)
