"""Decode and prefill speed of the offloaded engine at real layer shapes, beside the floors of link and memory.

    python experiments/bench_decode.py --shape qwen3-30b-a3b --layers 24

Fails (exit 1) if a figure would not mean what it says: a hit rate more than 5 points from the slot share, a layer that
saw less than 90 % of its experts, or a code path that is not the compiled kernels.
"""

import logging
import time
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import typer
from _outputs import shares_of, write_json
from flax import nnx
from random_model import SHAPES, random_parts, small
from rich.console import Console
from rich.table import Table
from typer import Option

from moe_jax import MoE, OffloadConfig
from moe_jax.floors import find_ceilings

console = Console(width=170)

# Column of the printed table -> (key of a row, format).
COLUMNS = {
    "transport": ("transport", "s"),
    "share": ("share", ".2f"),
    "hit": ("hit_rate", ".3f"),
    "ms/token": ("ms_per_token", ".3f"),
    "us/layer": ("us_per_layer", ".1f"),
    "no head": ("us_per_layer_without_head", ".1f"),
    "misses": ("misses_per_layer", ".2f"),
    "link ms": ("link_floor_ms", ".3f"),
    "HBM ms": ("hbm_floor_ms", ".3f"),
    "efficiency": ("efficiency", ".3f"),
    "GB/s": ("link_gb_per_second", ".1f"),
    "prefill ms": ("prefill_ms", ".1f"),
    "moved GB": ("prefill_gb", ".2f"),
    "x link": ("prefill_over_link", ".2f"),
    "kernel": ("kernel", "s"),
}


def shown(row: dict) -> list[str]:
    """The cells of a row; a figure that was not measured is a dash."""
    return ["-" if row.get(key) is None else format(row[key], style) for key, style in COLUMNS.values()]


