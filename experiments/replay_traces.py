"""Predicted beside measured ms/token under the routing of a real trace, and engine hits beside the simulator's.

    python experiments/replay_traces.py routes.npz --shape qwen3-30b-a3b --out replay.json

A model with random weights, the layer shapes of --shape and the trace's layers, experts and experts a token replays
requests of the trace (`MoE.replay`): the router's choice is the trace's. The cost model is fitted on LRU at
--calibrate shares and on a run without misses; the policies at --shares, none of which it has seen, are then predicted
from the simulator's counts alone. `static` is fitted on other requests than those replayed. Every run starts with an
empty cache, in the engine and in the simulator. Fails (exit 1) if hits differ anywhere, or, unless --dry, if the times
allow no cost model or a prediction is off by more than --limit.
"""

import dataclasses
import importlib.metadata
import itertools
import logging
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import typer
from _outputs import shares_of, write_json
from calibrate import COPY_BYTES, fit_levels, measure_copies, measure_policies, show
from random_model import SHAPES, random_parts, small
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from host_offload.cost_model import CostModel, CostModelError, LinkCurve, predict_ms_per_token
from host_offload.policy import PolicySet, get_policy, list_policies
from host_offload.simulate import Result, simulate
from host_offload.trace import Trace, TraceError, load_trace
from moe_jax import MoE, OffloadConfig
from moe_jax.floors import measure_memory
from moe_jax.replay import with_prompts

app = typer.Typer(add_completion=False)
console = Console(width=150)
started = time.perf_counter()

COUNTED = ("hits", "misses", "bypasses", "evictions")
TRANSPORTS = ("callback", "device")


@dataclasses.dataclass
class Run:
    """A setting, measured and simulated. seconds: a decode step, of each repeat. equal: every counter of every layer
    and phase is the simulator's. result: the simulator's `Result`."""

    transport: str
    policy: str
    share: float
    seconds: list[float]
    equal: bool
    result: Result

    @property
    def median(self) -> float:
        """Seconds a decode step of the median repeat."""
        return statistics.median(self.seconds)

    @property
    def figures(self) -> dict:
        """What was measured and counted, a decode step: plain numbers for a file, and what the cost model is fitted
        on."""
        counts = self.result.in_phase("decode")
        return {
            "transport": self.transport,
            "policy": self.policy,
            "share": self.share,
            "hit_rate": counts["hit_rate"],
            **{name: counts[name] / counts["steps"] for name in ("misses", "miss_events")},
            "seconds": self.median,
            "seconds_of_runs": self.seconds,
            "hits_equal": self.equal,
        }


def said(text: str):
    """Prints a line of progress with the seconds since the start."""
    console.print(f"[{time.perf_counter() - started:6.1f} s] {text}", highlight=False, markup=False)


def choose(trace: Trace, rows: int) -> tuple[Trace, Trace]:
    """(what is replayed, what `static` is fitted on): whole requests at odd places, in their order, as long as they fit
    into `rows` rows in all, and those at even places."""
    numbers, counts = np.unique(trace.request, return_counts=True)
    if len(numbers) < 2:
        raise typer.BadParameter("the trace has a single request, and 'static' is fitted on others than are replayed")
    chosen, total = [], 0
    for number, count in zip(numbers[1::2], counts[1::2], strict=True):
        if total + count <= rows:
            chosen.append(number)
            total += count
    if not chosen:
        raise typer.BadParameter(
            f"--rows {rows}: no request at an odd place is that short; {counts[1::2].min()} would do"
        )
    return with_prompts(trace.select(chosen)), trace.select(numbers[::2])


def replay(moe: MoE, trace: Trace, transport, policy, share, repeats, warm=False) -> Run:
    """Replays `trace` `repeats` times, each from an empty cache, or with `warm` after a replay that does not count."""
    seconds, counters = [], []
    for _ in range(repeats):
        moe.set_cache(policy.name, transport=transport, cache_rate=share)
        for _ in range(1 + warm):
            moe.replay(trace)
        last = moe.stats()["last"]
        seconds.append(last["decode"]["seconds"] / last["decode"]["steps"])
        counters.append([[last[phase]["per_layer"][name] for name in COUNTED] for phase in ("prefill", "decode")])
    stats = moe.stats()
    result = simulate(
        trace,
        policy,
        slots=stats["slots"]["total"],
        reset="never",
        warm="warm" if warm else None,
        row_bytes=stats["experts"]["bytes_each"],
        backend="numpy",
    )
    wanted = result.counters[..., : len(COUNTED)].swapaxes(1, 2)
    equal = all(np.array_equal(ours, wanted) for ours in counters)
    return Run(transport, policy.name, share, seconds, equal, result)


