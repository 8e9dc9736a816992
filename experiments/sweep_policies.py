"""Replays traces with many cache policies, capacities, contracts and scopes in one run, beside the two optima.

    python experiments/sweep_policies.py                                   # the bundled trace, all policies
    python experiments/sweep_policies.py run.npz other.parquet --policies lru,lfru --slots 4,6,8 --out sweep
    python experiments/sweep_policies.py run.npz --scope layer,global --contract atomic-bypass,atomic-forced-admit

A cell is one (trace, policy, slots, contract, scope, reset, phase, seed). Finished cells are kept in DIR/results.csv,
so a run that was stopped goes on where it was, and a later run adds to it; cells of a trace or code that has changed
are dropped. DIR also gets results.parquet, plots and report.md, which states what the figures depend on.
"""

import csv
import hashlib
import importlib.util
import io
import itertools
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Annotated, NamedTuple

import _sweep_report
import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import host_offload
from host_offload import bundled_trace, get_policy, list_policies, load_trace, simulate, simulate_many
from host_offload.bounds import CONTRACTS as OPTIMUM_CONTRACTS
from host_offload.bounds import belady
from host_offload.cost_model import CostModel
from host_offload.policy import StaticPin
from host_offload.simulate import BACKENDS, RESETS
from host_offload.trace import CONTRACTS, PHASES, SCOPES, write_whole
from moe_jax import __version__
from moe_jax.interrupts import keep_interrupts

EXIT_FAULT, EXIT_USAGE, EXIT_INTERRUPT = 1, 2, 130
SPLITS = ("even-odd", "none")
DEFAULT_SHARES = "0.125,0.1875,0.25,0.375,0.5,0.75"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class UsageError(Exception):
    """An option is wrong, or two of them contradict each other."""


class Cell(NamedTuple):
    """What one replay depends on. slots_per_layer: times L is the pool in scope `global`. split: how it was fitted."""

    trace: str
    policy: str
    slots_per_layer: int
    contract: str
    scope: str
    reset: str
    phase: str
    seed: int
    split: str


MEASURES = ("tokens", "steps", "hits", "misses", "accesses", "lookups", "bypasses", "evictions")
# Columns of results.csv and .parquet, with the type that a cell of the text is read as. `counters` is JSON of
# `Result.counters` [2, L, 6], `steps_by_phase` and `tokens_by_phase` of two integers.
COLUMNS = {
    **{name: int if name in ("slots_per_layer", "seed") else str for name in Cell._fields},
    **{"L": int, "E": int, "K": int, "share": float, "hit_rate": float},
    **dict.fromkeys(MEASURES, int),
    **{"ties": str, "dedup": str, "scores": str, "backend": str},
    **{"counters": str, "tokens_by_phase": str, "steps_by_phase": str, "trace_digest": str, "version": str},
}


def row_of(cell, result, trace, digest, version, backend):
    """The line of results.csv of a finished cell: a dict by `COLUMNS`."""
    header = trace.header
    return {
        **cell._asdict(),
        "L": len(header["moe_layers"]),
        "E": header["E"],
        "K": header["K"],
        "share": cell.slots_per_layer / header["E"],
        "hit_rate": result.hit_rate,
        "tokens": int(result.tokens.sum()),
        "steps": int(result.steps.sum()),
        **{name: getattr(result, name) for name in MEASURES[2:]},
        **{name: result.contract[name] for name in ("ties", "dedup", "scores")},
        "backend": backend,
        "counters": json.dumps(result.counters.tolist()),
        "tokens_by_phase": json.dumps(result.tokens.tolist()),
        "steps_by_phase": json.dumps(result.steps.tolist()),
        "trace_digest": digest,
        "version": version,
    }


