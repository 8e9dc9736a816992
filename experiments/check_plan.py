"""Is what was planned what a loaded model takes? Planned bytes beside measured ones, of the device and of the host.

    python experiments/check_plan.py DIRECTORY --cache-rate 0.5
    python experiments/check_plan.py DIRECTORY --make qwen3-30b-a3b --layers 24 --transports device,callback

The device's are those of jax's allocator (and the staging memory, which is CUDA's), after the load, and at the peak of
a call that writes the longest sequence; the host's are what the system has less available after the load, for pinned
memory does not count as the process's in every system. With `--make` a checkpoint of that model's shapes is written
into DIRECTORY first (random_checkpoint.py) and removed after. Exit 1 if a figure is further from its plan than
--tolerance, or the peak is above the plan. What is planned with less than `LEAST` bytes is shown and not judged: the
process itself takes more.
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

from host_offload.pinned import REGISTERED, WAYS, available_bytes
from moe_jax import MoE, OffloadConfig
from moe_jax.errors import MoEJaxError

console = Console(width=130)


LEAST = 1 << 28


@dataclass(frozen=True)
class Snapshot:
    """Bytes in use: of the device by jax's allocator, and the most so far (None on a CPU); available of the host."""

    device: int | None
    peak: int | None
    available: float


def snapshot() -> Snapshot:
    """The memory as it is now."""
    gc.collect()
    found = jax.devices()[0].memory_stats() or {}
    return Snapshot(found.get("bytes_in_use"), found.get("peak_bytes_in_use"), available_bytes())


def compare(memory: dict, before: Snapshot, loaded: Snapshot, ran: Snapshot, tolerance: float) -> list[dict]:
    """Lines of the table: what, planned, measured, error (None if it was not measured), ok (None if not judged).

    memory: `MoE.stats()["memory"]`.
    """
    kept = sum(memory[name] for name in ("dense_bytes", "kv_bytes", "state_bytes", "slot_bytes", "spare_bytes"))
    kept, total = kept + memory["staging_bytes"], kept + memory["staging_bytes"] + memory["workspace_bytes"]
    rows = []

    def line(what, planned, measured, most=False):
        error = None if measured is None or not planned else measured / planned - 1
        judged = error is not None and planned >= LEAST
        ok = (error <= 0 if most else abs(error) <= tolerance) if judged else None
        rows.append({"what": what, "planned": planned, "measured": measured, "error": error, "ok": ok})

    outside = memory["staging_bytes"]  # of jax's allocator
    line("device, loaded", kept, None if loaded.device is None else loaded.device - before.device + outside)
    # The allocator's peak is of the process: nothing new is known if an earlier model took more.
    known = ran.peak is not None and ran.peak > before.peak
    line("device, peak", total, ran.peak - before.device + outside if known else None, most=True)
    line("host, loaded", memory["pool_bytes"], before.available - loaded.available)
    return rows


def measure(directory: Path, settings: OffloadConfig, tolerance: float) -> list[dict]:
    """Loads, writes the longest sequence, and compares."""
    before = snapshot()
    with MoE(directory, settings) as moe:
        loaded = snapshot()
        new = 8
        prompt = np.random.default_rng(0).integers(0, moe.model_config.vocab_size, settings.max_sequence_length - new)
        moe.generate(prompt.astype(np.int32), new, attention_mask=np.ones_like(prompt), eos_token_id=[])
        return compare(moe.stats()["memory"], before, loaded, snapshot(), tolerance)


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
    rows = []
    with contextlib.ExitStack() as after:
        if make is not None:
            after.callback(shutil.rmtree, directory)
        for one in settings:
            try:
                found = measure(directory, one, tolerance)
            except MoEJaxError as error:
                raise typer.BadParameter(str(error)) from error
            rows += [{"transport": one.transport} | row for row in found]
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
