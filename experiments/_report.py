"""What a generation run reports: one dictionary of plain numbers, and its table."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from rich.table import Table

from moe_jax import MoE
from moe_jax.floors import Ceilings, decode_floor, dense_bytes_read, kv_tokens_read


def figures(moe: MoE, prompt_tokens: Sequence[int], new_tokens: Sequence[int], ceilings: Ceilings) -> dict[str, Any]:
    """The figures of the last call, as docs/benchmarking.md defines them; None where nothing was decoded.

    Args:
        prompt_tokens, new_tokens: tokens of each sequence.
        ceilings: rates that the floors are made of.
    """
    stats = moe.stats()
    last, cfg = stats["last"], moe.model_config
    decode, steps = last["decode"], last["decode"]["steps"]
    disk = decode["disk"]
    row_bytes = stats["experts"]["bytes_each"]
    floor = decode_floor(
        decode,
        ceilings,
        dense_bytes=dense_bytes_read(cfg, moe.dtype, stats["memory"]["dense_bytes"]),
        row_bytes=row_bytes,
        kv_bytes=kv_tokens_read(prompt_tokens, new_tokens, cfg.window) * cfg.kv_bytes_per_token(moe.dtype),
    )
    ms = decode["seconds"] / steps * 1e3 if steps else None
    return {
        "prompt_tokens": sum(prompt_tokens),
        "new_tokens": sum(new_tokens),
        "ttft_seconds": last["ttft_seconds"] if sum(new_tokens) else None,
        "compile_seconds": last["compile_seconds"],
        "compilations": last["compilations"],
        "load_seconds": stats["load_seconds"],
        "decode_tokens_per_second": decode["tokens_per_second"],
        "ms_per_token": ms,
        "hit_rate": decode["hit_rate"],
        "prefill_hit_rate": last["prefill"]["hit_rate"],
        "misses_per_step": decode["misses"] / steps if steps else None,
        "bytes_per_token": decode["bytes_per_token"],
        "prefill_bytes_moved": last["prefill"]["bytes_moved"],
        "encoder_bytes_moved": last["encoder"]["bytes_moved"] if cfg.encoder_decoder else None,
        "host_hit_rate": disk["hit_rate"] if disk else None,
        "bytes_read_per_token": disk["bytes_per_token"] if disk else None,
        "link_gbps": ceilings.link_gbps,
        "link_source": ceilings.link_source,
        "hbm_gbps": ceilings.memory_gbps,
        "hbm_source": ceilings.memory_source,
        "link_floor_ms": floor.link_ms if floor else None,
        "hbm_floor_ms": floor.memory_ms if floor else None,
        "time_over_floor": ms / floor.total_ms if floor else None,
        "efficiency": floor.efficiency(ms) if floor else None,
    }


def table(moe: MoE, run: Mapping[str, Any]) -> Table:
    """The figures as a short table: what, value, and how it came about."""
    stats = moe.stats()
    slots, experts = stats["slots"], stats["experts"]
    everything = experts["layers"] * experts["per_layer"]
    accelerated = jax.devices()[0].platform == "gpu"
    out = Table(show_header=False, box=None, pad_edge=False)
    out.add_column(style="bold", no_wrap=True)
    out.add_column(justify="right", no_wrap=True)
    out.add_column(style="dim")

    def line(name, value, unit="", note="", digits=1):
        out.add_row(name, "-" if value is None else f"{value:,.{digits}f} {unit}".rstrip(), note)

    out.add_row(
        "expert cache",
        f"{slots['total'] / everything:.0%}",
        f"{slots['total']} of {everything} experts, {size(slots['total'] * experts['bytes_each'])}",
    )
    out.add_row(
        "",
        "",
        f"{stats['transport']['name']}, {stats['policy']}, scope {stats['scope']}, {stats['contract']}",
    )
    line("time to first token", _scaled(run["ttft_seconds"], 1e3), "ms", f"{run['prompt_tokens']} prompt tokens")
    line("decode", run["decode_tokens_per_second"], "tok/s", f"{run['new_tokens']} new tokens")
    line("time a token", run["ms_per_token"], "ms", "one step of all sequences", 2)
    line("hit rate", _scaled(run["hit_rate"], 100), "%", "distinct experts of a step found in a slot")
    line("misses a step", run["misses_per_step"], "", f"experts of {size(experts['bytes_each'])}")
    moved = run["bytes_per_token"]
    before = f"prefill: {size(run['prefill_bytes_moved'])}"
    if run["encoder_bytes_moved"] is not None:
        before = f"encoder: {size(run['encoder_bytes_moved'])}, {before}"
    out.add_row("moved a token", "-" if moved is None else size(moved), before)
    if tier := stats["disk"]:
        rate = "" if tier["gb_per_second"] is None else f", {tier['gb_per_second']:.2f} GB/s since loading"
        read = run["bytes_read_per_token"]
        line("host hit rate", _scaled(run["host_hit_rate"], 100), "%", f"{tier['why']}, {tier['policy']}")
        out.add_row("read a token", "-" if read is None else size(read), f"from disk, {tier['reads']}{rate}")
    if ahead := stats["prefetch"]:
        rows, on = ahead["rows"], sum(layer["on"] for layer in ahead["layers"])
        layers = f"on in {on} of {len(ahead['layers'])} layers"
        by_clock = {"on": layers, "off": "off, it did not pay", "trial": f"being tried, {layers}"}
        state = by_clock[ahead["trial"]["state"]] if ahead["ready"] else "still learning"
        if "prefix" in ahead:  # staged in the compiled step
            each = f", {size(ahead['prefix']['bytes'])} of each"
            note = f"rows of {rows['issued']} were used{each}; {ahead['predictor']}, "
            line("prefetched", rows["useful"], "", note + state, 0)
        else:
            note = f"rows in time, {rows['late']} late, {rows['wasted']} wasted; {ahead['predictor']}, "
            line("prefetched", rows["on_time"], "", note + state, 0)
    line("link floor", run["link_floor_ms"], "ms", f"{run['link_gbps']:,.1f} GB/s, {run['link_source']}", 2)
    memory = "HBM floor" if accelerated else "memory floor"
    line(memory, run["hbm_floor_ms"], "ms", f"{run['hbm_gbps']:,.1f} GB/s, {run['hbm_source']}", 2)
    line("time / floor", run["time_over_floor"], "x", "1 is the least the two rates allow", 2)
    line("compilation", run["compile_seconds"], "s", f"{run['compilations']} programs, not in the times above")
    out.add_row("code path", "", f"{stats['kernel'][0]}, {moe.dtype}, {jax.devices()[0].device_kind}")
    return out


def _scaled(value, factor):
    return None if value is None else value * factor


def size(nbytes: float) -> str:
    """Bytes for people, in powers of ten: 1436750 is "1.44 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
