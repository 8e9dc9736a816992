"""What goes where and how fast it could be, before anything is allocated or downloaded; needs no GPU.

    python experiments/plan.py DIRECTORY                                        of a checkpoint, or of its config.json
    python experiments/plan.py qwen3-30b-a3b --device-memory 24GiB --host-memory 128GiB --cache-rate 0.25
    python experiments/plan.py gpt-oss-120b --device-memory 80GiB --json plan.json

The arithmetic of memory is `moe_jax.planner`, by which `MoE` loads. Speed is an estimate: the floors of
docs/benchmarking.md over efficiencies that were measured elsewhere.
"""

import difflib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
import typer
from _outputs import check_writable, write_json
from _released import CONFIGS
from _report import size
from rich.console import Console
from rich.table import Table

from host_offload.store import RowSpec, StoreError, row_stride
from moe_jax import OffloadConfig, runtime
from moe_jax.checkpoint import open_checkpoint
from moe_jax.checkpoint.described import described_experts, described_rows
from moe_jax.checkpoint.prepared import is_prepared
from moe_jax.checkpoint.reader import read_config
from moe_jax.config import parse_bytes, real
from moe_jax.engine.loading import compute_dtype, device_bytes, find_packed, map_experts, read_model_config
from moe_jax.errors import CheckpointError, ConfigError, MoEJaxError
from moe_jax.floors import Ceilings, decode_floor, dense_bytes_read, kv_tokens_read
from moe_jax.models.config import ModelConfig, text_settings
from moe_jax.models.registry import abstract_params
from moe_jax.planner import MemoryPlan, largest_bytes, params_bytes, plan_memory
from pallas_kernels.expert_ffn import ExpertSpec

HIT_RATES = (0.5, 0.75, 0.9, 0.95, 1.0)
# Of an H200, and what its decode steps reached of both floors (docs/measurements.md): link 0.93 to 0.95 in all shapes
# and shares; memory 0.36 to 0.39 with experts of 10 MB, up to 0.84 with experts of 350 MB.
LINK_GBPS, MEMORY_GBPS = 55.5, 3800.0
LINK_EFFICIENCY, MEMORY_EFFICIENCY = 0.93, 0.38
ASSUMED = "assumed, an H200's"
CONTEXT = 1024  # tokens in the cache of the estimated step
ASSUMED_DTYPE = "bfloat16"  # of released files whose config.json names none, such as gpt-oss'

EXIT_USAGE = 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Announced:
    """A config.json in the place of a checkpoint. dtype: of the files, "bfloat16" if it names none."""

    config: dict
    dtype: str


@dataclass(frozen=True)
class Model:
    """What a plan needs to know.

    source: where that was read. largest_dense_bytes: of the largest dense array. file_bytes: weights on disk, counted
    in the files, or else (`counted` false) about: all but the experts as in the compute dtype.
    """

    name: str
    source: str
    cfg: ModelConfig
    dtype: np.dtype
    spec: RowSpec
    experts: ExpertSpec
    dense_bytes: int
    largest_dense_bytes: int
    file_bytes: int
    counted: bool