def measure(moe: MoE, trace: Trace, transport, settings, repeats) -> Iterator[Run]:
    """The `Run` of each of `settings`, (policy, share), in one transport; at share 1 without misses. One compiled
    program serves all of them."""
    together = PolicySet(dict.fromkeys(policy for policy, _ in settings))
    moe.set_cache(together, transport=transport, cache_rate=1.0)
    moe.replay(trace)
    said(f"{transport}: compiled in {moe.stats()['last']['compile_seconds']:.1f} s")
    for policy, share in settings:
        run = replay(moe, trace, transport, policy, share, repeats, warm=share == 1.0)
        said(f"{transport} {run.policy} {share}: {run.median * 1e3:.3f} ms, hits equal: {run.equal}")
        yield run


def fit(moe: MoE, levels: list[Run], policies) -> CostModel:
    """The cost model of `levels`, runs of LRU. Raises CostModelError if their times allow none."""
    spec, cfg = moe._engine.transport.spec, moe.model_config
    sizes = COPY_BYTES[jax.devices()[0].platform]
    copies = measure_copies(sizes)
    geometry = {"L": spec.L, "K": cfg.num_experts_per_tok, "row_bytes": spec.row_bytes, "policy": "lru"}
    return CostModel(
        device=jax.devices()[0].device_kind,
        link=LinkCurve.fit(sizes, copies),
        memory_bytes_per_second=measure_memory() * 1e9,
        decode={
            name: fit_levels([run.figures for run in levels if run.transport == name], **geometry)
            for name in dict.fromkeys(run.transport for run in levels)
        },
        policy_seconds=measure_policies(policies, spec.L, spec.E, cfg.num_experts_per_tok, 0.5),
        notes={
            "jax": importlib.metadata.version("jax"),
            "model": moe.name,
            "copies": [list(pair) for pair in zip(sizes, copies, strict=True)],
            "levels": [run.figures for run in levels],
        },
    )


def row_of(run: Run, cost: CostModel) -> dict:
    """A line of the table."""
    predicted = predict_ms_per_token(run.result, cost, transport=run.transport)
    return run.figures | {"predicted_ms": predicted, "error": predicted / (run.median * 1e3) - 1}


def line(row: dict) -> list[str]:
    """The cells of a row."""
    low, middle, high = (f(row["seconds_of_runs"]) * 1e3 for f in (min, statistics.median, max))
    return [
        row["transport"],
        row["policy"],
        f"{row['share']:.3f}",
        f"{row['hit_rate']:.4f}",
        f"{row['misses']:.2f}",
        f"{row['miss_events']:.2f}",
        f"{middle:.3f} ({low:.3f} to {high:.3f})",
        f"{row['predicted_ms']:.3f}",
        f"{row['error']:+.1%}",
        "yes" if row["hits_equal"] else "NO",
    ]


HEADINGS = (
    "transport",
    "policy",
    "share",
    "hit",
    "misses",
    "miss events",
    "measured ms",
    "predicted",
    "error",
    "equal",
)


def model_for(trace: Trace, shape: str, rows: int, transport: str, dry: bool) -> MoE:
    """Random weights of `shape` with the trace's geometry; its banks have a row for every expert, so that no smaller
    cache compiles again."""
    header = trace.header
    experts = "num_local_experts" if "num_local_experts" in SHAPES[shape][1] else "num_experts"
    changes = (small(shape) if dry else {}) | {experts: header["E"], "num_experts_per_tok": header["K"]}
    changes["num_hidden_layers"] = len(header["moe_layers"])
    prompts = np.bincount(trace.request[trace.phase == 0])
    config = OffloadConfig(
        transport=transport,
        policy="lru",
        cache_rate=1.0,
        max_batch=1,
        # Calls of `callback` do not overlap: the time between them is not to count here.
        decode_chunk=32 if transport == "callback" else 8,
        max_sequence_length=rows + 2,
        prefill_chunk=max(16, int(prompts.max())),
        device_memory_ratio=0.95,
        progress=False,
    )
    return MoE.from_parts(random_parts(shape, **changes), config, name=shape)


