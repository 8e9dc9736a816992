"""Tries the tile sizes and launch parameters of one kernel at one shape, and writes which was fastest.

    python experiments/tune_kernels.py --op expert_ffn --shape qwen3-30b-a3b --out pallas_kernels/tiles.json

The two kernels of an expert run one after the other, so each is varied with the other at its default, and the two best
are then run together. Every variant is checked as `bench_kernels.py` does. The file is the table that the kernels read
(`pallas_kernels/tile_table.py`): the fastest tiles replace the entry of their class, other entries are kept.
"""

import collections
import itertools
import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from _gemm_cases import gemm_of
from _kernel_cases import PAGE, Entry, Experts, experts_of
from _outputs import write_json
from _row_cases import row_of
from bench_kernels import (
    Ready,
    compiled_or_dry,
    find_rates,
    make_operands,
    measure,
    prepare,
    prepare_all,
    select,
    workers,
)
from rich.console import Console
from rich.table import Table
from typer import Option

from pallas_kernels import tile_table
from pallas_kernels._compat import next_power_of_2, shared_memory
from pallas_kernels.dequant_gemm.arg_specs import ArgSpec
from pallas_kernels.dequant_gemm.kernel import gemm_key, gemm_tiles
from pallas_kernels.dequant_gemm.weights import most_columns
from pallas_kernels.expert_ffn.decode import decode_key, decode_tiles
from pallas_kernels.expert_ffn.grouped import grouped_key, grouped_tiles
from pallas_kernels.expert_ffn.packed import lanes, unit_words
from pallas_kernels.formats import FP8, Dense
from pallas_kernels.paged_attention.kernel import (
    HEADS,
    MULTIPROCESSORS,
    partial_key,
    partial_tiles,
    shared_bytes,
    shares_of,
)
from pallas_kernels.row_linear.arg_specs import ArgSpec as RowSpec
from pallas_kernels.row_linear.kernel import row_key, row_tiles

app = typer.Typer(add_completion=False)
console = Console(width=170)

# Of expert_ffn_deposit only how its rows are read, not summed: else a result would depend on what was resident.
TUNABLE = ("dequant_gemm", "expert_ffn", "expert_ffn_deposit", "expert_ffn_prefill", "paged_attention", "row_linear")
# Sums that a thread keeps in registers, of which it has 255: more spill, and with fewer it has nothing to do.
REGISTERS = range(4, 129)

Tiles = dict[str, Any]


def class_of(entry: Entry, batch: int, small: bool) -> tuple[str, Tiles]:
    """A line's key in the table, and the tiles that it runs with now; of an expert by kernel."""
    if entry.op == "paged_attention":
        data, _ = jax.eval_shape(jax.jit(entry.build().make))
        operands = data["q"], data.get("values", data["k0"]), data["tables"][0]
        return partial_key(*operands), partial_tiles(*operands)
    if entry.op == "dequant_gemm":
        spec, rows = gemm_of(entry.shape, entry.format, entry.size, small)
        operands = spec.N, spec.D, rows, spec.form
        return gemm_key(*operands), gemm_tiles(*operands)
    if entry.op == "row_linear":
        spec = row_of(entry.shape, entry.size, small)
        operands = spec.N // 2 if spec.gated else spec.N, spec.D, 2, spec.gated
        return row_key(*operands), row_tiles(*operands)
    experts = experts_of(entry.shape, entry.format, small)
    if entry.op == "expert_ffn_prefill":
        operands = experts.F, experts.D, 2, experts.spec
        return grouped_key(*operands), grouped_tiles(*operands)
    operands = experts.F, experts.D, batch, 2, experts.spec
    return decode_key(*operands), decode_tiles(*operands)


