"""What prefetch is worth on this machine: ms/token with none, with each predictor, and with the truth.

    python experiments/bench_prefetch.py routes.npz --shape qwen3-30b-a3b --out prefetch.json
    python experiments/bench_prefetch.py --model DIRECTORY --predictors gate-1,cross-layer+temporal
    python experiments/bench_prefetch.py routes.npz --transport device --predictors request-counts,cross-layer+temporal

With a trace, a model with random weights, the layer shapes of --shape and the trace's layers, experts and experts a
token replays requests of it (`MoE.replay`). Without one, a real model (default: the demo model) first writes on from
prompts of its own, and these runs are replayed: only then are there hidden states that its routers can guess from, so
the predictors gate-1 to gate-3 need that. Predictors learn from other requests than those that are replayed. Every run
begins with an empty cache and the same knowledge. In the first runs of each setting the shut-off makes its trials ("at
first"), until the clock has judged, or `TRIALS` times; the timed ones begin with its verdicts.
`none` is measured first and last. Fails (exit 1) if tokens or hits differ anywhere.

With --transport device the prediction and the copies are part of the compiled step. Whether a row came in time cannot
be told there: "on time" counts all that were used.
"""

import copy
import dataclasses
import itertools
import logging
import statistics
import time
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import typer
from _outputs import check_writable, shares_of, write_json
from random_model import SHAPES
from replay_traces import COUNTED, choose, model_for
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from host_offload.predictor import get_predictor
from host_offload.prefetch import Experience
from host_offload.prefetch.live import GATES
from host_offload.prefetch.staging import check_traceable
from host_offload.trace import Trace, TraceError, load_trace
from moe_jax import MoE, OffloadConfig, demo_model_path
from moe_jax.config import parse_bytes
from moe_jax.errors import ConfigError

app = typer.Typer(add_completion=False)
console = Console(width=170)
started = time.perf_counter()

PREDICTORS = "request-counts,static-frequency,eamc-mean,temporal,cross-layer,cross-layer+temporal"
TRANSPORTS = ("callback", "device")
ORACLE = "oracle"
TRIALS = 16
PROMPTS = (
    "Once upon a time there was a poor woodcutter",
    "To make a good soup, take",
    "The king had three daughters, and the youngest",
    "In the forest there lived",
    "A story about a fox:",
    "When the winter came, the old man",
)


@dataclasses.dataclass
class Run:
    """A setting, measured. seconds: a decode step, of each repeat; trial_seconds: of the run before, in which the
    shut-off tries. ids, counters: of that one; steady: all repeats gave the same. prefetch: `stats()["prefetch"]` of
    the last one, None without."""

    predictor: str
    share: float
    trial_seconds: float
    seconds: list[float]
    ids: list[list[int]]
    counters: list
    steady: bool
    misses: int
    hit_rate: float
    prefetch: dict | None

    @property
    def median(self) -> float:
        """Seconds a decode step of the median repeat."""
        return statistics.median(self.seconds)


def said(text: str):
    """Prints a line of progress with the seconds since the start."""
    console.print(f"[{time.perf_counter() - started:6.1f} s] {text}", highlight=False, markup=False)


def own_trace(moe: MoE, tokens: int) -> tuple[Trace, dict[int, np.ndarray]]:
    """(routing of the model's own continuations of `PROMPTS`, greedy; the prompt of each request)."""
    before = moe._engine.requests
    prompts = {}
    for number, text in enumerate(PROMPTS, before):
        ids = moe.tokenizer(text)["input_ids"] if moe.tokenizer else np.arange(8) + number
        prompts[number] = np.asarray(ids, np.int32).reshape(-1)
        moe.generate(prompts[number], tokens, eos_token_id=[], trace=True)
    return moe.trace(), prompts


class Verdicts:
    """What the shut-offs of a transport find in the run that comes."""

    def __init__(self, transport):
        self._places = [
            (transport, "trial"),
            (transport, "shutoff") if transport.name == "device" else (transport._prefetcher, "shutoffs"),
        ]
        self._found = [getattr(owner, name) for owner, name in self._places]

    def take(self, other: "Verdicts"):
        """Begins with what `other` found."""
        self._found = copy.deepcopy(other._found)
        for (owner, name), found in zip(self._places, self._found, strict=True):
            setattr(owner, name, found)

    @property
    def decided(self) -> bool:
        """Whether the clock has judged."""
        return self._found[0].decided


