"""The slot cache: banks of expert rows on the device and the arrays that say who is where.

All of it is one pytree that a jitted step takes, updates and returns (donate it). C logical slots plus R spare rows: a
missing expert of a decode step is always written to a row that is free at the start of its event, see `plan.py`; a
prefill event reuses rows while it runs, see `schedule.py`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

HITS, MISSES, BYPASSES, EVICTIONS = range(4)

# A prefill round moves about this much: long enough to keep the link busy, small enough to spare device memory.
ROUND_BYTES = 64 << 20


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["banks", "slot_of", "owner", "resident", "counters", "policy", "step", "error", "ahead", "record"],
    meta_fields=[],
)
@dataclass(frozen=True)
class SlotCache:
    """Device state of expert offloading.

    banks: row tensor name -> [rows, *shape]. slot_of: [L, E] int32 row of each resident expert, -1 if absent. owner:
    [rows] int32, `l * E + e` or -1. resident: [1] int32 occupied rows. counters: [L, 4] int32 hits, misses, bypasses,
    evictions since the last call. policy: the policy's state. step: int32 scalar, steps so far (the event clock is
    step * L + layer). error: [1] int32, 1 after a fault in a callback. ahead: what a step with prefetch keeps of it
    (`transport/staged.py`), None without. record: routing of the running step, a tuple that grows by one entry a layer
    while a step is traced; empty between steps.
    In the callback transport the tables live on the host, and slot_of, owner, resident, counters and policy are None
    here.
    """

    banks: dict[str, jax.Array]
    slot_of: Any
    owner: Any
    resident: Any
    counters: Any
    policy: Any
    step: jax.Array
    error: jax.Array
    ahead: Any = None
    record: tuple = ()


def empty_banks(spec, rows: int) -> dict[str, jax.Array]:
    """Zeroed banks of `rows` rows on the default device."""
    return {name: jnp.zeros((rows, *shape), dtype) for name, (shape, dtype) in spec.tensors.items()}


def round_group(spec) -> int:
    """G, missing experts a prefill round: about 64 MiB, between 1 and half a layer's experts."""
    return int(np.clip(ROUND_BYTES // spec.row_bytes, 1, max(1, spec.E // 2)))


def spare_rows(spec, pairs: int, group: int) -> int:
    """R: what one event may write beside the slots: decode steps of `pairs` = B * K, prefill rounds of `group`."""
    return max(min(spec.E, pairs), 2 * group)


def control_vector(budget, forced_admit: bool) -> np.ndarray:
    """[L + 2] int32: capacity of each layer (under global scope the total, L times), global scope, forced admission."""
    return np.array([*budget.capacities, budget.scope == "global", forced_admit], np.int32)