def read_model(name: str, config: OffloadConfig) -> Model:
    """The model in a directory (its files, or its config.json alone) or of a release's name. Raises MoEJaxError."""
    directory = Path(name).expanduser()
    if directory.is_dir():
        if is_prepared(directory) or any(directory.glob("*.safetensors")):
            return _from_files(directory, config)
        return _from_config(directory.resolve().name, read_config(directory)[0], config, "config.json")
    if name.lower() in CONFIGS:
        return _from_config(name.lower(), CONFIGS[name.lower()], config, "the release's config.json")
    if directory.is_file():
        raise CheckpointError(f"{name} is a file: give {directory.parent}, the directory of config.json")
    near = difflib.get_close_matches(name.lower(), CONFIGS, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise CheckpointError(
        f"{name}: no such directory and no release that is known here; {hint}known: {', '.join(CONFIGS)}. "
        "For another model give a directory with its config.json"
    )


def _from_files(directory: Path, config: OffloadConfig) -> Model:
    with open_checkpoint(directory) as files:
        cfg, dtype = read_model_config(files), compute_dtype(config, files)
        try:
            experts, store, weights = map_experts(files, cfg, dtype)
        except StoreError as error:
            raise CheckpointError(str(error)) from error
        params = abstract_params(cfg, dtype, find_packed(config, files, cfg, weights))[1]
    dense, largest = params_bytes(params), largest_bytes(params)
    weights = directory.rglob("*") if is_prepared(directory) else directory.glob("*.safetensors")
    nbytes = sum(path.stat().st_size for path in weights if path.is_file())
    shown = directory.resolve().name
    return Model(shown, "the checkpoint", cfg, dtype, store.spec, experts, dense, largest, nbytes, True)


def _from_config(name: str, hf: dict, config: OffloadConfig, source: str) -> Model:
    settings = text_settings(hf)
    stored = settings.get("dtype") or settings.get("torch_dtype")
    if stored is None:
        stored = ASSUMED_DTYPE
        source += f" (names no dtype: {stored} assumed)"
    files = Announced(hf, stored)
    cfg, dtype = read_model_config(files), compute_dtype(config, files)
    spec = described_rows(hf, cfg, np.dtype(jnp.dtype(stored)), dtype)
    params = abstract_params(cfg, dtype)[1]
    dense, largest = params_bytes(params), largest_bytes(params)
    at_rest = dense + spec.L * spec.E * spec.row_bytes
    return Model(name, source, cfg, dtype, spec, described_experts(hf, cfg), dense, largest, at_rest, False)


def decode_estimates(
    model: Model,
    plan: MemoryPlan,
    ceilings: Ceilings,
    *,
    hit_rates: Sequence[float],
    context: int,
    link_efficiency: float,
    memory_efficiency: float,
    disk_gbps: float | None = None,
) -> list[dict[str, float | None]]:
    """Estimates of a decode step of one sequence with `context` tokens in its cache, one a hit rate.

    ms = link floor / link_efficiency + memory floor / memory_efficiency + disk; in it K distinct experts of each
    decoder layer are used, and the share 1 - hit rate of them is moved. A resident model has the hit rate 1 alone. Of
    what is moved, host memory lacks what `disk_share` says; the time to read that is left out (None) if the rate
    `disk_gbps` is not known.
    """
    cfg, spec = model.cfg, model.spec
    used = (spec.L - cfg.encoder_moe_layers) * cfg.num_experts_per_tok
    context = min(context, plan.max_sequence_length - 1)
    kv = kv_tokens_read([context - 1], [2], cfg.window) * cfg.kv_bytes_per_token(model.dtype)
    dense = dense_bytes_read(cfg, model.dtype, model.dense_bytes)
    rows = []
    for hit in (1.0,) if plan.transport == "resident" else hit_rates:
        moved = (1 - hit) * used * spec.row_bytes
        step = {"steps": 1, "accesses": used, "bytes_moved": moved}
        floor = decode_floor(step, ceilings, dense_bytes=dense, row_bytes=spec.row_bytes, kv_bytes=kv)
        read = moved * disk_share(plan, spec)
        disk = 0.0
        if read:
            disk = None if disk_gbps is None else read / disk_gbps / 1e6
        ms = floor.link_ms / link_efficiency + floor.memory_ms / memory_efficiency + (disk or 0.0)
        rows.append(
            {
                "hit_rate": hit,
                "bytes_moved": round(moved),
                "link_floor_ms": floor.link_ms,
                "memory_floor_ms": floor.memory_ms,
                "bytes_read": round(read),
                "disk_ms": disk,
                "ms_per_token": ms,
                "tokens_per_second": 1e3 / ms,
            }
        )
    return rows


def disk_share(plan: MemoryPlan, spec: RowSpec) -> float:
    """Share of the device's misses that host memory misses too, where routing has no pattern.

    Host memory keeps what it gave to the device, so it is of use for the rows that it has beyond the slots.
    """
    if plan.disk_why is None:
        return 0.0
    without_slot = spec.L * spec.E - plan.slots.total
    return 1 - max(0, plan.host_rows - plan.slots.total) / without_slot if without_slot else 0.0


def describe(model: Model, plan: MemoryPlan, config: OffloadConfig, host: int | None) -> dict[str, Any]:
    """The plan as plain numbers: what `stats()["memory"]` will say, slots, and what host and disk hold."""
    spec, rows = model.spec, plan.slots
    everything = spec.L * spec.E
    packed = everything * row_stride(spec) if config.offload_path else 0
    return {
        "model": model.name,
        "read_from": model.source,
        "dtype": str(model.dtype),
        "experts": {
            "layers": spec.L,
            "per_layer": spec.E,
            "bytes_each": spec.row_bytes,
            "format": {"gate_up": model.experts.gate_up.name, "down": model.experts.down.name},
        },
        "transport": {"name": plan.transport, "why": plan.transport_why},
        "max_sequence_length": plan.max_sequence_length,
        "memory": plan.memory(),
        "total_device_bytes": plan.total_device_bytes,
        "allowed_device_bytes": plan.device_bytes and int(config.device_memory_ratio * plan.device_bytes),
        "slots": {
            "total": rows.total,
            "share": rows.total / everything,
            "per_layer": list(rows.per_layer),
            "scope": rows.scope,
            "source": rows.source,
        },
        "spare_rows": plan.spare_rows,
        "host_bytes": host,
        "host_rows": plan.host_rows,
        "disk": {
            "weights_bytes": model.file_bytes,
            "counted": model.counted,
            "offload_path_bytes": packed,
            "why": plan.disk_why,
        },
        "configuration": config.to_dict(),
    }


def memory_table(found: dict[str, Any]) -> Table:
    """What lies where, as a table."""
    memory, slots, experts, disk = found["memory"], found["slots"], found["experts"], found["disk"]
    out = Table(
        title=f"{found['model']}, {found['dtype']}, from {found['read_from']}",
        title_justify="left",
        caption=f"Transport {found['transport']['name']}: {found['transport']['why']}",
        caption_justify="left",
    )
    out.add_column("where")
    out.add_column("what")
    out.add_column("bytes", justify="right", no_wrap=True)
    out.add_column("", justify="right", no_wrap=True)
    out.add_column("note", style="dim")

    def line(where, what, nbytes, note="", end=False):
        out.add_row(where, what, f"{nbytes:,}", size(nbytes), note, end_section=end)

    everything = experts["layers"] * experts["per_layer"]
    formats = " and ".join(dict.fromkeys(experts["format"].values()))
    line("device", "dense weights", memory["dense_bytes"], "all but the experts")
    line("", "KV pages", memory["kv_bytes"], f"{memory['kv_pages']} pages of {found['configuration']['page_size']}")
    line("", "states", memory["state_bytes"], "of the largest batch")
    line("", "workspace", memory["workspace_bytes"], "activations and XLA's scratch, a fixed sum; none on a CPU")
    line("", "staging rows", memory["staging_bytes"], "experts that long prompts move ahead of need")
    if memory["prefetch_bytes"]:
        line("", "prefetched rows", memory["prefetch_bytes"], "parts of experts that decode steps stage, at most")
    note = f"{slots['total']} of {everything} experts, {slots['share']:.1%}; {slots['source']}"
    line("", "expert slots", memory["slot_bytes"], note)
    line("", "spare rows", memory["spare_bytes"], f"{found['spare_rows']} rows", end=True)
    allowed = found["allowed_device_bytes"]
    ratio = found["configuration"]["device_memory_ratio"]
    bound = "no bound: no GPU here and no --device-memory"
    if allowed is not None:
        bound = f"{size(allowed)} allowed, {ratio} of the {size(memory['device_bytes'])} that jax may use"
    line("", "in all", found["total_device_bytes"], bound, end=True)
    note = f"{everything} experts of {size(experts['bytes_each'])}, {formats}"
    if not memory["pool_bytes"]:
        note = "all experts are on the device"
    elif found["host_bytes"]:
        note += f"; {runtime.PINNED_SHARE:.0%} of {size(found['host_bytes'])} may be pinned"
    if disk["why"]:
        note = f"{disk['why']}; the others are read from disk when they are needed"
    line("host", "pinned pool", memory["pool_bytes"], note)
    note = "kept by XLA to move arrays to a GPU, by the largest dense array; none on a CPU"
    line("", "transfers", memory["transfer_bytes"], note, end=True)
    read = "; all but the experts" if disk["why"] else ";"
    read = f"{read} read in {disk['load_seconds']:.0f} s at the rate given" if "load_seconds" in disk else ""
    line("disk", "weights", disk["weights_bytes"], ("counted" if disk["counted"] else "about") + read)
    if disk["offload_path_bytes"]:
        line("", "packed rows", disk["offload_path_bytes"], "offload_path")
    return out


def estimate_table(found: dict[str, Any]) -> Table:
    """The estimates as a table."""
    speed = found["estimate"]
    link, memory, disk = speed["link"], speed["memory"], ""
    if found["disk"]["why"]:
        disk = " The disk's time is not counted: name its rate, --disk-gbps."
        if speed["disk_gbps"] is not None:
            disk = (
                f" Host memory misses {speed['disk_share']:.0%} of what is moved, read at {speed['disk_gbps']:g} GB/s."
            )
    out = Table(
        title=f"ESTIMATE, not a measurement: decode of one sequence with {speed['context']} tokens in its cache",
        title_justify="left",
        caption=f"Link {link['gbps']:g} GB/s ({link['source']}) at {link['efficiency']:.0%}, memory "
        f"{memory['gbps']:g} GB/s ({memory['source']}) at {memory['efficiency']:.0%} of the rate. Which hit rate a "
        "cache has depends on text and policy; routing without any pattern hits as often as the share of slots. The "
        f"time to start kernels is not counted: a tiny model is slower.{disk}",
        caption_justify="left",
    )
    reads = ("read a token", "disk ms") if disk else ()
    for name in ("hit rate", "moved a token", "link floor ms", "memory floor ms", *reads, "ms a token", "tok/s"):
        out.add_column(name, justify="right", no_wrap=name == "hit rate")
    for row in speed["rows"]:
        out.add_row(
            f"{row['hit_rate']:.1%}" + (" = slots" if row["hit_rate"] == found["slots"]["share"] else ""),
            size(row["bytes_moved"]),
            f"{row['link_floor_ms']:.2f}",
            f"{row['memory_floor_ms']:.2f}",
            *((size(row["bytes_read"]), "-" if row["disk_ms"] is None else f"{row['disk_ms']:.2f}") if disk else ()),
            f"{row['ms_per_token']:.2f}",
            f"{row['tokens_per_second']:.1f}",
        )
    return out


def device_limit(card: str | None) -> int | None:
    """Bytes that jax may use of a card of that size, or of this machine's; None without either."""
    if card is None:
        return device_bytes()
    share = os.environ.get(runtime.DEVICE_FRACTION, str(runtime.DEVICE_SHARE))
    return int(float(share) * parse_bytes("--device-memory", card))


def _share(name: str, value: float) -> float:
    return real(name, value, "a number above 0 and up to 1", lambda v: 0 < v <= 1)


def _rate(name: str, value: float | None, default: float) -> tuple[float, str]:
    if value is None:
        return default, ASSUMED
    return real(name, value, "a positive rate in GB/s", lambda v: v > 0), "given"


@app.command(epilog="Exit codes: 0 it fits, 2 it does not, or an option is wrong: standard error says what helps.")
def main(
    model: Annotated[str, typer.Argument(help="Directory with a config.json, or a release, such as qwen3-30b-a3b.")],
    device_memory: Annotated[
        str | None, typer.Option(help="Memory of the card, such as 80GiB; jax takes 92 % of it. Default: this GPU.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Host memory, such as 128GiB. Default: this machine's.")
    ] = None,
    device_memory_ratio: Annotated[float | None, typer.Option(help="Share of device memory to use.")] = None,
    kv_cache_ratio: Annotated[float | None, typer.Option(help="Share of device memory for KV pages.")] = None,
    expert_slots: Annotated[int | None, typer.Option(help="Expert slots of all layers together.")] = None,
    cache_rate: Annotated[float | None, typer.Option(help="Share of all experts that have a slot.")] = None,
    expert_cache_bytes: Annotated[str | None, typer.Option(help="Bytes for slots, such as 12GB.")] = None,
    host_memory_bytes: Annotated[
        str | None, typer.Option(help="Host bytes for experts, such as 50GB; the others stay on disk.")
    ] = None,
    scope: Annotated[str | None, typer.Option(help="layer or global.")] = None,
    transport: Annotated[str | None, typer.Option(help="auto, device, callback or resident.")] = None,
    max_batch: Annotated[int | None, typer.Option(help="Most sequences that run together.")] = None,
    max_sequence_length: Annotated[int | None, typer.Option(help="Longest prompt and output, in tokens.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Compute dtype. Default: the checkpoint's.")] = None,
    config: Annotated[str | None, typer.Option(help="JSON file of configuration keys; options override it.")] = None,
    hit_rate: Annotated[list[float] | None, typer.Option(help="Hit rate to estimate for; may be repeated.")] = None,
    context: Annotated[int, typer.Option(help="Tokens in the cache of the estimated step.")] = CONTEXT,
    link_gbps: Annotated[float | None, typer.Option(help=f"Host to device. Default: {LINK_GBPS}, {ASSUMED}.")] = None,
    memory_gbps: Annotated[
        float | None, typer.Option(help=f"Device memory. Default: {MEMORY_GBPS:g}, {ASSUMED}.")
    ] = None,
    disk_gbps: Annotated[
        float | None, typer.Option(help="Disk: for the time of loading, and of experts that stay on it.")
    ] = None,
    link_efficiency: Annotated[float, typer.Option(help="Share of the link's rate that is reached.")] = LINK_EFFICIENCY,
    memory_efficiency: Annotated[
        float, typer.Option(help="Share of the memory's rate that is reached.")
    ] = MEMORY_EFFICIENCY,
    json_path: Annotated[str | None, typer.Option("--json", help="Write plan and estimates here.")] = None,
) -> None:
    """Plans a model's memory and estimates its speed, without loading it."""
    given = {
        "device_memory_ratio": device_memory_ratio,
        "kv_cache_ratio": kv_cache_ratio,
        "expert_slots": expert_slots,
        "cache_rate": cache_rate,
        "expert_cache_bytes": expert_cache_bytes,
        "host_memory_bytes": host_memory_bytes,
        "scope": scope,
        "transport": transport,
        "max_batch": max_batch,
        "max_sequence_length": max_sequence_length,
        "dtype": dtype,
    }
    try:
        settings = OffloadConfig.parse(config).replace(**{k: v for k, v in given.items() if v is not None})
        link, link_source = _rate("--link-gbps", link_gbps, LINK_GBPS)
        memory, memory_source = _rate("--memory-gbps", memory_gbps, MEMORY_GBPS)
        efficiency = {
            "link_efficiency": _share("--link-efficiency", link_efficiency),
            "memory_efficiency": _share("--memory-efficiency", memory_efficiency),
        }
        for value in hit_rate or ():
            real("--hit-rate", value, "a number from 0 to 1", lambda v: 0 <= v <= 1)
        if context < 1:
            raise ConfigError(f"--context={context}: give at least one token")
        if json_path is not None:
            check_writable("--json", Path(json_path))
        host = runtime.host_memory_bytes() or None
        if host_memory is not None:
            host = parse_bytes("--host-memory", host_memory)
        source = read_model(model, settings)
        plan = plan_memory(
            source.cfg,
            source.dtype,
            settings,
            source.spec,
            dense_bytes=source.dense_bytes,
            largest_dense_bytes=source.largest_dense_bytes,
            device_bytes=device_limit(device_memory),
            host_bytes=host,
        )
        found = describe(source, plan, settings, host)
        if disk_gbps is not None:
            _rate("--disk-gbps", disk_gbps, disk_gbps)
            loaded = source.file_bytes if plan.disk_why is None else source.dense_bytes
            found["disk"]["load_seconds"] = loaded / disk_gbps / 1e9
        rates = sorted({*(hit_rate or HIT_RATES), found["slots"]["share"]})
        rows = decode_estimates(
            source,
            plan,
            Ceilings(link, memory, link_source, memory_source),
            hit_rates=rates,
            context=context,
            disk_gbps=disk_gbps,
            **efficiency,
        )
        found["estimate"] = {
            "context": min(context, plan.max_sequence_length - 1),
            "link": {"gbps": link, "source": link_source, "efficiency": link_efficiency},
            "memory": {"gbps": memory, "source": memory_source, "efficiency": memory_efficiency},
            "disk_gbps": disk_gbps,
            "disk_share": disk_share(plan, source.spec),
            "rows": rows,
        }
        if json_path is not None:
            write_json(Path(json_path), found)
    except (MoEJaxError, OSError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(EXIT_USAGE) from error
    console = Console()
    console.print(memory_table(found))
    console.print(estimate_table(found))


if __name__ == "__main__":
    app()