def measure(moe: MoE, trace: Trace, prompts, predictor: str, share: float, seen: Experience, repeats: int) -> Run:
    """Replays `trace` for the shut-off's trials, and `repeats` times with its verdict, with a predictor ("none" too),
    each time from an empty cache and from `seen`."""
    seconds, outcomes = [], []

    def replay(verdict):
        """The shut-offs after a run that began with `verdict`; None without a predictor."""
        moe._builder.experience = copy.deepcopy(seen)
        moe.set_cache(prefetch=predictor, cache_rate=share)
        shutoff = None if predictor == "none" else Verdicts(moe._engine.transport)
        if verdict is not None:
            shutoff.take(verdict)
            moe._engine.refresh_operands()
        ids = moe.replay(trace, prompts=prompts)
        last = moe.stats()["last"]
        seconds.append(last["decode"]["seconds"] / last["decode"]["steps"])
        counters = [last[phase]["per_layer"][name] for phase in ("prefill", "decode") for name in COUNTED]
        outcomes.append(([row.tolist() for row in ids], counters))
        return shutoff

    verdict = replay(None)
    while verdict is not None and len(seconds) < TRIALS and not verdict.decided:
        verdict = replay(verdict)
    tried = len(seconds)
    for _ in range(repeats):
        replay(verdict)
    decode = moe.stats()["last"]["decode"]
    steady = all(outcome == outcomes[0] for outcome in outcomes)
    found = decode["misses"], decode["hit_rate"], moe.stats()["prefetch"]
    return Run(predictor, share, seconds[0], seconds[tried:], *outcomes[0], steady, *found)


def figures_of(run: Run, none: list[Run], oracle: Run | None) -> dict:
    """A line of the table. none: the runs without prefetch at this share; oracle: with the truth, None if not run."""
    base = statistics.median(seconds for one in none for seconds in one.seconds)
    gain, most = base - run.median, None if oracle is None else base - oracle.median
    rows = None if run.prefetch is None else run.prefetch["rows"]
    return {
        "share": run.share,
        "predictor": run.predictor,
        "ms": run.median * 1e3,
        "seconds_of_runs": run.seconds,
        "trial_ms": run.trial_seconds * 1e3,
        "change": run.median / base - 1,
        "of_the_oracle": gain / most if most is not None and most > 0 else None,
        "hit_rate": run.hit_rate,
        "misses": run.misses,
        "coverage": rows["useful"] / run.misses if rows and run.misses else None,
        "layers_on": None if rows is None else sum(layer["on"] for layer in run.prefetch["layers"]),
        "equal": run.steady and all((run.ids, run.counters) == (one.ids, one.counters) for one in none),
        "prefetch": run.prefetch,
    }


HEADINGS = ("share", "predictor", "at first", "ms/token", "repeats", "against none", "of the oracle", "hit",
            "precision", "coverage", "on time", "late", "wasted", "layers on", "equal")  # fmt: skip


def stages(row: dict) -> str:
    """How many layers prefetch, or that the whole of it is off."""
    ahead = row["prefetch"]
    if ahead is None:
        return "-"
    if ahead["trial"]["state"] != "on":
        return ahead["trial"]["state"]
    return f"{row['layers_on']} of {len(ahead['layers'])}"


def line(row: dict) -> list[str]:
    """The cells of a row."""
    spread = [f(row["seconds_of_runs"]) * 1e3 for f in (min, max)]
    ahead = row["prefetch"]
    rows = dict.fromkeys(("on_time", "late", "wasted"), "-") if ahead is None else ahead["rows"]
    if "on_time" not in rows:
        rows = rows | {"on_time": rows["useful"], "late": "-"}
    precision = None if ahead is None else ahead["precision"]

    def share(value, form=".0%"):
        return "-" if value is None else f"{value:{form}}"

    return [
        f"{row['share']:.3f}",
        row["predictor"],
        f"{row['trial_ms']:.3f}",
        f"{row['ms']:.3f}",
        f"{spread[0]:.2f} to {spread[1]:.2f}",
        share(row["change"], "+.1%"),
        share(row["of_the_oracle"]),
        share(row["hit_rate"], ".3f"),
        share(precision, ".2f"),
        share(row["coverage"], ".2f"),
        *(str(rows[name]) for name in ("on_time", "late", "wasted")),
        stages(row),
        "yes" if row["equal"] else "NO",
    ]


def report(runs: list[Run], title: str) -> list[dict]:
    """Prints the table and returns its rows."""
    rows = []
    for share in sorted({run.share for run in runs}):
        here = [run for run in runs if run.share == share]
        none = [run for run in here if run.predictor == "none"]
        oracle = next((run for run in here if run.predictor == ORACLE), None)
        rows += [figures_of(run, none, oracle) for run in here]
    table = Table(*HEADINGS, title=title)
    for row in rows:
        table.add_row(*line(row))
    console.print(table)
    return rows


def check_predictors(names: list[str], replayed: bool, transport: str):
    """Raises BadParameter for names that are not known, cannot learn live, do not go with the transport, or need hidden
    states that are not there."""
    for name in names:
        try:
            get_predictor(name).learn(Experience(1, 1))
            if transport == "device":
                check_traceable(name)
        except ValueError as error:
            raise typer.BadParameter(f"--predictors {name}: {error}") from error
        if name in GATES and replayed:
            raise typer.BadParameter(
                f"--predictors {name}: routers guess from hidden states, and those of a model with random weights say "
                "nothing about the trace; leave the trace out, so that a real model replays itself"
            )


