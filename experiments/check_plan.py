"""Is what was planned what a loaded model takes? Planned bytes beside measured ones, of the device and of the host.

    python experiments/check_plan.py DIRECTORY --cache-rate 0.5
    python experiments/check_plan.py DIRECTORY --make qwen3-30b-a3b --layers 24 --transports device,callback

The device's are those of jax's allocator (and the staging memory, which is CUDA's), after the load, and at the peak of
a call that writes the longest sequence. The host's are by how much the load made the process's resident memory grow,
and the system's available memory fall. The first is judged where the pool is registered, the second where it is
allocated, for CUDA's own pinned memory need not count as the process's; the other one is shown. Before all of it a
small operation has jax start, so that what the process takes for itself is not counted as the model's. With `--make` a
checkpoint of that model's shapes is written into DIRECTORY first (random_checkpoint.py) and removed after. Exit 1 if a
figure is further from its plan than --tolerance, or the peak is above the plan. What is planned with less than `LEAST`
bytes is shown and not judged: the process itself takes more.
"""

import contextlib
import gc
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import typer
from _outputs import check_writable, write_json
from random_checkpoint import Directory, Layers, Make, check_make, write_checkpoint
from rich.console import Console
from rich.table import Table
from typer import Option

from host_offload.pinned import ALLOCATED, REGISTERED, WAYS, available_bytes
from moe_jax import MoE, OffloadConfig
from moe_jax.errors import MoEJaxError

console = Console(width=130)


LEAST = 1 << 28


@dataclass(frozen=True)
class Snapshot:
    """Bytes in use: of the device by jax's allocator, and the most so far (None on a CPU); available of the host;
    resident of the process, see `resident_bytes`."""

    device: int | None
    peak: int | None
    available: float
    resident: int | None


def resident_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """Resident bytes of the process that no file holds; None where the system does not tell (Linux does).

    A mapped checkpoint is resident too, but it is page cache, which the system takes back when it needs it.
    """
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
    return sum(found) if found else None


def warm_up() -> None:
    """Has jax start: a transfer and a small program, after which the process has what it takes without any model.

    On an H200 the first operation took resident memory from 0.18 to 4.26 GB (CUDA's context and libraries).
    """
    jax.block_until_ready(jax.jit(lambda x: x + 1)(jax.device_put(np.zeros(8, np.float32))))


def snapshot() -> Snapshot:
    """The memory as it is now."""
    gc.collect()
    found = jax.devices()[0].memory_stats() or {}
    return Snapshot(found.get("bytes_in_use"), found.get("peak_bytes_in_use"), available_bytes(), resident_bytes())


def compare(
    stats: dict, before: Snapshot, loaded: Snapshot, ran: Snapshot, tolerance: float, held: int = 0
) -> list[dict]:
    """Lines of the table: what, planned, measured, error (None if it was not measured), ok (None if not judged).

    stats: `MoE.stats()`. held: transfer bytes that XLA keeps since an earlier model of this process.
    """
    memory = stats["memory"]
    parts = ("dense_bytes", "kv_bytes", "state_bytes", "prefetch_bytes", "slot_bytes", "spare_bytes")
    kept = sum(memory[name] for name in parts)
    kept, total = kept + memory["staging_bytes"], kept + memory["staging_bytes"] + memory["workspace_bytes"]
    rows = []

    def line(what, planned, measured, most=False, judge=True):
        error = None if measured is None or not planned else measured / planned - 1
        judged = judge and error is not None and planned >= LEAST
        ok = (error <= 0 if most else abs(error) <= tolerance) if judged else None
        rows.append({"what": what, "planned": planned, "measured": measured, "error": error, "ok": ok})

    outside = memory["staging_bytes"]  # of jax's allocator
    line("device, loaded", kept, None if loaded.device is None else loaded.device - before.device + outside)
    # The allocator's peak is of the process: nothing new is known if an earlier model took more.
    known = ran.peak is not None and ran.peak > before.peak
    line("device, peak", total, ran.peak - before.device + outside if known else None, most=True)
    host = memory["pool_bytes"] + max(0, memory["transfer_bytes"] - held)
    figures = {
        REGISTERED: ("resident memory", None if loaded.resident is None else loaded.resident - before.resident),
        ALLOCATED: ("available memory", before.available - loaded.available),
    }
    way = stats["pinned_memory"]  # as it was had, which may not be as it was asked for
    what, measured = figures.pop(way)
    line(f"host, loaded, {what}", host, measured)
    for what, measured in figures.values():
        line(f"host, loaded, {what}", host, measured, judge=False)
    return rows