def variants(entry: Entry, base: Tiles, batch: int, small: bool) -> list[Tiles]:
    """Overrides of `base` to try, none of them twice; the empty one comes first."""
    if entry.op == "paged_attention":
        data, _ = jax.eval_shape(jax.jit(entry.build().make))
        return attention_variants(data["q"], data.get("values", data["k0"]), data["tables"][0], base)
    if entry.op == "dequant_gemm":
        return gemm_variants(*gemm_of(entry.shape, entry.format, entry.size, small), base)
    if entry.op == "row_linear":
        return row_variants(row_of(entry.shape, entry.size, small), base)
    experts = experts_of(entry.shape, entry.format, small)
    if entry.op == "expert_ffn_deposit":
        return deposit_variants(experts, base)
    found: list[Tiles] = [{}]
    for kernel, n_out, n_in in (("gate_up", experts.F, experts.D), ("down", experts.D, experts.F)):
        form = getattr(experts.spec, kernel)
        matrices = len(experts.spec.outs(kernel, 2))
        if entry.op == "expert_ffn_prefill":
            grid = {"block_out": (64, 128, 256), "num_warps": (4, 8), "num_stages": (2, 3, 4)}
            depth = {"block_in": (32, 64)} if isinstance(form, Dense) else {"units": (1, 2)}
        else:
            grid = {"block_out": (4, 8, 16, 32, 64), "num_warps": (2, 4, 8)}
            dense = {"block_in": (32, 64, 128, 256), "unroll": (1, 2, 4)}
            depth = dense if isinstance(form, Dense) else {"units": (1, 2, 4, 8), "unroll": (1, 2)}
        grid |= depth
        for values in itertools.product(*grid.values()):
            tiles = dict(zip(grid, values, strict=True))
            if tiles == {name: base[kernel][name] for name in grid} or n_out % tiles["block_out"]:
                continue
            if n_in % (tiles.get("block_in", 1) * tiles.get("unroll", 1)) or (
                isinstance(form, FP8) and form.block % tiles["block_out"]
            ):
                continue
            single = entry.op != "expert_ffn_prefill" and batch == 1
            if not single and (tiles["block_out"] < 16 or tiles.get("units", 1) > 2):
                continue  # tensor cores take 16 rows and more, of decoded values that fill registers
            if not single and tiles.get("unroll", 1) > 1:
                continue
            if single and isinstance(form, Dense) and tiles["block_out"] > 32:
                continue  # few rows and many programs were fastest (docs/measurements.md)
            if single:  # one sum for each word or column of the tile and matrix
                words = tiles.get("block_in") or tiles["units"] * unit_words(form)
                if tiles["block_out"] * words * matrices // (32 * tiles["num_warps"]) not in REGISTERS:
                    continue
                # As many columns as threads, or more: the operand would go through shared memory (`decode_tiles`).
                if words >= 32 * tiles["num_warps"]:
                    continue
            if "unroll" in tiles:
                tiles["unroll_missing"] = tiles["unroll"]
            found.append({kernel: tiles})
        if "row_sides" in base[kernel]:
            found.append({kernel: {"row_sides": not base[kernel]["row_sides"]}})
    return found