def open_model(trace, model, shape, rows, tokens, transport, dry) -> tuple[MoE, Trace, Trace, list | None]:
    """(model, requests to replay, requests to learn from, prompts of the former or None)."""
    if trace is not None:
        served, others = choose(trace, rows)
        return model_for(served, shape, rows, transport, dry), served, others, None
    settings = OffloadConfig(
        transport=transport, cache_rate=1.0, max_batch=1, max_sequence_length=tokens + 64, device_memory_ratio=0.95,
        progress=False,
    )  # fmt: skip
    moe = MoE(demo_model_path() if model is None else model, settings)
    try:
        recorded, prompts = own_trace(moe, tokens)
        served, others = choose(recorded, rows)
    except BaseException:
        moe.close()
        raise
    return moe, served, others, [prompts[int(number)] for number in np.unique(served.request)]


@app.command()
def main(
    trace: Annotated[
        Path | None, Argument(help="a trace of any format that load_trace knows; default: the model's")
    ] = None,
    shape: Annotated[str, Option(help=f"layer shapes, with a trace: {', '.join(SHAPES)}")] = "qwen3-30b-a3b",
    model: Annotated[str | None, Option(help="checkpoint, without a trace; default: the demo model")] = None,
    rows: Annotated[int, Option(help="most rows (tokens) to replay, in whole requests")] = 512,
    tokens: Annotated[int, Option(help="new tokens of each request, without a trace")] = 128,
    predictors: Annotated[
        str | None, Option(help=f"predictors to compare; gates need a model; default: {PREDICTORS}")
    ] = None,
    transport: Annotated[str, Option(help=f"of {', '.join(TRANSPORTS)}")] = "callback",
    budget: Annotated[str, Option(help="most bytes that an event may prefetch, such as 2MiB, or auto")] = "auto",
    shares: Annotated[str, Option(help="slot shares")] = "0.125,0.25,0.5,0.75",
    policy: Annotated[str, Option(help="policy of the cache")] = "lru",
    repeats: Annotated[int, Option(help="timed replays of each setting; the median is reported")] = 3,
    dry: Annotated[bool, Option(help="shrunken model on any platform: does it run?")] = False,
    out: Annotated[Path | None, Option(help="write figures as JSON")] = None,
):
    """Replays with each predictor and reports."""
    logging.basicConfig(level=logging.WARNING)
    if transport not in TRANSPORTS:
        raise typer.BadParameter(f"--transport {transport}: must be one of {', '.join(TRANSPORTS)}")
    if predictors is None:  # those that the transport can run
        predictors = PREDICTORS if transport == "callback" else PREDICTORS.replace("eamc-mean,", "")
    names, values = predictors.split(","), shares_of(shares, "--shares")
    try:
        size = "auto" if budget == "auto" else parse_bytes("--budget", budget)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    if trace is not None and model is not None:
        raise typer.BadParameter(f"--model {model} replays its own runs, and {trace} was given: leave one of them out")
    check_predictors(names, trace is not None, transport)
    if out:
        try:
            check_writable("--out", out)
        except OSError as error:
            raise typer.BadParameter(str(error)) from error
    try:
        recorded = None if trace is None else load_trace(trace)
    except (TraceError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    moe, served, others, prompts = open_model(recorded, model, shape, rows, tokens, transport, dry)
    runs: list[Run] = []
    with moe:
        spec = moe._engine.transport.spec
        title = f"{moe.name}, {spec.L} x {spec.E} experts of {spec.row_bytes / 1e6:.2f} MB, {policy}"
        said(f"{title}: requests {np.unique(served.request).tolist()}, {len(served.request)} rows")
        seen = Experience(spec.L, spec.E)
        seen.learn(others)
        moe.set_cache(policy)
        for predictor in ("none", *dict.fromkeys(names), ORACLE, "none"):
            moe.set_cache(prefetch=predictor, prefetch_budget=None if predictor == "none" else size)
            if prefix := (moe.stats()["prefetch"] or {}).get("prefix"):
                said(f"{predictor}: {prefix['bytes'] / 1e6:.2f} MB of a row")
            moe.replay(served, prompts=prompts)  # compiles
            for share in values:
                run = measure(moe, served, prompts, predictor, share, seen, repeats)
                runs.append(run)
                said(f"{predictor} {share}: {run.median * 1e3:.3f} ms")
                if out:  # each at once: a later fault must not cost what was measured
                    write_json(out, {"runs": [dataclasses.asdict(one) for one in runs], "table": None})
    table = report(runs, f"{title}, {transport}, batch 1, shut-off on, {jax.devices()[0].device_kind}")
    if out:
        found = {"title": title, "transport": transport, "table": table}
        write_json(out, found | {"runs": [dataclasses.asdict(one) for one in runs]})
    unequal = [row for row in table if not row["equal"]]
    for row in unequal:
        console.print(f"[red]tokens or hits differ:[/red] {row['predictor']} {row['share']}")
    worst = max(itertools.chain([0.0], (row["change"] for row in table if row["predictor"] not in ("none", ORACLE))))
    console.print(f"the most that a predictor cost: {worst:.1%}")
    raise typer.Exit(1 if unequal else 0)


if __name__ == "__main__":
    app()
