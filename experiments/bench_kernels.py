"""Every kernel at real shapes: its error, its time, its share of what the machine can do, and plain XLA beside it.

    python experiments/bench_kernels.py --out kernels.json
    python experiments/bench_kernels.py --op expert_ffn,paged_attention --shape qwen3-30b-a3b --batch 1 --verbose

Prints one table and what missed its aim. Exit 1 if a result is wrong, a case failed, or the time limit left one out.
`_kernel_cases.py` says how data are laid out and how calls are chained.
"""

import concurrent.futures
import importlib.metadata
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from _kernel_cases import Case, Entry, entries
from _outputs import write_json
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.table import Table
from typer import Option

from moe_jax.floors import Ceilings, find_ceilings, measure_link

app = typer.Typer(add_completion=False)
console = Console(width=170)

TIMED_SECONDS = 0.012  # of one timed run, about
REPEATS = 5
# Calls of plain XLA for each of the kernel's: it may be many times slower.
XLA_SHARE = 8
# Sets that plain XLA rotates over, at most (150 MB and more of pages): it compiles every call of a program.
XLA_SETS = 32
KERNEL_START_US = 2.5
# Of the time limit, the part in which programs are compiled.
COMPILE_SHARE = 0.6
LIMIT_SECONDS = 480.0
SQUARE = 8192


@dataclass(frozen=True)
class Rates:
    """What a machine can do: memory and link in GB/s, products of bf16 matrices in TFLOP/s."""

    ceilings: Ceilings
    matrix_tflops: float

    def seconds(self, case: Case) -> float:
        """About what a call takes, to choose how many are timed."""
        if case.flops:
            return case.flops / (0.4 * self.matrix_tflops * 1e12)
        if case.moved:
            rate = self.ceilings.memory_gbps if case.memory == "hbm" else self.ceilings.link_gbps
            return case.moved / (0.5 * rate * 1e9)
        return 3e-6


def measure_matrix_rate(side: int, products: int = 8) -> float:
    """TFLOP/s of bf16 products of square matrices, each with the result of the one before; fastest of a few runs."""

    @jax.jit
    def run(a, b):
        for _ in range(products):
            a = (a @ b).astype(a.dtype)
        return a

    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (side, side), jnp.bfloat16) / side**0.5 for key in keys)
    jax.block_until_ready(run(a, b))
    return products * 2 * side**3 / min(_times(lambda: run(a, b))) / 1e12


def _times(run) -> list[float]:
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - started)
    return seconds


@dataclass
class Ready:
    """A case with its compiled programs, each from (data, state); `calls` and `xla_calls` that one run makes."""

    case: Case
    make: Any
    make_state: Any
    kernel: Any
    error: Any
    xla: Any
    calls: int
    xla_calls: int
    compile_seconds: float


def _program(case: Case, implementation: str, rounds: int):
    """(data, state) -> (state after the first call, state after all); 1 + rounds * sets calls, the state donated."""
    sets = min(case.sets, XLA_SETS) if implementation == "xla" else case.sets
    step, order = case.step(implementation), [*range(1, sets), 0]

    def run(data, state):
        state = step(data, state, 0)
        first = {name: value for name, value in state.items() if name != "banks"}

        def all_sets(_, state):
            for j in order:
                state = step(data, state, j)
            return state

        return first, jax.lax.fori_loop(0, rounds, all_sets, state)

    return jax.jit(run, donate_argnums=1), 1 + rounds * sets


