"""Measures what decoding costs on this machine, for `host_offload.cost_model`, and how well it predicts.

    python experiments/calibrate.py --shape qwen3-30b-a3b --layers 24 --out cost.json
    python experiments/calibrate.py --model DIRECTORY --check lfu:0.4,lfru:0.25 --out cost.json

Copies of several sizes give the link curve; the running engine, at several slot shares, the all-hit time and the times
of a miss and of an event with any in each transport; a loop over the host's part of an event the time of each policy.
`--check` then runs settings that were not used, replays their own trace in the simulator, and prints predicted beside
measured ms/token. `replay_traces.py` does the same with the routing of a trace.
"""

import importlib.metadata
import logging
import time

import jax
import numpy as np
import typer
from _outputs import shares_of
from random_model import SHAPES, random_parts, small
from rich.console import Console
from rich.progress import track
from rich.table import Table

from host_offload.cost_model import CostModel, DecodeCost, LinkCurve, predict_ms_per_token
from host_offload.policy import get_policy, list_policies
from host_offload.prefetch_sim import CacheRun
from host_offload.simulate import simulate, slot_capacities
from moe_jax import MoE, OffloadConfig
from moe_jax.floors import measure_link, measure_memory

app = typer.Typer(add_completion=False)
console = Console(width=150)

COPY_BYTES = {"gpu": [1 << n for n in range(16, 29, 2)], "cpu": [1 << n for n in range(16, 25, 2)]}
# The resident mode has no misses and no cache: nothing to calibrate.
TRANSPORTS = ("device", "callback")


def measure_copies(sizes):
    """Seconds of one copy of each of `sizes` bytes, host to device."""
    return [nbytes / (measure_link(nbytes) * 1e9) for nbytes in sizes]


