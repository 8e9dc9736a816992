"""Pieces that several policies share: exact integer priorities, fixed-point numbers, order in a queue.

NumPy and XLA round a product that is added to something differently (XLA may fuse the two), and the float32 of a clock
ties after 2^24. So policies here rank by integers: sums are kept in fixed point, every product is truncated before
it is added, and an integer key becomes a priority through its bits.
"""

import numpy as np

# A priority key is tier * SPAN + place: up to seven tiers of 2^28 places, above the subnormals, below infinity.
SPAN = 2**28
_SMALLEST_NORMAL = 1 << 23


def from_key(xp, key):
    """float32 [n] that orders exactly as `key` [n] int32 does, for 0 <= key < 7 * SPAN: the key is its bit pattern."""
    return (key + _SMALLEST_NORMAL).astype(xp.int32).view(xp.float32)


def by_age(xp, tier, age):
    """Priority float32 [n]: higher `tier` [n] int (0..6) first, within a tier the lower `age` [n] int32, in ticks.

    Exact for ages below 2^28; older ones are equal.
    """
    return from_key(xp, tier * SPAN + (SPAN - 1 - xp.clip(age, 0, SPAN - 1)))


def truncated(xp, number, factor):
    """int32 [...]: `number` * `factor` towards zero. One float32 product, alike in NumPy and XLA."""
    return (number.astype(xp.float32) * factor).astype(xp.int32)


def in_scope(xp, state, layer):
    """[L, E] or [L, 1] bool: what competes for the slots of an event at `layer`; `state["global"]` is from `bound`."""
    L = state["place"].shape[0]
    return (xp.arange(L) == layer)[:, None] | state["global"]


def requeue(xp, place, resident, passed):
    """Places in the queue [L, E] int32 at the end of an event, 0, 1, ... in order, -1 for absent experts.

    `place` [L, E] int32 before; `passed` [L, E] bool go behind the others in their order; residents without a place,
    the newcomers, follow by falling id. Linear in L * E: a table of the raw places is counted through.
    """
    n = place.size
    ids = xp.arange(n, dtype=xp.int32).reshape(place.shape)
    raw = xp.where(place < 0, 2 * n + (n - 1 - ids), place + xp.where(passed, n, 0))
    if xp is np:
        taken = np.zeros(3 * n, np.int32)
        taken[raw[resident]] = 1
    else:
        taken = xp.zeros((3 * n,), xp.int32).at[xp.where(resident, raw, 3 * n)].set(1, mode="drop")
    return xp.where(resident, xp.cumsum(taken, dtype=xp.int32)[raw] - 1, -1)


def check_share(policy, name, value, low, high):
    """Returns `value` as float; raises ValueError, naming policy and parameter, unless low <= value <= high."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not low <= value <= high:
        raise ValueError(f"{policy} policy: {name} is {value!r}, expected a number from {low} to {high}")
    return float(value)


def check_count(policy, name, value):
    """Returns `value` as int; raises ValueError, naming policy and parameter, unless it is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{policy} policy: {name} is {value!r}, expected an integer of at least 1")
    return int(value)
