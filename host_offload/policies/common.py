"""Pieces that several policies share: exact integer priorities, fixed-point numbers, order in a queue.

NumPy and XLA round a product that is added to something differently (XLA may fuse the two), and the float32 of a clock
ties after 2^24. So policies here rank by integers: sums are kept in fixed point, every product is truncated before
it is added, and an integer key becomes a priority through its bits. Division is `host_offload/rounding.py`'s.
"""

import numpy as np

from host_offload.policy import set_row

# A priority key is tier * SPAN + place: up to seven tiers of 2^28 places, above the subnormals, below infinity.
SPAN = 2**28
_SMALLEST_NORMAL = 1 << 23


def from_key(xp, key):
    """float32 [n] that orders exactly as `key` [n] int32 does, for 0 <= key < 7 * SPAN: the key is its bit pattern."""
    return (key + _SMALLEST_NORMAL).astype(xp.int32).view(xp.float32)


def age_key(xp, tier, age):
    """int32 [n] that falls with `age` [n] int32, in ticks, within a `tier` [n] int (0..6), higher tiers above.

    Exact for ages below 2^28; older ones are equal.
    """
    return tier * SPAN + (SPAN - 1 - xp.clip(age, 0, SPAN - 1))


def by_age(xp, tier, age):
    """Priority float32 [n] in the order of `age_key`: higher `tier` first, within a tier the lower `age`."""
    return from_key(xp, age_key(xp, tier, age))


def truncated(xp, number, factor):
    """int32 [...]: `number` * `factor` towards zero. One float32 product, alike in NumPy and XLA."""
    return (number.astype(xp.float32) * factor).astype(xp.int32)


def in_scope(xp, state, layer, L):
    """[R, 1] bool: which rows of `competing` compete for the slots of an event at `layer`."""
    if "global" not in state:
        return xp.ones((1, 1), bool)
    return (xp.arange(L) == layer)[:, None] | state["global"]


def competing(state, layer, array):
    """[R, ...] rows of a state's `array` [L, ...] that may compete for the slots of an event at `layer`.

    All of them, unless the state has no entry "global": `Policy.bound` left it out because each layer has its own
    slots, and the layer's row alone will do, which saves L - 1 of L steps of every computation.
    """
    return array if "global" in state else array[layer][None]


def put_back(xp, state, layer, array, rows):
    """`array` [L, ...] with new `rows` [R, ...] in the places that `competing` took them from."""
    return rows if "global" in state else set_row(xp, array, layer, rows[0])


def count_before(xp, place, marked):
    """int32 [R, E]: how many `marked` [R, E] bool have a smaller `place` [R, E] int32, for 0 <= place < R * E.

    Places of the marked must differ. Linear: marks are written to their places, 32 of them are a word, and a running
    count needs the bits set in few words (a cumsum over all places takes XLA on a CPU twice as long).
    """
    n, W = place.size, -(-place.size // 32)
    if xp is np:
        at = np.zeros(n + 1, np.int32)
        at[place[marked] + 1] = 1
        return np.cumsum(at, dtype=np.int32)[np.maximum(place, 0)]
    at = xp.zeros((32 * W,), xp.uint32).at[xp.where(marked, place, 32 * W)].set(1, mode="drop").reshape(W, 32)
    bit = xp.arange(32, dtype=xp.uint32)
    words = (at << bit).sum(axis=1, dtype=xp.uint32)
    each, index = xp.bitwise_count(words).astype(xp.int32), xp.arange(W)
    before = xp.where(index[None, :] < index[:, None], each[None, :], 0).sum(axis=1, dtype=xp.int32)
    within = xp.bitwise_count(words[:, None] & ((xp.uint32(1) << bit) - 1)).astype(xp.int32)
    return (before[:, None] + within).reshape(-1)[xp.maximum(place, 0)]


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