def experts_seen(moe: MoE, steps: int) -> float:
    """Smallest share of its experts that any layer used in the last `steps` decode steps, from the policy's clocks."""
    transport, state = moe._engine.transport, moe._engine.cache
    seen = transport._policy_state if transport.name == "callback" else state.policy
    last = np.asarray(seen.get("access", seen)["last"])
    since = (last.max() // transport.spec.L + 1 - steps) * transport.spec.L
    return float((last >= since).mean(axis=1).min())


def head_seconds(moe: MoE) -> float:
    """Time of final norm, head and greedy choice of one token, to report figures without them."""
    engine = moe._engine

    def head(params, x):
        model = nnx.merge(engine._graphdef, params)

        def body(_, x):
            token = jnp.argmax(model.logits(model.norm(x)), axis=-1)
            return x + (token[:, None] % 2).astype(x.dtype)

        return jax.lax.fori_loop(0, 32, body, x)

    run = jax.jit(head)
    x = jnp.ones((1, moe.model_config.hidden_size), moe.dtype)
    run(engine.params, x).block_until_ready()
    started = time.perf_counter()
    run(engine.params, x).block_until_ready()
    return (time.perf_counter() - started) / 32


def median(runs: list[dict]) -> dict:
    """The run of median time: one run in many is slow when the host is busy."""
    return sorted(runs, key=lambda run: run["seconds"] / run["steps"])[len(runs) // 2]


def last(moe: MoE, phase: str) -> dict:
    """Figures of the last call."""
    return moe.stats()["last"][phase]


def measure(moe: MoE, prompt, long_prompt, tokens: int, repeats: int, floors: dict, head: float) -> dict:
    """One row: decode after `prompt`, and the prefill of `long_prompt` if it has tokens."""
    spec = moe._engine.transport.spec
    runs = []
    for _ in range(repeats):
        moe.generate(prompt, tokens + 1, eos_token_id=[])
        runs.append(last(moe, "decode"))
    run = median(runs)
    seconds = run["seconds"] / run["steps"]
    missed = run["bytes_per_token"] or 0.0
    link, memory = missed / floors["link"], floors["bytes"] / floors["memory"]
    row = {
        "hit_rate": run["hit_rate"],
        "ms_per_token": seconds * 1e3,
        "ms_per_token_of_runs": [r["seconds"] / r["steps"] * 1e3 for r in runs],
        "us_per_layer": seconds / spec.L * 1e6,
        "us_per_layer_without_head": (seconds - head) / spec.L * 1e6,
        "misses_per_layer": run["misses"] / run["steps"] / spec.L,
        "link_floor_ms": link * 1e3,
        "hbm_floor_ms": memory * 1e3,
        "efficiency": (memory + link) / seconds,
        "link_gb_per_second": missed / seconds / 1e9,
        "kernel": moe.stats()["kernel"][0],
        "experts_seen": experts_seen(moe, run["steps"]) if moe._engine.transport.plans else 1.0,
    }
    if len(long_prompt):
        runs = []
        for _ in range(repeats + 1):  # the first compiles and fills the slots
            moe.generate(long_prompt, 1, eos_token_id=[])
            runs.append(last(moe, "prefill"))
        run = median(runs[1:])
        moved = run["bytes_moved"]
        row |= {
            "prefill_ms": run["seconds"] * 1e3,
            "prefill_gb": moved / 1e9,
            "prefill_over_link": run["seconds"] * floors["link"] / moved if moved else None,
        }
    return row


def problems_of(row: dict) -> list[str]:
    """Why a row would mislead."""
    found = []
    if abs(row["hit_rate"] - row["share"]) > 0.05:
        found.append(f"hit rate {row['hit_rate']:.3f} is over 5 points from the slot share")
    if row["experts_seen"] < 0.9:
        found.append(f"a layer saw only {row['experts_seen']:.0%} of its experts")
    if "pallas-triton" not in row["kernel"]:
        found.append(f"ran {row['kernel']}, not the compiled kernels")
    return [f"{row['transport']} {row['share']}: {problem}" for problem in found]


def main(
    shape: Annotated[str, Option(help=f"layer shapes: {', '.join(SHAPES)}")] = "qwen3-30b-a3b",
    layers: Annotated[int | None, Option(help="decoder layers (default: all of the model)")] = None,
    context: Annotated[int, Option(help="prompt tokens")] = 512,
    tokens: Annotated[int, Option(help="decode tokens timed")] = 64,
    warmup: Annotated[int, Option(help="decode tokens before")] = 32,
    shares: Annotated[str, Option(help="slot shares")] = "1.0,0.5,0.25",
    transports: Annotated[str, Option(help="of device, callback, resident; the first must not be resident")] = (
        "device,callback"
    ),
    repeats: Annotated[int, Option(help="timed runs of each setting; the median is reported")] = 3,
    prefill: Annotated[int, Option(help="tokens of the timed prefill; 0: none")] = 8192,
    policy: Annotated[str, Option(help="cache policy with access clocks: lru, lfu or lfru")] = "lru",
    decode_chunk: Annotated[int, Option(help="decode steps a jit call")] = 32,
    dry: Annotated[bool, Option(help="shrunken model on any platform, no checks: does it run?")] = False,
    verify: Annotated[bool, Option(help="at the smallest share, compare every occupied slot byte for byte")] = False,
    link_gbps: Annotated[float | None, Option(help="link ceiling; default: measured")] = None,
    hbm_gbps: Annotated[float | None, Option(help="memory ceiling; default: measured")] = None,
    out: Annotated[Path | None, Option(help="write the figures as JSON")] = None,
    hlo: Annotated[Path | None, Option(help="write the optimised HLO of the programs to this directory")] = None,
    profile: Annotated[Path | None, Option(help="write jax profiles, apart from the timed runs, here")] = None,
):
    """Runs every transport at every slot share over one pool."""
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("moe_jax").setLevel(logging.INFO)
    ceilings = find_ceilings(link_gbps, hbm_gbps)
    device = jax.devices()[0].device_kind
    console.print(
        f"{device}, jax {jax.__version__}: link {ceilings.link_gbps:.1f}, memory {ceilings.memory_gbps:.0f} GB/s"
    )
    parts = random_parts(shape, layers, **(small(shape) if dry else {}))
    spec, cfg = parts.spec, parts.cfg
    dense = sum(leaf.nbytes for leaf in jax.tree.leaves(parts.params)) - parts.params["embed"]["weight"].nbytes
    console.print(f"{shape}: {spec.L} x {spec.E} experts of {spec.row_bytes / 1e6:.2f} MB, dense {dense / 1e9:.2f} GB")

    slot_shares = shares_of(shares, "--shares", most=1.0)
    cases = [(t, s) for t in transports.split(",") for s in (slot_shares if t != "resident" else [1.0])]
    config = OffloadConfig(
        transport=cases[0][0],
        cache_rate=cases[0][1],
        policy=policy,
        decode_chunk=decode_chunk,
        max_batch=1,
        max_sequence_length=min(max(prefill, context + warmup + tokens) + 64, cfg.max_position_embeddings),
        prefill_chunk=max(prefill, 512),
        progress=False,
        device_memory_ratio=0.95,
    )
    rng = np.random.default_rng(0)
    prompt, long_prompt = (rng.integers(0, cfg.vocab_size, n).astype(np.int32) for n in (context, prefill))
    kv = cfg.kv_bytes_per_token(parts.dtype) * (context + tokens // 2)
    floors = {
        "link": ceilings.link_gbps * 1e9,
        "memory": ceilings.memory_gbps * 1e9,
        "bytes": dense + kv + spec.L * cfg.num_experts_per_tok * spec.row_bytes,
    }
    rows, problems = [], []
    with MoE.from_parts(parts, config) as moe:
        console.print(f"load {moe.load_seconds:.1f} s")
        head = head_seconds(moe)
        for transport, share in cases:
            size = {} if transport == "resident" else {"cache_rate": share}
            moe.set_cache(transport=transport, **size)
            moe.generate(prompt, warmup, eos_token_id=[])
            row = {"transport": transport, "share": share}
            row |= measure(moe, prompt, long_prompt, tokens, repeats, floors, head)
            rows.append(row)
            console.print("  ".join(shown(row)), highlight=False)
            if not dry and transport != "resident":
                problems += problems_of(row)
            if verify and share == min(slot_shares) and transport != "resident":
                moe.verify_slots()
                console.print(f"{transport} {share}: every occupied slot holds its expert's bytes")
            if profile:
                for name, ids, new in (("decode", prompt, tokens + 1), ("prefill", long_prompt, 1)):
                    if len(ids):
                        with jax.profiler.trace(str(profile / f"{transport}-{share}-{name}")):
                            moe.generate(ids, new, eos_token_id=[])
        if hlo:
            hlo.mkdir(parents=True, exist_ok=True)
            for index, (name, text) in enumerate(moe._engine.programs.texts()):
                (hlo / f"{index}-{name}.txt").write_text(text)
        compiled = moe.stats()["total"]["compile_seconds"]
    table = Table(*COLUMNS, title=f"{shape}, {spec.L} layers, batch 1, context {context}, policy {policy}")
    for row in rows:
        table.add_row(*shown(row))
    console.print(table)
    console.print(f"head and greedy choice: {head * 1e6:.1f} us a token; compile: {compiled:.0f} s")
    if out:
        figures = {"device": device, "link_gbps": ceilings.link_gbps, "memory_gbps": ceilings.memory_gbps, "rows": rows}
        write_json(out, figures)
    for problem in problems:
        console.print(f"[red]not valid:[/red] {problem}")
    raise typer.Exit(1 if problems else 0)


if __name__ == "__main__":
    typer.run(main)