def _pinned() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def prepare(entry: Entry, implementation: str, seconds, xla: bool, tiles=None, like: Ready | None = None) -> Ready:
    """Compiles all programs of a line; any number may be compiled side by side.

    seconds: guesses the time of a call of a case. xla: also plain XLA. tiles: of the kernels that take them. like: the
    same line with other tiles, whose data and reference are used again.
    """
    started = time.perf_counter()
    case = entry.build() if tiles is None else entry.build(tiles=tiles)
    make = jax.jit(case.make)
    data, state = jax.eval_shape(make)
    if "pool" in data:
        data["pool"] = {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=_pinned()) for n, a in data["pool"].items()}
    rounds = 1 if implementation == "interpret" else max(1, round(TIMED_SECONDS / (case.sets * seconds(case))))
    kernel, calls = _program(case, implementation, min(rounds, 200))
    first = {name: value for name, value in state.items() if name != "banks"}
    ready = Ready(
        case=case,
        make=make.lower().compile() if like is None else like.make,
        make_state=jax.jit(lambda: case.make()[1]) if like is None else like.make_state,
        kernel=kernel.lower(data, state).compile(),
        error=jax.jit(case.error).lower(data, first, state).compile() if like is None else like.error,
        xla=None,
        calls=calls,
        xla_calls=0,
        compile_seconds=0.0,
    )
    if xla:
        program, ready.xla_calls = _program(case, "xla", max(1, min(rounds, 200) // XLA_SHARE))
        ready.xla = program.lower(data, state).compile()
    ready.compile_seconds = time.perf_counter() - started
    return ready


def prepare_all(jobs, workers: int, limit: float | None) -> list[concurrent.futures.Future]:
    """Runs the jobs side by side; those that `limit` seconds (None: no limit) did not reach are cancelled."""
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(job) for job in jobs]
        concurrent.futures.wait(futures, timeout=limit)
        for future in futures:
            future.cancel()
    return futures


def _timed(program, calls: int, data, state) -> tuple[list[float], Any]:
    """Microseconds a call of some runs, one after the other on the state of the last; and that state."""
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        _, state = jax.block_until_ready(program(data, state))
        seconds.append((time.perf_counter() - started) / calls * 1e6)
    return seconds, state


def make_operands(ready: Ready) -> tuple[dict, dict]:
    """(data, state) of a case; host rows lie in pinned memory."""
    data, state = ready.make()
    if "pool" in data:
        data["pool"] = jax.device_put(data["pool"], _pinned())
    return data, state


def measure(ready: Ready, rates: Rates | None, data=None) -> dict[str, Any]:
    """The figures of a line. rates: None leaves ceilings and aims out. data: of the same line, made before."""
    started, case = time.perf_counter(), ready.case
    data, state = make_operands(ready) if data is None else (data, ready.make_state())
    first, state = ready.kernel(data, state)
    error = float(ready.error(data, first, state))
    times, state = _timed(ready.kernel, ready.calls, data, state)
    us = statistics.median(times)
    row = {
        "us": us,
        "us_least": min(times),
        "us_most": max(times),
        "error": error,
        "tolerance": case.tolerance,
        "moved_bytes": case.moved,
        "flops": case.flops,
        "gbps": case.moved / us / 1e3 if case.moved else None,
        "tflops": case.flops / us / 1e6 if case.flops else None,
    }
    if rates is not None:
        row |= against(case, us, rates)
    if ready.xla is not None:
        _, state = jax.block_until_ready(ready.xla(data, state))
        row["xla_us"] = statistics.median(_timed(ready.xla, ready.xla_calls, data, state)[0])
    row |= {"compile_seconds": ready.compile_seconds, "run_seconds": time.perf_counter() - started}
    wrong = not error <= case.tolerance
    return row | {"status": "wrong" if wrong else "aim missed" if us > (row.get("aim_us") or us) else "ok"}


def against(case: Case, us: float, rates: Rates) -> dict[str, float]:
    """The ceiling of a case, its share reached, and the aim in microseconds where one is stated."""
    if case.flops:
        floor_us = case.flops / rates.matrix_tflops / 1e6
    elif case.memory == "hbm":
        floor_us = case.moved / rates.ceilings.memory_gbps / 1e3
    elif case.memory == "link":  # the copy engine at the same byte count
        floor_us = case.moved / measure_link(case.moved) / 1e3
    else:
        return {}
    aim = {} if case.aim is None else {"aim_us": floor_us / case.aim + case.starts * KERNEL_START_US}
    return {"floor_us": floor_us, "share": floor_us / us} | aim


def table(rows: list[dict[str, Any]], verbose: bool) -> Table:
    """All lines; a figure that was not measured is a dash."""
    out = Table()
    for name in ("op", "shape", "format", "size"):
        out.add_column(name, no_wrap=True)
    columns = {
        "us": "{us:.1f}",
        "GB/s": "{gbps:,.0f}",
        "TFLOP/s": "{tflops:.0f}",
        "share": "{share:.2f}",
        "aim us": "{aim_us:.1f}",
        "XLA us": "{xla_us:.1f}",
        "error": "{error:.1e}",
        "status": "{status}",
    }
    if verbose:
        columns |= {"compile s": "{compile_seconds:.1f}", "run s": "{run_seconds:.1f}"}
    for name in columns:
        out.add_column(name, justify="left" if name == "status" else "right", no_wrap=True)
    for row in rows:
        cells = []
        for style in columns.values():
            key = style[1:].split(":")[0].rstrip("}")
            cells.append("-" if row.get(key) is None else style.format(**{key: row[key]}))
        out.add_row(row["op"], row["shape"], row["format"], row["size"], *cells)
    return out


def names(value: str | None, known: set[str], option: str) -> set[str]:
    """A list of names with commas, all of `known` for None; raises BadParameter for others."""
    chosen = known if value is None else {name.strip() for name in value.split(",")}
    if unknown := chosen - known:
        raise typer.BadParameter(
            f"{option} {', '.join(sorted(unknown))}: choose from {', '.join(sorted(known))}", param_hint=option
        )
    return chosen


def select(batch: str, op: str | None, shape: str | None, form: str | None, dry: bool) -> list[Entry]:
    """The lines that were asked for; raises BadParameter for names or numbers that none has."""
    try:
        batches = tuple(int(b) for b in batch.split(","))
    except ValueError:
        batches = (0,)
    if any(not 1 <= b <= 1024 for b in batches):
        raise typer.BadParameter(f"--batch {batch}: give numbers from 1 to 1024 with commas", param_hint="--batch")
    every = entries(batches, dry)
    wanted = {
        "op": names(op, {entry.op for entry in every}, "--op"),
        "shape": names(shape, {entry.shape for entry in every}, "--shape"),
        "format": names(form, {entry.format for entry in every}, "--format"),
    }
    chosen = [entry for entry in every if all(getattr(entry, name) in values for name, values in wanted.items())]
    if not chosen:
        raise typer.BadParameter("no kernel has this --op, --shape and --format together; leave one of them out")
    return chosen


def find_rates(link_gbps: float | None, hbm_gbps: float | None) -> Rates:
    """The machine's rates, measured where they are not given."""
    return Rates(find_ceilings(link_gbps, hbm_gbps), measure_matrix_rate(SQUARE))


def compiled_or_dry(dry: bool) -> str:
    """The implementation that runs; raises BadParameter where kernels do not compile."""
    if not dry and jax.devices()[0].platform != "gpu":
        raise typer.BadParameter("the kernels need an NVIDIA GPU; --dry runs small shapes in the interpreter")
    return "interpret" if dry else "pallas"


def workers(dry: bool) -> int:
    """Threads that compile."""
    return 1 if dry else min(12, os.cpu_count() or 1)


@app.command()
def main(
    op: Annotated[str | None, Option(help="Operations, with commas. Default: all.")] = None,
    shape: Annotated[str | None, Option(help="Models whose shapes are run, with commas. Default: all.")] = None,
    form: Annotated[str | None, Option("--format", help="Number formats, with commas. Default: all.")] = None,
    batch: Annotated[
        str, Option(help="Tokens of a decode step of expert_ffn, rows of dequant_gemm, with commas.")
    ] = "1,8,64",
    xla: Annotated[bool, Option(help="Time plain XLA as well.")] = True,
    dry: Annotated[
        bool, Option("--dry", help="Small shapes in the interpreter: that it runs, on any machine.")
    ] = False,
    verbose: Annotated[bool, Option(help="Also the seconds that each line took.")] = False,
    limit: Annotated[
        float | None, Option(min=1, help="Seconds after which no further line is begun. Default: 480 on a GPU.")
    ] = None,
    link_gbps: Annotated[float | None, Option(help="Link rate. Default: measured.")] = None,
    hbm_gbps: Annotated[float | None, Option(help="Memory rate. Default: measured.")] = None,
    out: Annotated[Path | None, Option(help="JSON file of all figures.")] = None,
) -> None:
    """Checks and times the kernels."""
    started = time.perf_counter()
    chosen, implementation = select(batch, op, shape, form, dry), compiled_or_dry(dry)
    rates = None if dry else find_rates(link_gbps, hbm_gbps)
    if limit is None and not dry:
        limit = LIMIT_SECONDS
    if rates is not None:
        at = rates.ceilings
        console.print(
            f"{jax.devices()[0].device_kind}: memory {at.memory_gbps:,.0f} GB/s ({at.memory_source}), link "
            f"{at.link_gbps:.1f} GB/s ({at.link_source}), bf16 products {rates.matrix_tflops:.0f} TFLOP/s (measured)"
        )
    seconds = rates.seconds if rates is not None else lambda case: 1.0
    jobs = [lambda entry=entry: prepare(entry, implementation, seconds, xla) for entry in chosen]
    futures = prepare_all(jobs, workers(dry), limit and COMPILE_SHARE * limit)
    rows = []
    for i, entry in enumerate(chosen):
        row = {"op": entry.op, "shape": entry.shape, "format": entry.format, "size": entry.size}
        future, futures[i] = futures[i], None  # a compiled case is not kept longer than it runs
        if future.cancelled() or (limit and time.perf_counter() - started > limit):
            rows.append(row | {"status": "not run", "message": "the time limit was reached"})
            continue
        try:
            rows.append(row | measure(future.result(), rates))
        except Exception as error:  # whatever one line meets must not cost the others; it is reported, and exits 1
            rows.append(row | {"status": "failed", "message": f"{type(error).__name__}: {error}"})
        if verbose:
            console.print(f"{entry.name}: {rows[-1]['status']}, {time.perf_counter() - started:.0f} s since the start")
    console.print(table(rows, verbose))
    closing(rows)
    if out is not None:
        device = {"device": jax.devices()[0].device_kind, "jax": importlib.metadata.version("jax")}
        measured = None if rates is None else asdict(rates)
        write_json(out, device | {"dry": dry, "rates": measured, "rows": rows})
    raise typer.Exit(int(any(row["status"] not in ("ok", "aim missed") for row in rows)))


def closing(rows: list[dict[str, Any]]) -> None:
    """Prints what missed its aim, was wrong, failed or was left out."""
    for row in rows:
        name = " ".join(row[key] for key in ("op", "shape", "format", "size"))
        if row["status"] == "aim missed":
            console.print(f"aim missed: {name}: {row['us']:.1f} us, asked for {row['aim_us']:.1f}")
        elif row["status"] == "wrong":
            console.print(f"WRONG: {name}: error {row['error']:.2e}, at most {row['tolerance']:.0e}", style="red")
        elif row["status"] == "failed":
            console.print(f"FAILED: {name}: {row['message'][:1000]}", style="red", markup=False)
        elif row["status"] == "not run":
            console.print(f"not run: {name}: {row['message']}", style="red")
    with_aim = [row for row in rows if row.get("aim_us")]
    met = sum(row["status"] == "ok" for row in with_aim)
    if with_aim:
        console.print(f"{met} of {len(with_aim)} aims met")


if __name__ == "__main__":
    app()