def measure_decode(moe, policy, prompt, tokens, repeats):
    """Decodes `tokens` under the cache as it is set: a dict of figures a step, with the simulator beside the engine.

    A call that records the routing fills the cache, then `repeats` are timed; being greedy all are alike, so the same
    trace, replayed as often, tells what each of them met. seconds: of the median call. misses, miss_events: a step,
    over the timed calls. hit_rate. hits_equal: engine and simulator agree in every call. result: the simulator's
    `Result` of the last call.
    """
    moe.generate(prompt, tokens + 1, eos_token_id=[], trace=True)
    trace = moe.trace()
    settings = {"slots": moe.stats()["slots"]["total"], "reset": "never", "backend": "numpy"}
    result = simulate(trace, policy, row_bytes=moe.stats()["experts"]["bytes_each"], **settings)
    runs, equal, miss_events = [], True, 0
    for _ in range(repeats):
        moe.generate(prompt, tokens + 1, eos_token_id=[])
        runs.append(moe.stats()["last"]["decode"])
        result = simulate(trace, policy, warm=result, row_bytes=result.row_bytes, **settings)
        counts = result.in_phase("decode")
        equal &= counts["hits"] == runs[-1]["hits"]
        miss_events += counts["miss_events"]
    steps = sum(run["steps"] for run in runs)
    seconds = sorted(run["seconds"] / run["steps"] for run in runs)
    return {
        "seconds": seconds[len(seconds) // 2],
        "misses": sum(run["misses"] for run in runs) / steps,
        "miss_events": miss_events / steps,
        "hit_rate": runs[-1]["hit_rate"],
        "hits_equal": equal,
        "result": result,
    }


def measure_policies(names, L, E, K, share, events=400, seed=0):
    """{name: host seconds an event}: `observe` and the plan under NumPy, for random routing at a slot share."""
    rng = np.random.default_rng(seed)
    slots = max(1, round(share * E))
    seconds = {}
    for name in names:
        capacities = slot_capacities(L, E, slots_per_layer=slots)
        cache = CacheRun(get_policy(name), L, E, capacities, "layer", "atomic-bypass", seed)
        needs = np.zeros((2 * events, E), bool)
        for need in needs:
            need[rng.choice(E, K, replace=False)] = True
        scores = needs.astype(np.float32) / K
        for event, need in enumerate(needs):
            if event == events:  # the first half fills the cache
                started = time.perf_counter()
            cache.serve(event % L, need, scores[event], np.int32(event))
        seconds[name] = (time.perf_counter() - started) / events
    return seconds


def check(moe, cost, transport, policy, share, prompt, tokens, repeats):
    """One setting: predicted and measured ms a step, and whether engine and simulator counted the same hits."""
    moe.set_cache(policy, transport=transport, cache_rate=share)
    run = measure_decode(moe, policy, prompt, tokens, repeats)
    return {
        "transport": transport,
        "policy": policy,
        "share": share,
        "hit_rate": run["hit_rate"],
        "hits_equal": run["hits_equal"],
        "measured_ms": run["seconds"] * 1e3,
        "predicted_ms": predict_ms_per_token(run["result"], cost, transport=transport),
    }


def fit_levels(levels, **geometry):
    """The `DecodeCost` of measured levels, dicts with seconds, misses and miss_events a step."""
    columns = ([level[name] for level in levels] for name in ("misses", "seconds", "miss_events"))
    return DecodeCost.fit(*columns, **geometry)


def calibrate(moe, *, prompt, tokens, shares, transports, policies, repeats, progress=True):
    """The `CostModel` of this machine for the loaded model; `shares` must hold 1 and a smaller one."""
    spec, cfg = moe._engine.transport.spec, moe.model_config
    sizes = COPY_BYTES[jax.devices()[0].platform]
    copies = measure_copies(sizes)
    points, decode = {}, {}
    steps = [(transport, share) for transport in transports for share in shares]
    for transport, share in track(steps, "calibrating", console=console, disable=not progress):
        moe.set_cache("lru", transport=transport, cache_rate=share)
        points.setdefault(transport, []).append(measure_decode(moe, "lru", prompt, tokens, repeats))
    geometry = {"L": spec.L, "K": cfg.num_experts_per_tok, "row_bytes": spec.row_bytes, "policy": "lru"}
    for transport, levels in points.items():
        decode[transport] = fit_levels(levels, **geometry)
    return CostModel(
        device=jax.devices()[0].device_kind,
        link=LinkCurve.fit(sizes, copies),
        memory_bytes_per_second=measure_memory() * 1e9,
        decode=decode,
        policy_seconds=measure_policies(policies, spec.L, spec.E, cfg.num_experts_per_tok, min(shares)),
        notes={
            "jax": importlib.metadata.version("jax"),
            "model": moe.name,
            "context": len(prompt),
            "tokens": tokens,
            "copies": [list(pair) for pair in zip(sizes, copies, strict=True)],
            "decode": {
                name: [{key: level[key] for key in ("misses", "miss_events", "seconds")} for level in levels]
                for name, levels in points.items()
            },
        },
    )


def show(cost):
    """Prints a cost model."""
    link = cost.link
    console.print(
        f"{cost.device}: link {link.bytes_per_second / 1e9:.2f} GB/s + {link.copy_seconds * 1e6:.1f} us a copy, "
        f"memory read {cost.memory_bytes_per_second / 1e9:.0f} GB/s"
    )
    table = Table("transport", "all hit ms", "us/layer", "miss us", "miss GB/s", "event us", "largest error of the fit")
    for name, one in cost.decode.items():
        rate = one.row_bytes / one.miss_seconds / 1e9
        times = one.all_hit_seconds * 1e3, one.all_hit_seconds / one.L * 1e6, one.miss_seconds * 1e6, rate
        times += (one.event_seconds * 1e6,)
        table.add_row(name, *(f"{value:.2f}" for value in times), f"{one.fit_error:.1%}")
    console.print(table)
    console.print("host time an event: " + ", ".join(f"{n} {s * 1e6:.0f} us" for n, s in cost.policy_seconds.items()))


@app.command()
def main(
    out: str = typer.Option("cost.json", help="the cost model's JSON file"),
    model: str = typer.Option(None, help="checkpoint directory or hub id; default: random weights of --shape"),
    shape: str = typer.Option("qwen3-30b-a3b", help=f"layer shapes: {', '.join(SHAPES)}"),
    layers: int = typer.Option(None, help="decoder layers of the random model (default: all)"),
    dry: bool = typer.Option(False, help="shrink the random model: does it run?"),
    context: int = typer.Option(64, help="prompt tokens"),
    tokens: int = typer.Option(64, help="decode tokens of a timed call"),
    shares: str = typer.Option("1.0,0.6,0.4,0.2", help="slot shares to measure; the first must be 1"),
    transports: str = typer.Option(",".join(TRANSPORTS), help="transports"),
    policies: str = typer.Option("all", help="policies whose host time is measured, or all"),
    repeats: int = typer.Option(5, help="timed calls of each setting; the median counts"),
    checks: str = typer.Option("", "--check", help="POLICY:SHARE,... to predict and measure"),
):
    """Calibrates, writes the file, and checks."""
    logging.basicConfig(level=logging.WARNING)
    levels = shares_of(shares, "--shares", most=1.0)
    if levels[0] != 1 or len(levels) < 2:
        raise typer.BadParameter(f"--shares {shares}: must begin with 1.0, all hits, and hold at least one level more")
    names = list_policies() if policies == "all" else policies.split(",")
    for transport in transports.split(","):
        if transport not in TRANSPORTS:
            raise typer.BadParameter(f"--transports {transport}: not one of {', '.join(TRANSPORTS)}")
    settings = OffloadConfig(
        transport=transports.split(",")[0],
        policy="lru",
        cache_rate=1.0,
        max_batch=1,
        progress=False,
        device_memory_ratio=0.95,
        max_sequence_length=context + tokens + 64,
        prefill_chunk=max(context, 64),
    )
    if model is None:
        moe = MoE.from_parts(random_parts(shape, layers, **(small(shape) if dry else {})), settings, name=shape)
    else:
        moe = MoE(model, settings)
    with moe:
        prompt = np.random.default_rng(0).integers(0, moe.model_config.vocab_size, context).astype(np.int32)
        cost = calibrate(
            moe,
            prompt=prompt,
            tokens=tokens,
            shares=levels,
            transports=transports.split(","),
            policies=names,
            repeats=repeats,
        )
        cost.save(out)
        show(cost)
        rows = []
        for item in checks.split(",") if checks else ():
            policy, _, share = item.partition(":")
            for transport in transports.split(","):
                rows.append(check(moe, cost, transport, policy, float(share), prompt, tokens, repeats))
    if rows:
        table = Table("transport", "policy", "share", "hit rate", "hits equal", "measured ms", "predicted ms", "error")
        for row in rows:
            error = row["predicted_ms"] / row["measured_ms"] - 1
            numbers = [f"{row[name]:.3f}" for name in ("measured_ms", "predicted_ms")]
            equal = "yes" if row["hits_equal"] else "NO"
            share, rate = f"{row['share']:.2f}", f"{row['hit_rate']:.3f}"
            table.add_row(row["transport"], row["policy"], share, rate, equal, *numbers, f"{error:+.1%}")
        console.print(table)
    console.print(f"wrote {out}")
    raise typer.Exit(0 if all(row["hits_equal"] for row in rows) else 1)


if __name__ == "__main__":
    app()
