"""How fast the simulator replays: events x configurations a second, compilation apart.

A configuration is one policy at one cache size. Without `--trace`, random routing of gpt-oss-20b's shape is replayed
(24 layers, 32 experts, top-4, 60 requests); with it, a recorded trace. The first line is a whole study: all policies
that compile, six cache sizes, compilation included. Other work on the machine slows all of it, so its load is printed,
and beside the rate by the clock the one by processor time: what one core would do that is left alone.
"""

import os
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from host_offload import Trace, get_policy, list_policies, load_trace, simulate_many
from host_offload.trace import CONTRACTS, TraceError

CAPACITIES = (4, 6, 8, 12, 16, 24)


def random_trace(requests=60, tokens=275, L=24, E=32, K=4, seed=0):
    """Decode steps of `requests` sequences, one after the other; some experts are popular, more so within a request."""
    rng = np.random.default_rng(seed)
    T = requests * tokens
    liking = rng.random((requests, L, E), np.float32)
    chosen = np.argsort(rng.random((T, L, E), np.float32) - np.repeat(liking, tokens, axis=0), axis=-1)[..., :K]
    header = {
        "moe_layers": list(range(L)),
        "E": E,
        "K": K,
        "chunk": 1,
        "scope": "layer",
        "slots": L * E,
        "contract": "atomic-bypass",
        "policy": "none",
        "model": "random routing",
        "dtype": "none",
    }
    weights = np.broadcast_to(np.arange(K, 0, -1), chosen.shape)
    return Trace.from_rows(
        chosen, weights, np.ones(T, int), np.repeat(np.arange(requests), tokens), np.arange(T), header
    )


def main(
    trace: Annotated[
        Path | None, typer.Option(help="A recorded trace, of any known format, instead of random routing.")
    ] = None,
    policies: Annotated[str, typer.Option(help="Comma-separated names; default: all that compile.")] = "",
    contract: Annotated[str, typer.Option(help="atomic-bypass, atomic-forced-admit or sequential.")] = "atomic-bypass",
    study_only: Annotated[
        bool, typer.Option("--study-only", help="Time the call with all policies, then stop.")
    ] = False,
    pool_requests: Annotated[
        int, typer.Option(min=1, help="Requests that are replayed with one pool for all layers.")
    ] = 12,
):
    """Times all policies in one call, then each alone in scope layer and global."""
    console = Console()
    if contract not in CONTRACTS:
        raise typer.BadParameter(f"--contract {contract}: must be one of {', '.join(CONTRACTS)}")
    try:
        routing = load_trace(trace) if trace else random_trace()
        names = policies.split(",") if policies else [n for n in list_policies() if not get_policy(n).host_only]
        host = [name for name in names if get_policy(name).host_only]
    except (TraceError, ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    names = [name for name in names if name not in host]
    if not names:
        raise typer.BadParameter(f"--policies {policies}: none can be compiled, which is what this measures")
    if host:
        console.print(f"left out, as they cannot be compiled: {', '.join(host)}")
    began = time.perf_counter()  # first, while nothing is compiled
    simulate_many(routing, names, CAPACITIES, contract=contract)
    seconds = time.perf_counter() - began
    console.print(
        f"{len(routing.step):,} tokens x {len(names)} policies x {len(CAPACITIES)} capacities in one call, compilation "
        f"included: {seconds:.1f} s; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    if study_only:
        return
    part = _first_requests(routing, pool_requests)
    rates = "events x configurations / s", "a processor second"
    table = Table("policy", "scope", "configurations", "events", "seconds", *rates, box=None)
    for scope, replayed in (("layer", routing), ("global", part)):
        events = len(np.unique(replayed.step)) * len(replayed.header["moe_layers"])
        for name in names:
            for _ in range(2):  # the first compiles
                began, work = time.perf_counter(), time.process_time()
                simulate_many(replayed, [name], CAPACITIES, scope=scope, contract=contract)
                seconds, work = time.perf_counter() - began, time.process_time() - work
            label = f"{name} (in-cache)" if get_policy(name).in_cache else name
            rates = (f"{events * len(CAPACITIES) / spent / 1e6:.2f} M" for spent in (seconds, work))
            figures = f"{events:,}", f"{seconds:.2f}", *rates
            table.add_row(label, scope, str(len(CAPACITIES)), *figures)
    console.print(table)
    console.print(f"load at the end: {os.getloadavg()[0]:.1f}")


def _first_requests(trace, count):
    """The trace of its first `count` requests."""
    rows = np.isin(trace.request, np.unique(trace.request)[:count])
    columns = (getattr(trace, name)[rows] for name in ("experts", "weights", "phase", "request", "step"))
    scores = None if trace.scores is None else trace.scores[rows]
    return Trace.from_rows(*columns, header=trace.header, scores=scores)


if __name__ == "__main__":
    typer.run(main)