class Store:
    """Finished cells in DIR/results.csv, written whole after every group of cells: a stop loses at most one group."""

    def __init__(self, directory, digests, version):
        self.path = Path(directory) / "results.csv"
        self.rows, self.dropped = {}, {}
        if self.path.exists():
            self._read(digests, version)

    def _read(self, digests, version):
        with self.path.open(newline="") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames != list(COLUMNS):
                self.dropped["another format of results.csv"] = sum(1 for _ in reader)
                return
            for line in reader:
                try:
                    row = {name: kind(line[name]) for name, kind in COLUMNS.items()}
                    json.loads(row["counters"])
                except (TypeError, ValueError) as error:
                    raise UsageError(
                        f"{self.path}: line {reader.line_num} is damaged ({error}); delete the file to start anew"
                    ) from error
                reason = None
                if row["version"] != version:
                    reason = f"code {row['version']}, now {version}"
                elif digests.get(row["trace"], row["trace_digest"]) != row["trace_digest"]:
                    reason = f"another content of trace {row['trace']!r}"
                if reason:
                    self.dropped[reason] = self.dropped.get(reason, 0) + 1
                else:
                    self.rows[Cell(*(row[name] for name in Cell._fields))] = row

    def add(self, rows):
        """Takes finished rows and writes the file."""
        self.rows.update({Cell(*(row[name] for name in Cell._fields)): row for row in rows})
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, COLUMNS)
        writer.writeheader()
        writer.writerows(self.rows.values())
        write_whole(self.path, lambda file: file.write(text.getvalue().encode()))

    def write_parquet(self):
        """Writes DIR/results.parquet with the same columns; returns its path."""
        import pyarrow
        import pyarrow.parquet

        path = self.path.with_suffix(".parquet")
        table = pyarrow.Table.from_pylist(list(self.rows.values()))
        write_whole(path, lambda file: pyarrow.parquet.write_table(table, file))
        return path


# --------------------------------------------------------------------------------------------------------------- cells


def code_version(extra=()):
    """Version of the package and a digest of what decides the figures: all of host_offload and the files `extra`."""
    root = Path(host_offload.__file__).parent
    digest = hashlib.sha256()
    for path in (*sorted(root.rglob("*.py")), *extra):
        digest.update(Path(path).read_bytes())
    return f"{__version__}+{digest.hexdigest()[:10]}"


def trace_digest(trace):
    """Twelve hex digits of a trace's arrays and sizes."""
    digest = hashlib.sha256(json.dumps([trace.header[name] for name in ("moe_layers", "E", "K")]).encode())
    for name, array in sorted(trace.arrays().items()):
        digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:12]


def halves(trace):
    """(even, odd): the requests at even and at odd places among a trace's numbers. Raises UsageError."""
    requests = np.unique(trace.request)
    if len(requests) < 2:
        raise UsageError("it has a single request: nothing to fit on beside it")
    if len(np.unique(np.stack([trace.step, trace.request]), axis=1).T) > len(np.unique(trace.step)):
        raise UsageError("its requests share steps: to split them would take batches apart")
    return trace.select(requests[::2]), trace.select(requests[1::2])


def fitted_both_ways(trace, cell, backend):
    """`static` fitted on each half of the requests and tested on the other: the `Result` of both tests together."""
    first, second = halves(trace)
    phase = None if cell.phase == "all" else cell.phase
    results = [
        simulate(
            test,
            StaticPin(fit.frequency(phase)),
            slots_per_layer=cell.slots_per_layer,
            scope=cell.scope,
            contract=cell.contract,
            reset=cell.reset,
            phase=phase,
            seed=cell.seed,
            backend=backend,
        )
        for fit, test in ((first, second), (second, first))
    ]
    for name in ("counters", "tokens", "steps"):
        setattr(results[0], name, getattr(results[0], name) + getattr(results[1], name))
    return results[0]


def all_cells(names, policies, slots, contracts, scopes, reset, phase, seeds, split):
    """Every `Cell` of the sweep, optima first; `slots` maps a trace's name to its slots a layer."""
    cells = []
    for name in names:
        for scope, n in itertools.product(scopes, slots[name]):
            cells += [Cell(name, "belady", n, contract, scope, reset, phase, 0, "") for contract in OPTIMUM_CONTRACTS]
        for contract, scope, policy, n, seed in itertools.product(contracts, scopes, policies, slots[name], seeds):
            fit = split if policy == "static" else ""
            cells.append(Cell(name, policy, n, contract, scope, reset, phase, seed, fit))
    return cells


