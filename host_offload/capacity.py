"""How many expert slots the device gets, and how they are shared between layers.

Shape letters: L MoE layers, E experts a layer. All sizes are bytes.
"""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np


@dataclasses.dataclass(frozen=True)
class SlotBudget:
    """The number of expert slots and their division.

    total: slots of all MoE layers together. per_layer: the L quotas, each 1..E, summing to `total`; empty in scope
    `global`, where any expert may use any slot. row_bytes: size of one slot. scope: `layer` or `global`. source: what
    was chosen and why, for the log and the memory plan.
    """

    total: int
    per_layer: tuple[int, ...]
    L: int
    row_bytes: int
    scope: str
    source: str

    @property
    def nbytes(self):
        """Bytes of all slots, spare rows not included."""
        return self.total * self.row_bytes

    @property
    def capacities(self):
        """[L] int32, what `plan_event` takes as `capacity` at each layer: its quota, or the total in scope `global`."""
        return np.array(self.per_layer or (self.total,) * self.L, np.int32)


def resolve_slots(
    *,
    L,
    E,
    row_bytes,
    expert_slots=None,
    cache_rate=None,
    expert_cache_bytes=None,
    device_bytes=None,
    device_memory_ratio=0.9,
    reserved_bytes=0,
    scope="layer",
):
    """Decides the slots from at most one of three requests, or from the memory that is left.

    The total is `expert_slots`, floor(`cache_rate` * L * E), floor(`expert_cache_bytes` / `row_bytes`), or with none of
    them floor((`device_memory_ratio` * `device_bytes` - `reserved_bytes`) / `row_bytes`), or every expert if
    `device_bytes` is unknown too. It never exceeds L * E. In scope `layer` each layer gets floor(total / L), the
    remainder goes one each to the lowest layers.

    Args:
        L, E: MoE layers and experts a layer.
        row_bytes: bytes of one expert in its slot.
        expert_slots: slots of all layers together, or a list of L quotas (scope `layer` only).
        cache_rate: share of all experts, above 0 and up to 1.
        expert_cache_bytes: bytes for slots.
        device_bytes: memory of the device, None if unknown (CPU). If known, it bounds every request.
        device_memory_ratio: share of `device_bytes` that may be used at all, above 0 and up to 1.
        reserved_bytes: what else must fit in that share: dense weights, KV cache, workspace, spare rows.
        scope: `layer` or `global`.

    Returns:
        A `SlotBudget`.

    Raises:
        ValueError: a bad value, two requests at once, fewer slots than one a layer (one at all in scope `global`), or
            more than fits; the message names the field and value and says what would do.
    """
    for name, value, low in (
        ("L", L, 1),
        ("E", E, 1),
        ("row_bytes", row_bytes, 1),
        ("reserved_bytes", reserved_bytes, 0),
    ):
        _check_int(name, value, low)
    if scope not in ("layer", "global"):
        raise ValueError(f"scope: {scope!r} is neither 'layer' nor 'global'")
    ratio = _fraction("device_memory_ratio", device_memory_ratio)
    everything = L * E
    free = None
    if device_bytes is not None:
        _check_int("device_bytes", device_bytes, 1)
        free = math.floor(ratio * device_bytes) - reserved_bytes

    requests = {"expert_slots": expert_slots, "cache_rate": cache_rate, "expert_cache_bytes": expert_cache_bytes}
    given = {name: value for name, value in requests.items() if value is not None}
    if len(given) > 1:
        raise ValueError(
            f"give only one of {', '.join(requests)}; got {', '.join(f'{k}={v}' for k, v in given.items())}"
        )

    quotas = None
    memory = f"device_memory_ratio {device_memory_ratio} of {device_bytes} device bytes, less {reserved_bytes} reserved"
    if expert_slots is not None:
        if isinstance(expert_slots, Sequence | np.ndarray) and not isinstance(expert_slots, str):
            quotas = _check_quotas(expert_slots, L, E, scope)
            total = sum(quotas)
        else:
            _check_int("expert_slots", expert_slots, 1)
            total = int(expert_slots)
        source = f"expert_slots={expert_slots}"
    elif cache_rate is not None:
        total = math.floor(_fraction("cache_rate", cache_rate) * everything)
        source = f"cache_rate={cache_rate} of {everything} experts"
    elif expert_cache_bytes is not None:
        _check_int("expert_cache_bytes", expert_cache_bytes, 1)
        total = int(expert_cache_bytes) // row_bytes
        source = f"expert_cache_bytes={expert_cache_bytes} at {row_bytes} bytes an expert"
    elif free is not None:
        total = max(free, 0) // row_bytes
        source = memory
    else:
        total = everything
        source = "all experts: neither a slot count nor the device memory was given"
    if total > everything:
        source += f", capped at all {everything} experts"
        total = everything

    fewest = L if scope == "layer" else 1
    if total < fewest:
        raise ValueError(
            f"{source}: gives {total} expert slots, but scope {scope!r} needs at least {fewest} "
            f"({fewest * row_bytes} bytes); raise it"
            + (", lower reserved_bytes" if not given else "")
            + (" or use scope 'global'" if scope == "layer" and total >= 1 else "")
        )
    if free is not None and total * row_bytes > free:
        fitting = max(free, 0) // row_bytes
        remedy = f"{fitting} slots would fit" if fitting >= fewest else f"not even {fewest} slots fit"
        raise ValueError(
            f"{source}: {total} expert slots take {total * row_bytes} bytes, {total * row_bytes - free} more than "
            f"{memory}, leaves ({free}); {remedy}"
        )
    if scope == "global":
        quotas = ()
    elif quotas is None:
        share, remainder = divmod(total, L)
        quotas = tuple(share + (layer < remainder) for layer in range(L))
    return SlotBudget(total=total, per_layer=quotas, L=int(L), row_bytes=int(row_bytes), scope=scope, source=source)


def _check_int(name, value, low):
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
        raise ValueError(f"{name}: {value!r} is not an integer of at least {low}")


def _fraction(name, value):
    """The exact decimal that was written, so that 0.29 of 100 is 29 and not floor(28.999...)."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number | Fraction) or not 0 < value <= 1:
        raise ValueError(f"{name}: {value!r} is not a share above 0 and up to 1")
    return Fraction(str(value))


def _check_quotas(quotas, L, E, scope):
    if scope == "global":
        raise ValueError("expert_slots: a list of quotas needs scope 'layer'; give one number for scope 'global'")
    if len(quotas) != L:
        raise ValueError(
            f"expert_slots: {len(quotas)} quotas for {L} MoE layers: give one number a MoE layer, or one integer, "
            "the total"
        )
    for layer, quota in enumerate(quotas):
        _check_int(f"expert_slots[{layer}]", quota, 1)
        if quota > E:
            raise ValueError(f"expert_slots[{layer}]: {quota} slots for {E} experts; give at most {E}")
    return tuple(int(quota) for quota in quotas)