def report(runs: list[Run], cost: CostModel | None, geometry: str, limit: float) -> tuple[list[dict], bool]:
    """Prints what came out; (the rows of the table, whether all predictions are within `limit`)."""
    rows = [] if cost is None else [row_of(run, cost) for run in runs]
    if cost is not None:
        show(cost)
        table = Table(*HEADINGS, title=f"{geometry}, batch 1, replayed")
        for row in rows:
            table.add_row(*line(row))
        console.print(table)
    good = sum(abs(row["error"]) <= limit for row in rows)
    console.print(f"{good} of {len(runs)} predictions within {limit:.0%}")
    return rows, good == len(runs)


@app.command()
def main(
    trace: Annotated[Path, Argument(help="a trace of any format that load_trace knows")],
    shape: Annotated[str, Option(help=f"layer shapes: {', '.join(SHAPES)}")] = "qwen3-30b-a3b",
    rows: Annotated[int, Option(help="most rows (tokens) to replay, in whole requests")] = 512,
    policies: Annotated[str, Option(help="policies to predict")] = "lru,lfru,lfu-decayed,static",
    shares: Annotated[str, Option(help="slot shares to predict")] = "0.25,0.5,0.75",
    calibrate: Annotated[str, Option(help="slot shares that LRU is calibrated at")] = "0.125,0.375,0.625",
    transports: Annotated[str, Option(help=f"of {', '.join(TRANSPORTS)}")] = "callback",
    repeats: Annotated[int, Option(help="timed replays of each setting; the median is reported")] = 3,
    limit: Annotated[float, Option(help="largest error of a prediction")] = 0.05,
    dry: Annotated[bool, Option(help="shrunken model on any platform, errors do not fail: does it run?")] = False,
    out: Annotated[Path | None, Option(help="write figures and cost model as JSON")] = None,
):
    """Calibrates, replays and predicts."""
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("moe_jax").setLevel(logging.INFO)
    predicted, calibrated = shares_of(shares, "--shares"), shares_of(calibrate, "--calibrate")
    if both := sorted(set(predicted) & set(calibrated)):
        raise typer.BadParameter(f"--calibrate {both}: a share that is predicted must not be calibrated on")
    names = policies.split(",")
    for name, values, known in (
        ("transports", transports.split(","), TRANSPORTS),
        ("policies", names, list_policies()),
    ):
        if unknown := sorted(set(values) - set(known)):
            raise typer.BadParameter(f"--{name} {unknown}: not of {', '.join(known)}")
    try:
        recorded = load_trace(trace)
    except (TraceError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    served, others = choose(recorded, rows)
    requests = np.unique(served.request).tolist()
    said(f"{trace.name}: requests {requests}, {len(served.request)} rows; static is fitted on others")
    objects = {
        name: get_policy(name, **({"frequency": others} if name == "static" else {})) for name in ("lru", *names)
    }
    settings = [(objects["lru"], share) for share in (1.0, *calibrated)]
    levels = len(settings)
    settings += itertools.product([objects[name] for name in names], predicted)
    runs: list[Run] = []
    figures = {"requests": requests, "runs": [], "predictions": None, "cost_model": None}
    seen = []
    with model_for(served, shape, rows, transports.split(",")[0], dry) as moe:
        spec = moe._engine.transport.spec
        geometry = f"{shape}, {spec.L} x {spec.E} experts of {spec.row_bytes / 1e6:.2f} MB"
        said(f"{geometry}, load {moe.load_seconds:.1f} s")
        for transport in transports.split(","):
            for index, run in enumerate(measure(moe, served, transport, settings, repeats)):
                (seen if index < levels else runs).append(run)
                figures["runs"].append(run.figures | {"kernel": moe.stats()["kernel"][0]})
                write(out, figures)  # each at once: a later fault must not cost what was measured
        try:
            cost = fit(moe, seen, sorted({"lru", *names}))
        except CostModelError as error:
            cost = None
            console.print(f"[red]no cost model:[/red] {error}")
    table, within = report(runs, cost, geometry, limit)
    write(out, figures | {"predictions": table, "cost_model": None if cost is None else dataclasses.asdict(cost)})
    unequal = [run for run in (*seen, *runs) if not run.equal]
    for run in unequal:
        console.print(f"[red]hits differ:[/red] {run.transport} {run.policy} {run.share}")
    raise typer.Exit(1 if unequal or not (within or dry) else 0)


def write(out: Path | None, figures: dict):
    """Writes the figures as JSON, if a file was asked for."""
    if out:
        write_json(out, figures)


if __name__ == "__main__":
    app()