def groups_of(cells, backend):
    """The cells in groups that are replayed together: compiled policies a few at a time, others one by one."""

    def alone(cell):
        if cell.policy == "belady" or cell.split == "even-odd" or backend == "numpy":
            return True
        return get_policy(cell.policy).host_only

    together = {}
    for index, cell in enumerate(cells):
        if alone(cell):
            together[index] = [cell]
            continue
        key = cell.trace, cell.contract, cell.scope, cell.reset, cell.phase
        together.setdefault(key, []).append(cell)
    most = os.cpu_count() or 1
    for members in together.values():
        names = list(dict.fromkeys(cell.policy for cell in members))
        for low in range(0, len(names), most):
            yield [cell for cell in members if cell.policy in names[low : low + most]]


def replay(trace, group, backend):
    """[(cell, Result, back end)] of a group of `groups_of`."""
    cell = group[0]
    phase = None if cell.phase == "all" else cell.phase
    common = {"scope": cell.scope, "contract": cell.contract, "reset": cell.reset, "phase": phase}
    if cell.policy == "belady":
        return [(cell, belady(trace, slots_per_layer=cell.slots_per_layer, **common), "optimum")]
    backend = "numpy" if get_policy(cell.policy).host_only else backend
    if cell.split == "even-odd":
        return [(cell, fitted_both_ways(trace, cell, backend), backend)]
    policies = list(dict.fromkeys(one.policy for one in group))
    slots = list(dict.fromkeys(one.slots_per_layer for one in group))
    seeds = list(dict.fromkeys(one.seed for one in group))
    results = simulate_many(trace, policies, slots, seeds, backend=backend, **common)
    wanted = set(group)
    done = []
    for (policy, n, seed), result in zip(itertools.product(policies, slots, seeds), results, strict=True):
        one = cell._replace(policy=policy, slots_per_layer=n, seed=seed)
        if one in wanted:
            done.append((one, result, backend))
    return done


# ------------------------------------------------------------------------------------------------------------- options


def words(option, text, known):
    """The comma-separated words of an option, each one of `known`. Raises UsageError."""
    chosen = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    wrong = [word for word in chosen if word not in known]
    if wrong or not chosen:
        raise UsageError(f"{option} {text!r}: {wrong[0] if wrong else 'nothing'!r} is not one of {', '.join(known)}")
    return chosen


def numbers(option, text, kind):
    """The comma-separated numbers of an option. Raises UsageError."""
    try:
        chosen = list(dict.fromkeys(kind(word) for word in text.split(",") if word.strip()))
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: expected numbers with commas between them: {error}") from error
    if not chosen:
        raise UsageError(f"{option} {text!r}: expected at least one number")
    return chosen


def chosen_policies(text):
    """Names of policies; "all" and "compiled" stand for all registered ones, and those that are not host-only."""
    if text in ("all", "compiled"):
        return [name for name in list_policies() if text == "all" or not get_policy(name).host_only]
    names = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not names:
        raise UsageError(f"--policies {text!r}: expected names, 'all' or 'compiled'")
    for name in names:
        try:
            get_policy(name)
        except ValueError as error:
            raise UsageError(f"--policies: {error}") from error
    return names


def chosen_slots(traces, slots, shares):
    """{trace: slots a layer, rising} from one of the two options. Raises UsageError."""
    if slots is not None and shares is not None:
        raise UsageError("give --slots or --shares, not both")
    chosen = {}
    for name, trace in traces.items():
        E = trace.header["E"]
        if slots is not None:
            values = numbers("--slots", slots, int)
            bad = [n for n in values if not 1 <= n <= E]
            if bad:
                raise UsageError(f"--slots: {bad[0]} is outside 1..{E}, the experts of a layer of {name}")
        else:
            wanted = numbers("--shares", shares or DEFAULT_SHARES, float)
            if shares is None:  # few experts a layer: the smallest default shares are less than one of them
                wanted = [share for share in wanted if share * E >= 1]
            bad = [share for share in wanted if not 1 / E <= share <= 1]
            if bad:
                raise UsageError(f"--shares: {bad[0]} is outside 1/{E}..1: {name} has {E} experts a layer")
            values = [int(share * E) for share in wanted]
        chosen[name] = sorted(set(values))
    return chosen