def measure(directory: Path, settings: OffloadConfig) -> tuple[dict, Snapshot, Snapshot, Snapshot]:
    """Loads and writes the longest sequence: the stats, and the memory before, with the model loaded, and then."""
    warm_up()
    before = snapshot()
    with MoE(directory, settings) as moe:
        loaded = snapshot()
        new = 8
        prompt = np.random.default_rng(0).integers(0, moe.model_config.vocab_size, settings.max_sequence_length - new)
        moe.generate(prompt.astype(np.int32), new, attention_mask=np.ones_like(prompt), eos_token_id=[])
        return moe.stats(), before, loaded, snapshot()


def main(
    directory: Directory,
    make: Make = None,
    layers: Layers = None,
    dry: Annotated[
        bool, Option("--dry", help="with --make: its tiny configuration, to see on any machine that it runs")
    ] = False,
    transports: Annotated[str, Option(help="of device, callback")] = "device,callback",
    cache_rate: Annotated[float, Option(help="share of the experts that have a slot")] = 0.5,
    length: Annotated[
        int | None, Option(min=16, help="longest sequence, in tokens; default: 8192, with --dry 128")
    ] = None,
    pinned_memory: Annotated[str, Option(help=f"how the pool is had: {' or '.join(WAYS)}")] = REGISTERED,
    tolerance: Annotated[float, Option(min=0, help="largest error that passes")] = 0.03,
    out: Annotated[Path | None, Option(help="write the figures as JSON")] = None,
):
    """Compares planned with measured memory."""
    check_make(make, layers, dry)
    if unknown := sorted(set(transports.split(",")) - {"device", "callback"}):
        raise typer.BadParameter(f"--transports: {', '.join(unknown)} must be device or callback")
    logging.basicConfig(level=logging.WARNING)
    try:
        if out is not None:
            check_writable("--out", out)
        length = length or (128 if dry else 8192)
        common = {"cache_rate": cache_rate, "max_sequence_length": length, "pinned_memory": pinned_memory}
        settings = [
            OffloadConfig(**common, transport=name, max_batch=1, device_memory_ratio=0.95)
            for name in transports.split(",")
        ]
        if make is not None:
            write_checkpoint(directory, make, layers, tiny=dry)
    except (MoEJaxError, ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    rows, held = [], 0
    with contextlib.ExitStack() as after:
        if make is not None:
            after.callback(shutil.rmtree, directory)
        for one in settings:
            try:
                found = measure(directory, one)
            except MoEJaxError as error:
                raise typer.BadParameter(str(error)) from error
            rows += [{"transport": one.transport} | row for row in compare(*found, tolerance, held)]
            held = max(held, found[0]["memory"]["transfer_bytes"])
    table = Table("transport", "what", "planned GB", "measured GB", "error", "ok", title=make or directory.name)
    for row in rows:
        measured, error = row["measured"], row["error"]
        table.add_row(
            row["transport"],
            row["what"],
            f"{row['planned'] / 1e9:.3f}",
            "-" if measured is None else f"{measured / 1e9:.3f}",
            "-" if error is None else f"{error:+.1%}",
            {True: "yes", False: "NO", None: "-"}[row["ok"]],
        )
    console.print(table)
    if out is not None:
        write_json(out, {"model": make or directory.name, "device": jax.devices()[0].device_kind, "rows": rows})
    raise typer.Exit(int(any(row["ok"] is False for row in rows)))


if __name__ == "__main__":
    typer.run(main)
