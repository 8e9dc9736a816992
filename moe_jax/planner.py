"""What goes where, in bytes, decided before anything is allocated.

`plan_memory` is the one place that divides a machine's memory. `MoE` asks it before it loads a weight, and
`experiments/plan.py` asks it without a GPU. On the device lie

    dense weights + KV pages + states + workspace + (slots + spare rows + staging rows) * row bytes
        <=  device_memory_ratio * memory

and in pinned host memory every expert, unless all of them have a slot (transport `resident`), or as many as fit, the
others on disk (`host_offload/disk_tier.py`). Beside them XLA keeps host memory for transfers to a GPU. Shape letters:
L MoE layers, E experts a layer. All sizes are bytes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from host_offload.capacity import SlotBudget, resolve_slots
from host_offload.disk_tier import rows_within, tier_bytes
from host_offload.prefetch import reserve_rows
from host_offload.prefetch.staging import AUTO_BUDGET, MOST_ROWS
from host_offload.slots import round_group, spare_rows
from host_offload.store import RowSpec
from host_offload.transport.lookahead import lookahead_rows
from moe_jax.config import CACHE_SIZE_KEYS, OffloadConfig
from moe_jax.engine.engine import power_of_two
from moe_jax.errors import ConfigError
from moe_jax.models.config import ModelConfig
from moe_jax.runtime import PINNED_SHARE

# Device memory for activations and XLA's scratch, beside what is counted exactly. A CPU has no such budget.
WORKSPACE_BYTES = 1 << 30
# Host memory that a disk tier takes unless told how much. Less than may be pinned: XLA's pinned memory grows in regions
# that double, and rows that are large cannot use the end of each.
TIER_SHARE = 0.8
# What KV pages may take where there is no device memory to take a share of.
CPU_KV_BYTES = 1 << 30


@dataclass(frozen=True)
class MemoryPlan:
    """Where the bytes of a model go; `plan_memory` makes it.

    transport, transport_why: the resolved transport and the reason. max_sequence_length: longest sequence in tokens.
    device_bytes: memory that jax may use on the device, None on a CPU. dense_bytes: parameters but the experts.
    kv_bytes, kv_pages: the KV pool with its trash page. state_bytes: states and kept sources of the largest batch.
    workspace_bytes: left for activations. staging_bytes: for rows that long prompts move ahead. prefetch_bytes: most
    for rows that the transport `device` stages. slots: the `SlotBudget`. spare_rows: rows beside the slots, in the
    transport `callback` those for prefetch included. pool_bytes: pinned host memory for experts. transfer_bytes: host
    memory that XLA keeps, on a GPU, for transfers of arrays to it.
    host_rows: experts that have a row there: all, none if resident, or some if the others are read from disk; disk_why:
    why these are, None if none is.
    """

    transport: str
    transport_why: str
    max_sequence_length: int
    device_bytes: int | None
    dense_bytes: int
    kv_bytes: int
    kv_pages: int
    state_bytes: int
    workspace_bytes: int
    staging_bytes: int
    prefetch_bytes: int
    slots: SlotBudget
    spare_rows: int
    pool_bytes: int
    transfer_bytes: int
    host_rows: int
    disk_why: str | None

    @property
    def reserved_bytes(self) -> int:
        """Device bytes for all but experts."""
        ahead = self.staging_bytes + self.prefetch_bytes
        return self.dense_bytes + self.kv_bytes + self.state_bytes + self.workspace_bytes + ahead

    @property
    def spare_bytes(self) -> int:
        """Device bytes of the spare rows."""
        return self.spare_rows * self.slots.row_bytes

    @property
    def total_device_bytes(self) -> int:
        """All device bytes."""
        return self.reserved_bytes + self.slots.nbytes + self.spare_bytes

    def fixed(self) -> dict[str, int | None]:
        """The part of `MoE.stats()["memory"]` that no change of the cache alters."""
        return {
            "dense_bytes": self.dense_bytes,
            "kv_bytes": self.kv_bytes,
            "kv_pages": self.kv_pages,
            "state_bytes": self.state_bytes,
            "workspace_bytes": self.workspace_bytes,
            "transfer_bytes": self.transfer_bytes,
            "device_bytes": self.device_bytes,
        }

    def memory(self) -> dict[str, int | None]:
        """What `MoE.stats()["memory"]` says after a load by this plan."""
        return self.fixed() | {
            "slot_bytes": self.slots.nbytes,
            "spare_bytes": self.spare_bytes,
            "staging_bytes": self.staging_bytes,
            "prefetch_bytes": self.prefetch_bytes,
            "pool_bytes": self.pool_bytes,
        }


def params_bytes(params: Mapping[str, Any]) -> int:
    """Bytes of a nested dict of arrays or of `jax.ShapeDtypeStruct`."""
    return sum(_array_bytes(params))


def largest_bytes(params: Mapping[str, Any]) -> int:
    """Bytes of the largest array of such a dict, 0 of an empty one."""
    return max(_array_bytes(params), default=0)


def _array_bytes(params: Mapping[str, Any]) -> list[int]:
    return [math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(params)]


def max_pairs(cfg: ModelConfig, config: OffloadConfig) -> int:
    """Most token-expert pairs of a decode step."""
    return power_of_two(config.max_batch) * cfg.num_experts_per_tok


def prefetch_rows(cfg: ModelConfig, config: OffloadConfig, spec: RowSpec) -> int:
    """Rows for prefetched experts: in the transport `callback` of the bank, in `device` beside it.

    Raises ConfigError for a budget that not even one expert fits in, in `callback`, which fetches whole rows.
    """
    if not config.prefetch:
        return 0
    if config.transport == "device":
        return staged_rows(spec, staging_budget(config))
    if config.prefetch_budget != "auto" and config.prefetch_budget < spec.row_bytes:
        raise ConfigError(
            f"prefetch_budget={config.prefetch_budget}: an expert takes {spec.row_bytes} bytes, so nothing would be "
            "prefetched; give at least that, or 'auto'"
        )
    return reserve_rows(spec.L, spec.E, cfg.num_experts_per_tok)


def staging_budget(config: OffloadConfig) -> int:
    """Bytes that the transport `device` may stage for an event."""
    return AUTO_BUDGET if config.prefetch_budget == "auto" else config.prefetch_budget


def staged_rows(spec: RowSpec, budget: int) -> int:
    """P: how many experts of an event are staged for `budget` bytes, one if they cannot be staged whole."""
    return min(MOST_ROWS, spec.E, max(1, budget // spec.row_bytes))


def plan_memory(
    cfg: ModelConfig,
    dtype: np.dtype,
    config: OffloadConfig,
    spec: RowSpec,
    *,
    dense_bytes: int,
    largest_dense_bytes: int,
    device_bytes: int | None,
    host_bytes: int | None = None,
) -> MemoryPlan:
    """Divides memory between weights, caches and experts.

    Args:
        cfg, dtype: the model and its compute dtype.
        spec: rows of its experts.
        dense_bytes: bytes of its other parameters, see `params_bytes`; largest_dense_bytes: of the largest array among
            them, see `largest_bytes`.
        device_bytes: memory that jax may use on the device; None (CPU) bounds nothing.
        host_bytes: memory of the host, None if unknown; expert rows and transfers may take `runtime.PINNED_SHARE` of
            it, the rows no more than `config.host_memory_bytes`. If they do not fit, there are as many rows as
            `TIER_SHARE`, less the transfers, or that number holds.

    Raises:
        ConfigError: lengths that do not fit the model, contradicting settings, or what does not fit: by how many
            bytes, and what would help.
    """
    longest, pages = _kv_pages(cfg, dtype, config, device_bytes)
    source = power_of_two(longest) * cfg.source_bytes_per_token(dtype)
    parts = {
        "dense_bytes": dense_bytes,
        "kv_bytes": pages * cfg.kv_page_bytes(config.page_size, dtype),
        "state_bytes": power_of_two(config.max_batch) * (cfg.state_bytes(dtype) + source),
        "workspace_bytes": WORKSPACE_BYTES if device_bytes else 0,
    }
    spare = spare_rows(spec, max_pairs(cfg, config), round_group(spec))
    reserved = sum(parts.values())
    experts = spec.L * spec.E * spec.row_bytes
    transport, why = _choose_transport(config, device_bytes, reserved + spare * spec.row_bytes + experts)
    # XLA's allocator of pinned memory for transfers grows by regions of powers of two. One data point, of an H200:
    # 1 GiB and 11 MB where the largest dense array (an embedding, 151936 x 2048 bfloat16) has 622 MB.
    transfer = power_of_two(largest_dense_bytes) if device_bytes is not None else 0
    pool_bytes, host_rows, disk_why = _plan_host(config, spec, transport, spare, host_bytes, transfer)
    staged = 0
    if config.transport == "device":
        staged = prefetch_rows(cfg, config, spec)
    else:
        spare += prefetch_rows(cfg, config, spec)
    if disk_why is not None and config.transport == "auto":
        transport, why = "callback", f"{disk_why}; the host reads the others from disk"
    config = config.replace(transport=transport)
    staging = 0 if transport == "resident" or disk_why is not None else _staging_rows(config, spec, device_bytes)
    parts["staging_bytes"], parts["prefetch_bytes"] = staging * spec.row_bytes, staged * spec.row_bytes
    reserved += parts["staging_bytes"] + parts["prefetch_bytes"]
    if device_bytes is not None:
        _check_device(config, spec, parts, spare, device_bytes)
    return MemoryPlan(
        transport=transport,
        transport_why=why,
        max_sequence_length=longest,
        device_bytes=device_bytes,
        kv_pages=pages,
        slots=slot_budget(config, spec, reserved + spare * spec.row_bytes, device_bytes),
        spare_rows=spare,
        pool_bytes=pool_bytes,
        transfer_bytes=transfer,
        host_rows=host_rows,
        disk_why=disk_why,
        **parts,
    )


def slot_budget(config: OffloadConfig, spec: RowSpec, reserved_bytes: int, device_bytes: int | None) -> SlotBudget:
    """The slots of a configuration whose transport is resolved; `reserved_bytes` is all else on the device.

    Raises ConfigError.
    """
    sizes = {key: getattr(config, key) for key in CACHE_SIZE_KEYS}
    if config.transport == "resident":
        given = [key for key, value in sizes.items() if value is not None]
        if given:
            raise ConfigError(f"transport='resident' holds all experts; leave out {', '.join(given)}")
        sizes = {"cache_rate": 1.0}
    try:
        return resolve_slots(
            L=spec.L,
            E=spec.E,
            row_bytes=spec.row_bytes,
            device_bytes=device_bytes,
            device_memory_ratio=config.device_memory_ratio,
            reserved_bytes=reserved_bytes,
            scope=config.scope,
            **sizes,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _kv_pages(cfg, dtype, config: OffloadConfig, device_bytes: int | None) -> tuple[int, int]:
    """(longest sequence in tokens, pages of the KV pool with the trash page)."""
    if cfg.encoder_decoder and config.prefill_chunk is not None:
        raise ConfigError(
            f"prefill_chunk={config.prefill_chunk}: an encoder-decoder takes sources and targets whole, since an "
            "expert's capacity is a share of all tokens; leave it out"
        )
    longest = config.max_sequence_length or cfg.max_position_embeddings
    if longest > cfg.max_position_embeddings:
        raise ConfigError(
            f"max_sequence_length={longest}: the model was made for {cfg.max_position_embeddings} positions "
            "(max_position_embeddings); ask for at most that"
        )
    room = int(config.kv_cache_ratio * device_bytes) if device_bytes else CPU_KV_BYTES
    fitting = room // cfg.kv_page_bytes(config.page_size, dtype) * config.page_size
    tokens = min(config.max_batch * longest, max(longest, fitting))
    # A page more a sequence, as each one's last page is partly filled.
    return longest, -(-tokens // config.page_size) + config.max_batch + 1


def _choose_transport(config: OffloadConfig, device_bytes: int | None, resident_bytes: int) -> tuple[str, str]:
    """(transport, why): "auto" is `resident` where no size was asked for and all fits, else `device`."""
    if config.transport != "auto":
        return config.transport, "as configured"
    if config.prefetch:
        return "callback", "prefetch is asked for, and the host does it"
    sized = any(getattr(config, key) is not None for key in CACHE_SIZE_KEYS)
    if not sized and device_bytes and resident_bytes <= config.device_memory_ratio * device_bytes:
        return "resident", "all experts fit in device memory and no cache size was asked for"
    return "device", "experts are offloaded; the policy runs in the graph"


def _staging_rows(config: OffloadConfig, spec: RowSpec, device_bytes: int | None) -> int:
    """Rows of staging memory: as configured, or `lookahead_rows` on a GPU and none where copies take the processor."""
    if config.lookahead_rows is not None:
        return min(config.lookahead_rows, spec.E)
    return lookahead_rows(spec) if device_bytes is not None else 0


def _check_device(config: OffloadConfig, spec: RowSpec, parts: Mapping[str, int], spare: int, device_bytes: int):
    """Refuses a device that does not even hold the fewest slots beside the rest."""
    fewest = spec.L * spec.E if config.transport == "resident" else spec.L if config.scope == "layer" else 1
    allowed = math.floor(config.device_memory_ratio * device_bytes)
    needed = sum(parts.values()) + (spare + fewest) * spec.row_bytes
    short = needed - allowed
    if short <= 0:
        return
    gains = {}  # what would help -> the most bytes that it can give
    if device_bytes > allowed:
        ratio = min(1.0, math.ceil(needed / device_bytes * 1000) / 1000)
        gains[f"device_memory_ratio={ratio}"] = device_bytes - allowed
    if config.transport == "resident":
        gains["transport='device', which leaves experts in host memory"] = (fewest - spec.L) * spec.row_bytes
    elif fewest > 1:
        gains["scope='global', which needs one slot"] = (fewest - 1) * spec.row_bytes
    gains["a smaller max_sequence_length, max_batch or kv_cache_ratio"] = parts["kv_bytes"] + parts["state_bytes"]
    gains["experts in a smaller format (python -m moe_jax.convert)"] = (fewest + spare) * spec.row_bytes
    alone = {text: n for text, n in gains.items() if n >= short}
    if sum(gains.values()) < short:
        advice = f"a device with {needed} bytes; no setting frees so many"
    else:
        joint, helps = (", or ", alone) if alone else (", together with ", gains)
        advice = joint.join(f"{text} (at most {n} bytes)" for text, n in helps.items() if n)
    names = ", ".join(f"{name.removesuffix('_bytes')} {nbytes}" for name, nbytes in parts.items())
    raise ConfigError(
        f"device memory is {short} bytes too small: {needed} are needed ({names}, {spare} spare rows "
        f"{spare * spec.row_bytes}, {fewest} slots {fewest * spec.row_bytes}), and device_memory_ratio="
        f"{config.device_memory_ratio} of {device_bytes} allows {allowed}. What helps: {advice}"
    )


def _plan_host(
    config: OffloadConfig, spec: RowSpec, transport: str, spare: int, host_bytes: int | None, transfer: int
) -> tuple[int, int, str | None]:
    """(pinned bytes, experts with a row in them, why not all if the others are to be read from disk).

    Of the machine's share transfers take `transfer` bytes; `config.host_memory_bytes` is for experts alone. A disk tier
    must hold what is under way at a time: two rounds of a prompt, or all that one decode step can miss, which is what
    the bank's spare rows hold too.
    """
    if transport == "resident":
        return 0, 0, None
    everything = spec.L * spec.E
    experts = everything * spec.row_bytes

    def left(share):  # of the machine, for experts
        return max(0, math.floor(share * host_bytes) - transfer) if host_bytes else math.inf

    def named(share):
        less = f" (less {transfer} for transfers to the device)" if transfer else ""
        return f"{share:.0%} of {host_bytes} bytes of host memory{less}"

    machine = left(PINNED_SHARE)
    given = math.inf if config.host_memory_bytes is None else config.host_memory_bytes
    if experts <= min(given, machine):
        return experts, everything, None
    if machine < given < math.inf:
        raise ConfigError(
            f"host_memory_bytes={given} is more than {named(PINNED_SHARE)}: give at most {machine}, or leave it out"
        )
    needs_all = config.transport not in ("auto", "callback")
    text, limit = f"host_memory_bytes={given}", given
    if given == math.inf:
        share = PINNED_SHARE if needs_all else TIER_SHARE
        text, limit = named(share), left(share)
    if needs_all:
        raise ConfigError(
            f"host memory is {experts - limit} bytes too small: the experts take {experts}, and {text} allows {limit}. "
            f"What helps: transport='callback', which reads from disk what host memory does not hold, experts in a "
            "smaller format (python -m moe_jax.convert), or more memory"
        )
    rows = rows_within(spec, limit)
    if rows < spare:
        raise ConfigError(
            f"host memory is {tier_bytes(spec, spare) - limit} bytes too small: {text} allows {limit}, which hold "
            f"{rows} experts, and a prompt or a decode step of max_batch={config.max_batch} may need {spare} at a "
            f"time: set host_memory_bytes to at least {tier_bytes(spec, spare)}"
            + (", or a smaller max_batch" if spare > 2 * round_group(spec) else "")
        )
    return tier_bytes(spec, rows), rows, f"{rows} of {everything} experts fit into {text}"
