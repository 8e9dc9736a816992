"""Loads a checkpoint, decodes it with a part of its experts in slots, and compares tokens with all of them resident.

    python experiments/bench_families.py DIRECTORY --shares 0.5
    python experiments/bench_families.py DIRECTORY --make gpt-oss-20b --layers 24 --shares 1.0,0.5,0.25

With `--make` a checkpoint of that model's shapes is written into DIRECTORY first (random_checkpoint.py) and removed
after. Exit 1 if a token differs.
"""

import json
import logging
import shutil
import time
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import typer
from _outputs import check_writable, shares_of, write_json
from _report import figures
from bench_decode import head_seconds
from random_checkpoint import Directory, Layers, Make, check_make, write_checkpoint
from rich.console import Console
from rich.table import Table
from typer import Option

from host_offload.pinned import REGISTERED, WAYS
from moe_jax import MoE, OffloadConfig
from moe_jax.config import DENSE_WEIGHTS
from moe_jax.errors import MoEJaxError
from moe_jax.floors import find_ceilings

console = Console(width=170)

# Column of the printed table -> (key of a row, format).
COLUMNS = {
    "transport": ("transport", "s"),
    "share": ("share", ".2f"),
    "hit": ("hit_rate", ".3f"),
    "ms/token": ("ms_per_token", ".3f"),
    "tok/s": ("decode_tokens_per_second", ".1f"),
    "us/layer": ("us_per_layer", ".1f"),
    "no head": ("us_per_layer_without_head", ".1f"),
    "MB/token": ("megabytes_per_token", ".2f"),
    "link ms": ("link_floor_ms", ".3f"),
    "HBM ms": ("hbm_floor_ms", ".3f"),
    "efficiency": ("efficiency", ".3f"),
    "TTFT ms": ("ttft_ms", ".1f"),
    "compile s": ("compile_seconds", ".1f"),
    "distinct": ("distinct_tokens", "d"),
    "equal": ("equal", "s"),
    "kernel": ("kernel", "s"),
}


def source_of(directory: Path, fresh: bool) -> str:
    """Where reading begins: "memory (tmpfs)", "page cache" for files just written, or "disk or page cache"."""
    where = directory.resolve()
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    above = [(point, kind) for point, kind in mounts if where.is_relative_to(point)]
    kind = max(above, key=lambda mount: len(mount[0]))[1]
    if kind in ("tmpfs", "ramfs"):
        return f"memory ({kind})"
    return "page cache" if fresh else "disk or page cache"


def loading(moe: MoE, directory: Path, source: str) -> dict:
    """How long loading took, with the bytes of all files of weights over it, and the pinned pool apart."""
    stats = moe.stats()
    nbytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    pool, seconds = stats["pool_seconds"], stats["load_seconds"]
    return {
        "source": source,
        "checkpoint_gb": nbytes / 1e9,
        "load_seconds": seconds,
        "load_gb_per_second": nbytes / seconds / 1e9,
        "pool_gb": stats["memory"]["pool_bytes"] / 1e9,
        "pinned_memory": stats["pinned_memory"],
        "pool_allocate_seconds": pool["allocate"],
        "pool_fill_seconds": pool["fill"],
        # A disk tier starts empty.
        "pool_fill_gb_per_second": 0.0 if stats["disk"] else stats["memory"]["pool_bytes"] / pool["fill"] / 1e9,
        "dense_gb": stats["memory"]["dense_bytes"] / 1e9,
        "dense_weights": stats["dense_weights"],
        "experts": stats["experts"],
    }