def deposit_variants(experts: Experts, base: Tiles) -> list[Tiles]:
    """Overrides of how rows in pinned memory are read: how many tiles at a time (those that fill rows as the default
    does), and scales a tile or a row at a time."""
    found: list[Tiles] = [{}]
    for kernel, n_in in (("gate_up", experts.D), ("down", experts.F)):
        form, tiles = getattr(experts.spec, kernel), base[kernel]
        dense = isinstance(form, Dense)
        size = tiles["block_in"] if dense else tiles["units"] * unit_words(form)
        steps, rest = divmod(n_in if dense else n_in // lanes(form), size)
        for unroll in (1, 2, 4, 8):
            if unroll != tiles["unroll_missing"] and (rest or steps % unroll == 0):
                found.append({kernel: {"unroll_missing": unroll}})
        if not dense:
            found.append({kernel: {"row_sides_missing": not tiles["row_sides_missing"]}})
    return found


def attention_variants(queries, values, page_table, base: Tiles) -> list[Tiles]:
    """Overrides of the tiles of decode attention, those that differ least from the default first."""
    (B, N, _), (_, _, G, value_width) = queries[0].shape, values.shape
    group = N // G
    base = base | {"splits": shares_of(base, queries, values, page_table)}
    grid = {
        # More heads a program than there are would be rows without a query.
        "heads": tuple(n for n in (64, 32, 16) if n <= max(HEADS, next_power_of_2(group))),
        "tokens": (PAGE, 32),
        "splits": tuple(2**i for i in range(9)),
        "unroll": (1, 2),
        "num_warps": (4, 8),
        "num_stages": (4, 3, 2),
    }
    found = []
    for values_ in itertools.product(*grid.values()):
        tiles = dict(zip(grid, values_, strict=True))
        programs = B * G * -(-group // tiles["heads"]) * tiles["splits"]
        sums = tiles["heads"] * value_width // (32 * tiles["num_warps"])
        if (
            tiles != {name: base[name] for name in grid}
            and shares_of(tiles, queries, values, page_table) == tiles["splits"]
            and MULTIPROCESSORS // 4 <= programs <= 4 * MULTIPROCESSORS
            # More spill registers, kilobytes at worst (compiled for an H200); 64 heads of wide latents need 128.
            and sums * tiles["unroll"] <= (64 if tiles["heads"] < 64 else 128)
            and shared_bytes(tiles, queries, values) <= shared_memory()
        ):
            found.append(tiles)
    return [{}, *sorted(found, key=lambda tiles: sum(base[name] != value for name, value in tiles.items()))]


def gemm_variants(spec: ArgSpec, rows: int, base: Tiles) -> list[Tiles]:
    """Overrides of the tiles of a dense matrix; more rows a tile than there are rows would be thrown away."""
    dense, deep = isinstance(spec.form, Dense), most_columns(spec.form)
    grid = {
        "block_rows": {base["block_rows"], max(16, base["block_rows"] // 2)},
        "block_out": {64, 128},
        "block_in": {64, 128} if dense else {deep},
        "unroll": {1} if dense else {base["unroll"], 2},
        "splits": {max(1, base["splits"] // 2), base["splits"], 2 * base["splits"]},
        "num_warps": {4, 8},
        "num_stages": {3, 4, 5},
    }
    found: list[Tiles] = [{}]
    for values in itertools.product(*map(sorted, grid.values())):
        tiles = dict(zip(grid, values, strict=True))
        sums = tiles["block_out"] * tiles["block_rows"] // (32 * tiles["num_warps"])
        steps = -(-spec.D // tiles["block_in"])
        shared = steps % (tiles["splits"] * tiles["unroll"]) == 0 or (tiles["unroll"] == 1 and tiles["splits"] <= steps)
        if tiles != base and shared and sums in REGISTERS and tiles["num_warps"] * 16 <= tiles["block_out"]:
            found.append(tiles)
    return found


def row_variants(spec: RowSpec, base: Tiles) -> list[Tiles]:
    """Overrides of the tiles of one row's product; wider tiles than the row would be mostly masked."""
    most = next_power_of_2(spec.D)
    grid = {"block_out": (1, 2, 4, 8, 16), "block_in": (256, 512, 1024, 2048, 4096), "num_warps": (2, 4, 8)}
    found: list[Tiles] = [{}]
    for values in itertools.product(*grid.values()):
        tiles = dict(zip(grid, values, strict=True))
        sums = tiles["block_out"] * tiles["block_in"] * (2 if spec.gated else 1) // (32 * tiles["num_warps"])
        if tiles["block_in"] <= most and sums in REGISTERS and tiles != {name: base[name] for name in grid}:
            found.append(tiles)
    return found


def merged(base: Tiles, tiles: Tiles) -> Tiles:
    """All tiles of a run with overrides."""
    return base | {name: base[name] | value if isinstance(value, dict) else value for name, value in tiles.items()}


def best_of_both(results: list[tuple[Tiles, dict[str, Any]]]) -> Tiles | None:
    """The fastest tiles of each kernel together, None where at most one of them is not the default."""
    best: Tiles = {}
    for kernel in ("gate_up", "down"):
        tried = [(row["us"], tiles) for tiles, row in results if not tiles or kernel in tiles]
        best |= min(tried, key=lambda one: one[0])[1] if tried else {}
    return best if len(best) == 2 else None


@dataclass
class Line:
    """A line of the benchmark and its variants. `first` has its data and reference, `error` says why it has none."""

    entry: Entry
    key: str
    base: Tiles
    tried: list[Tiles]
    first: Ready | None = None
    error: str | None = None
    compiled: list[Future] = field(default_factory=list)
    seconds: float = 0.0


def compile_line(line: Line, implementation: str, seconds, limit: float) -> Line:
    """`line` with its programs; those of the next line are compiled while this one's are timed."""
    started = time.perf_counter()
    try:
        line.first = prepare(line.entry, implementation, seconds, False)
    except Exception as error:  # this line's alone; reported, and exits 1
        line.error = f"{type(error).__name__}: {error}"
        return line
    line.compiled = compile_all(line, line.tried, implementation, seconds, limit)
    line.seconds = time.perf_counter() - started
    return line


def compile_all(line: Line, tried: list[Tiles], implementation: str, seconds, limit: float) -> list[Future]:
    jobs = [
        lambda t=tiles: prepare(line.entry, implementation, seconds, False, tiles=t, like=line.first) for tiles in tried
    ]
    return prepare_all(jobs, workers(implementation == "interpret"), limit)


def measure_all(tried: list[Tiles], compiled: list[Future], data, limit: float):
    """([(tiles, row of `measure`)] of the variants that gave the right result, [(tiles, why not)] of the others)."""
    right, failed = [], []
    for tiles, future in zip(tried, compiled, strict=True):
        if future.cancelled():
            failed.append((tiles, f"not compiled within {limit:.0f} s"))
            continue
        try:
            row = measure(future.result(), None, data)
        except Exception as error:  # tiles too large for the card, for one; reported, and the others go on
            failed.append((tiles, f"{type(error).__name__}: {str(error)[:200]}"))
            continue
        if row["status"] == "ok":
            right.append((tiles, row))
        else:
            failed.append((tiles, f"wrong: error {row['error']:.1e}, at most {row['tolerance']:.0e}"))
    return right, failed


def show(results, failed, nbytes: int) -> None:
    """The variants, fastest first, and what did not run."""
    out = Table()
    for name in ("us", "least", "most", "GB/s or TFLOP/s", "error", "tiles"):
        out.add_column(name, justify="left" if name == "tiles" else "right")
    for tiles, row in results:
        rate = row["gbps"] if nbytes else row["tflops"]  # None of data that lie in a cache
        figures = [f"{row[name]:.1f}" for name in ("us", "us_least", "us_most")]
        out.add_row(
            *figures,
            "-" if rate is None else f"{rate:,.0f}",
            f"{row['error']:.0e}",
            json.dumps(tiles) if tiles else "default",
        )
    console.print(out)
    for tiles, why in failed:
        console.print(f"{json.dumps(tiles)}: {why}", style="red", markup=False)


def entry_of(op: str, line: Line, results, before: dict[str, Any]) -> dict[str, Any]:
    """A class's entry of the table: its tiles, and microseconds with them and with those of before."""
    tiles, row = results[0]
    default = next((row["us"] for tiles, row in results if not tiles), None)
    what, kept = ("deposit_", before) if op == "expert_ffn_deposit" else ("", {})
    return kept | {"tiles": merged(line.base, tiles), f"{what}us": row["us"], f"{what}before_us": default}


def existing(out: Path | None) -> dict[str, Any]:
    """The table in a file that is to be extended."""
    if out is None or not out.exists():
        return {}
    try:
        found = json.loads(out.read_text())
    except ValueError as error:
        raise typer.BadParameter(f"--out {out}: not JSON ({error}); name another file", param_hint="--out") from error
    if not isinstance(found, dict):
        raise typer.BadParameter(f"--out {out}: must hold a JSON object; name another file", param_hint="--out")
    return found


@app.command()
def main(
    op: Annotated[str, Option(help=f"One of {', '.join(TUNABLE)}.")],
    shape: Annotated[str | None, Option(help="Models, with commas. Default: all that have the kernel.")] = None,
    form: Annotated[str | None, Option("--format", help="Number formats, with commas. Default: all.")] = None,
    size: Annotated[str | None, Option(help='As in the table: "B1 S32768", "qkv M8". Default: all.')] = None,
    batch: Annotated[int, Option(min=1, help="Tokens of a decode step of expert_ffn, rows of dequant_gemm.")] = 1,
    most: Annotated[int | None, Option(min=1, help="Variants tried at each shape, at most.")] = None,
    limit: Annotated[float, Option(min=1, help="Seconds in which the variants of a shape are compiled.")] = 120.0,
    dry: Annotated[
        bool, Option("--dry", help="Small shapes in the interpreter: that it runs, on any machine.")
    ] = False,
    out: Annotated[Path | None, Option(help="JSON table to write or extend.")] = None,
) -> None:
    """Finds the fastest tiles."""
    if op not in TUNABLE:
        raise typer.BadParameter(f"--op {op}: kernels with tiles are {', '.join(TUNABLE)}", param_hint="--op")
    chosen, implementation, found = select(str(batch), op, shape, form, dry), compiled_or_dry(dry), existing(out)
    if dry and out is not None and out.resolve() == tile_table.FILE:
        raise typer.BadParameter(f"--out {out}: a dry run measures nothing; name another file", param_hint="--out")
    if op == "expert_ffn_deposit" and batch != 1:
        raise typer.BadParameter(f"--batch {batch}: {op} is measured with 1 token", param_hint="--batch")
    if size is not None:
        chosen = [entry for entry in chosen if entry.size == size]
    if not chosen:
        raise typer.BadParameter(f"--size {size}: no line has it", param_hint="--size")
    seconds = (lambda case: 1.0) if dry else find_rates(None, None).seconds
    lines: dict[str, Line] = {}
    for entry in chosen:  # lines of one class share their entry of the table: the first of them is tuned
        key, base = class_of(entry, batch, dry)
        lines.setdefault(key, Line(entry, key, base, variants(entry, base, batch, dry)[:most]))
        if op == "expert_ffn_deposit" and key in found and merged(base, found[key]["tiles"]) != base:
            raise typer.BadParameter(
                f"--out {out} has other tiles of {key!r} than the kernels use: tune into {tile_table.FILE} first",
                param_hint="--out",
            )
    failures = 0
    with ThreadPoolExecutor(1) as ahead:
        coming = collections.deque(
            ahead.submit(compile_line, line, implementation, seconds, limit) for line in lines.values()
        )
        while coming:
            line, started = coming.popleft().result(), time.perf_counter()
            if line.first is None:
                console.print(f"FAILED: {line.entry.name}: {line.error}", style="red", markup=False)
                failures += 1
                continue
            data = make_operands(line.first)[0]
            results, failed = measure_all(line.tried, line.compiled, data, limit)
            if op.startswith("expert_ffn") and (both := best_of_both(results)):
                together = compile_all(line, [both], implementation, seconds, limit)
                more, less = measure_all([both], together, data, limit)
                results, failed = results + more, failed + less
            del data
            line.compiled.clear()
            results.sort(key=lambda one: one[1]["us"])
            failures += not results
            console.print(
                f"{line.entry.name}: {len(line.tried)} variants, compiled in {line.seconds:.0f} s, timed in "
                f"{time.perf_counter() - started:.0f} s"
            )
            show(results, failed, line.first.case.moved)
            if results:
                found[line.key] = entry_of(op, line, results, found.get(line.key, {}))
                if out is not None:
                    write_json(out, found)
    raise typer.Exit(int(failures > 0))


if __name__ == "__main__":
    app()