def read_traces(paths):
    """{name: Trace}, by the files' names without suffix; the bundled trace if there are none. Raises UsageError."""
    if not paths:
        return {"bundled": bundled_trace()}
    traces = {}
    for path in paths:
        if path.stem in traces:
            raise UsageError(f"TRACE: two files are called {path.stem!r}; rename one: results go by it")
        try:
            traces[path.stem] = load_trace(path)
        except (OSError, ValueError, ImportError) as error:
            raise UsageError(f"TRACE {path}: {error}") from error
    return traces


def check_cost(path, transport, traces, policies, phase):
    """The `CostModel` of a file, once sure that it covers the sweep; None without a file. Raises UsageError."""
    if path is None:
        return None
    try:
        cost = CostModel.load(path)
        measured = cost.of(transport)
        for name in policies:
            cost.all_hit_seconds(transport, accesses=1, row_bytes=measured.row_bytes, policy=name)
    except (OSError, ValueError) as error:
        raise UsageError(f"--cost: {error}") from error
    for name, trace in traces.items():
        L = len(trace.header["moe_layers"])
        if L != measured.L:
            raise UsageError(f"--cost {path}: calibrated with {measured.L} MoE layers, trace {name} has {L}")
        if phase == "prefill" or not (trace.phase == PHASES["decode"]).any():
            raise UsageError(f"--cost {path}: only decode steps can be predicted, and {name} would replay none")
    return cost