def decode(moe: MoE, prompt, tokens: int, repeats: int, ceilings, head: float) -> tuple[dict, np.ndarray]:
    """(figures of the median run, the new ids), after a call that compiles and fills the slots."""

    def generate():
        # Every id counts as text, the padding token as well.
        ids = moe.generate(prompt, tokens + 1, attention_mask=np.ones_like(prompt), eos_token_id=[])
        return ids[len(prompt) :]

    generate()
    compiled, runs = moe.stats()["last"]["compile_seconds"], []
    for _ in range(repeats):
        ids = generate()
        runs.append(figures(moe, [len(prompt)], [len(ids)], ceilings))
    row = sorted(runs, key=lambda run: run["ms_per_token"])[len(runs) // 2]
    layers, transport = moe.stats()["experts"]["layers"], moe.stats()["transport"]["name"]
    row |= {
        "transport": transport,
        "hit_rate": row["hit_rate"] if transport != "resident" else None,
        "us_per_layer": row["ms_per_token"] * 1e3 / layers,
        "us_per_layer_without_head": (row["ms_per_token"] * 1e3 - head * 1e6) / layers,
        "megabytes_per_token": row["bytes_per_token"] / 1e6,
        "ms_per_token_of_runs": [run["ms_per_token"] for run in runs],
        "ttft_ms": row["ttft_seconds"] * 1e3,
        "compile_seconds": compiled,
        "distinct_tokens": len(set(ids.tolist())),
        "kernel": moe.stats()["kernel"][0],
    }
    return row, ids


def shown(row: dict) -> list[str]:
    """The cells of a row; a figure that does not exist is a dash."""
    return ["-" if row.get(key) is None else format(row[key], style) for key, style in COLUMNS.values()]


def bench(directory: Path, transports, shares, tokens, context, repeats, decode_chunk, held, ceilings, source) -> dict:
    """Everything measured of one checkpoint: `load`, and `rows` whose "equal" says whether the tokens are right.

    held: configuration of how pool and dense weights are held.
    """
    settings = OffloadConfig(
        **held,
        transport=transports[0],
        cache_rate=max(shares),
        decode_chunk=decode_chunk,
        max_batch=1,
        max_sequence_length=context + tokens + 1,
        device_memory_ratio=0.95,
    )
    with MoE(directory, settings) as moe:
        load = loading(moe, directory, source)
        console.print(
            f"load {load['load_seconds']:.1f} s, {load['checkpoint_gb']:.2f} GB from {source}: "
            f"{load['load_gb_per_second']:.2f} GB/s; of it the pool {load['pool_gb']:.2f} GB: allocation "
            f"{load['pool_allocate_seconds']:.1f} s, filling {load['pool_fill_seconds']:.1f} s "
            f"({load['pool_fill_gb_per_second']:.2f} GB/s)"
        )
        experts = load["experts"]
        console.print(
            f"{experts['layers']} x {experts['per_layer']} experts of {experts['bytes_each'] / 1e6:.2f} MB "
            f"({experts['format']}), dense {load['dense_gb']:.2f} GB in {moe.dtype} {load['dense_weights']}"
        )
        head = head_seconds(moe)
        prompt = np.random.default_rng(0).integers(0, moe.model_config.vocab_size, context).astype(np.int32)
        rows, reference = [], None
        # The largest cache first: its banks hold the smaller ones.
        sized = [(transport, share) for transport in transports for share in sorted(shares, reverse=True)]
        for transport, share in [("resident", None), *sized]:
            moe.set_cache(transport=transport, **({} if share is None else {"cache_rate": share}))
            row, ids = decode(moe, prompt, tokens, repeats, ceilings, head)
            reference = ids if reference is None else reference
            rows.append(row | {"share": share, "equal": "yes" if np.array_equal(ids, reference) else "NO"})
            console.print("  ".join(shown(rows[-1])), highlight=False)
        return {"load": load, "head_us": head * 1e6, "rows": rows}


def main(
    directory: Directory,
    make: Make = None,
    layers: Layers = None,
    dry: Annotated[
        bool, Option(help="with --make: its tiny configuration, to see on any machine that it runs")
    ] = False,
    shares: Annotated[str, Option(help="slot shares")] = "0.5",
    transports: Annotated[str, Option(help="of device, callback; resident always comes first")] = "device",
    tokens: Annotated[int, Option(min=1, help="decode tokens timed")] = 64,
    context: Annotated[int | None, Option(min=1, help="prompt tokens; default: 64, with --dry 16")] = None,
    repeats: Annotated[int, Option(min=1, help="timed runs of each setting; the median is reported")] = 3,
    decode_chunk: Annotated[int, Option(min=1, help="decode steps a jit call")] = 32,
    pinned_memory: Annotated[str, Option(help=f"how the pool is had: {' or '.join(WAYS)}")] = REGISTERED,
    dense_weights: Annotated[str, Option(help=f"of a quantised checkpoint: {' or '.join(DENSE_WEIGHTS)}")] = "decoded",
    link_gbps: Annotated[float | None, Option(help="link ceiling; default: measured")] = None,
    hbm_gbps: Annotated[float | None, Option(help="memory ceiling; default: measured")] = None,
    out: Annotated[Path | None, Option(help="write the figures as JSON")] = None,
):
    """Measures loading and decoding of one checkpoint."""
    check_make(make, layers, dry)
    if context is None:
        context = 16 if dry else 64  # tiny configurations have 128 positions
    slot_shares = shares_of(shares, "--shares", most=1.0)
    held = {"pinned_memory": pinned_memory, "dense_weights": dense_weights}
    try:
        OffloadConfig(**held)
        if out:
            check_writable("--out", out)
    except (MoEJaxError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    wanted = transports.split(",")
    if unknown := sorted(set(wanted) - {"device", "callback"}):
        raise typer.BadParameter(f"--transports: {', '.join(unknown)} must be device or callback")
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("moe_jax").setLevel(logging.INFO)
    if make is not None:
        started = time.perf_counter()
        try:
            written = write_checkpoint(directory, make, layers, tiny=dry)
        except (ValueError, OSError) as error:
            raise typer.BadParameter(str(error)) from error
        seconds = time.perf_counter() - started
        console.print(f"{make}: {written / 1e9:.2f} GB written in {seconds:.1f} s, {written / seconds / 1e9:.2f} GB/s")
    try:
        ceilings = find_ceilings(link_gbps, hbm_gbps)
        device = jax.devices()[0].device_kind
        console.print(
            f"{device}, jax {jax.__version__}: link {ceilings.link_gbps:.1f}, memory {ceilings.memory_gbps:.0f} GB/s"
        )
        found = bench(
            directory,
            wanted,
            slot_shares,
            tokens,
            context,
            repeats,
            decode_chunk,
            held,
            ceilings,
            source_of(directory, make is not None),
        )
    except MoEJaxError as error:
        raise typer.BadParameter(str(error)) from error
    finally:
        if make is not None:
            shutil.rmtree(directory)
    name = json.loads((directory / "config.json").read_text())["model_type"] if make is None else make
    table = Table(*COLUMNS, title=f"{name}, batch 1, context {context}, {tokens} tokens, policy lru")
    for row in found["rows"]:
        table.add_row(*shown(row))
    console.print(table)
    console.print(f"head and greedy choice: {found['head_us']:.1f} us a token")
    if out:
        write_json(out, {"model": name, "layers": layers, "device": device, **found})
    different = [f"{row['transport']} {row['share']}" for row in found["rows"] if row["equal"] != "yes"]
    if different:
        console.print(f"[red]tokens differ from resident:[/red] {', '.join(different)}")
    raise typer.Exit(1 if different else 0)


if __name__ == "__main__":
    typer.run(main)