def make_directory(out):
    """Makes DIR. Raises UsageError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise UsageError(f"--out {out}: a file of that name exists; name a directory") from error
    except OSError as error:
        raise UsageError(f"--out {out}: this directory cannot be made ({error.strerror}); name another one") from error


def check_libraries(plots):
    """Raises UsageError if a library that the outputs need is not installed."""
    for library, needed in (("pyarrow", True), ("matplotlib", plots)):
        if needed and importlib.util.find_spec(library) is None:
            remedy = " (or leave the plots out with --no-plots)" if library == "matplotlib" else ""
            raise UsageError(f"{library} is not installed: pip install -e '.[lab]'{remedy}")


@app.command()
def main(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(metavar="TRACE...", help="Files of any known format. Default: the bundled one."),
    ] = None,
    policies: Annotated[
        str, typer.Option(help="Names with commas, 'all', or 'compiled': all but host-only ones.")
    ] = "all",
    slots: Annotated[str | None, typer.Option(help="Slots of each layer, for example 4,6,8.")] = None,
    shares: Annotated[
        str | None, typer.Option(help=f"Share of a layer's experts, rounded down. Default: {DEFAULT_SHARES}.")
    ] = None,
    scope: Annotated[str, typer.Option(help="layer,global: slots of each layer, or their sum as one pool.")] = "layer",
    contract: Annotated[str, typer.Option(help=f"What a slot may keep: {', '.join(CONTRACTS)}.")] = "atomic-bypass",
    reset: Annotated[str, typer.Option(help="request: empty at each request; never: the cache stays.")] = "request",
    phase: Annotated[str, typer.Option(help="all, or only decode or prefill rows of the traces.")] = "all",
    seeds: Annotated[str, typer.Option(help="Seeds of policies that draw, for example 0,1,2.")] = "0",
    calibrate_split: Annotated[
        str, typer.Option(help="even-odd: fit `static` on even requests, test on odd ones, and the reverse; none.")
    ] = "even-odd",
    out: Annotated[Path, typer.Option(help="Directory of results; made if absent.")] = Path("sweep"),
    cost: Annotated[Path | None, typer.Option(help="Cost model of calibrate.py: predicts ms/token.")] = None,
    transport: Annotated[
        str | None, typer.Option(help="The cost model's transport: device or callback. Default: device.")
    ] = None,
    backend: Annotated[str, typer.Option(help="jax, compiled, or numpy, plain and slow; both decide alike.")] = "jax",
    load: Annotated[Path | None, typer.Option(help="Python file that registers policies of your own.")] = None,
    plots: Annotated[bool, typer.Option(help="Draw the plots.")] = True,
) -> None:
    """Replay routing traces with cache policies, at many capacities, beside the optima of both contracts.

    Finished cells stay in DIR/results.csv: the same command goes on after Ctrl-C, and another one adds to it. Host-only
    policies take about a hundred times as long as compiled ones; leave them out with --policies compiled.
    """
    console = Console(stderr=True, highlight=False)
    keep_interrupts()
    try:
        if load is not None:
            if not load.is_file():
                raise UsageError(f"--load {load}: there is no such file")
            runpy.run_path(str(load))
        check_libraries(plots)
        if transport is not None and cost is None:
            raise UsageError(f"--transport {transport}: it chooses from a cost model; give --cost, or leave it out")
        transport = transport or "device"
        names = chosen_policies(policies)
        contracts, scopes = words("--contract", contract, CONTRACTS), words("--scope", scope, SCOPES)
        for option, value, known in (
            ("--reset", reset, RESETS),
            ("--phase", phase, ("all", *PHASES)),
            ("--calibrate-split", calibrate_split, SPLITS),
            ("--backend", backend, BACKENDS),
        ):
            if value not in known:
                raise UsageError(f"{option}: {value!r} is not one of {', '.join(known)}")
        seed_list = numbers("--seeds", seeds, int)
        if min(seed_list) < 0:
            raise UsageError(f"--seeds {seeds!r}: expected integers of at least 0")
        loaded = read_traces(traces)
        slots_of = chosen_slots(loaded, slots, shares)
        if "static" in names and calibrate_split == "even-odd":
            remedy = "pass --calibrate-split none (the lowest ids are pinned) or leave `static` out of --policies"
            if reset == "never":
                raise UsageError(f"--calibrate-split even-odd replays half of the requests, not all in turn: {remedy}")
            for name, trace in loaded.items():
                try:
                    halves(trace)
                except UsageError as error:
                    raise UsageError(f"--calibrate-split even-odd: trace {name}: {error}; {remedy}") from error
        version = code_version(() if load is None else (load,))
        digests = {name: trace_digest(trace) for name, trace in loaded.items()}
        store = Store(out, digests, version)
        # The report covers what earlier runs left in DIR too, so the cost model must.
        shown = _sweep_report.select(store.rows.values(), reset, phase, list(loaded))
        reported = dict.fromkeys([*names, *(row["policy"] for row in shown if row["policy"] != "belady")])
        cost_model = check_cost(cost, transport, loaded, reported, phase)
        make_directory(out)
        for reason, count in store.dropped.items():
            console.print(f"{count} finished cells were made with {reason}: they start anew", soft_wrap=True)
        cells = all_cells(list(loaded), names, slots_of, contracts, scopes, reset, phase, seed_list, calibrate_split)
        run_cells(cells, loaded, digests, store, version, backend, console)
        files = [store.path, store.write_parquet()]
        rows = _sweep_report.select(store.rows.values(), reset, phase, list(loaded))
        files += _sweep_report.write(rows, out, cost_model, transport, plots)
        for table in _sweep_report.tables(rows, cost_model, transport):
            Console(width=max(100, Console().width)).print(table)
        console.print("wrote " + ", ".join(map(str, files)), soft_wrap=True)
    except (UsageError, OSError) as error:
        print(f"sweep_policies: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAULT) from error
    except KeyboardInterrupt as error:
        print(f"sweep_policies: stopped; finished cells are in {out}: the same command goes on", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPT) from error


def run_cells(cells, traces, digests, store, version, backend, console):
    """Replays the cells that `store` lacks and adds them to it, group by group, under a progress bar."""
    missing = [cell for cell in cells if cell not in store.rows]
    if len(missing) < len(cells):
        console.print(f"{len(cells) - len(missing)} of {len(cells)} cells are finished already")
    columns = TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=len(missing))
        for group in groups_of(missing, backend):
            names = list(dict.fromkeys(cell.policy for cell in group))
            progress.update(task, description=f"{group[0].trace}: {', '.join(names)}"[:24])
            trace, digest = traces[group[0].trace], digests[group[0].trace]
            done = replay(trace, group, backend)
            store.add([row_of(cell, result, trace, digest, version, used) for cell, result, used in done])
            progress.advance(task, len(group))


if __name__ == "__main__":
    app()
