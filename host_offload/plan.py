"""The slot plan of one event: which experts hit, which are moved where, which stay and which leave.

An event is one (step, MoE layer) with the set of experts that its rows need. It is served atomically: hits are decided
against the state at its start, every missing expert is written to a row that was free at its start (so nothing can be
overwritten before its use), and evictions take effect at its end. Shape letters: L MoE layers, E experts a layer,
rows = C slots + R spare rows. An expert's id is `layer * E + expert`.

The rule: candidates are the residents in scope and the needed experts; the `capacity` of highest retention key stay,
ties keep the lower id. The key is an integer image of the policy's float32 priority, so that NumPy and XLA on any
device order alike, subnormals included. Under the contract `atomic-forced-admit` needed experts get keys above every
priority, in the order in which they are processed. `_keep_traced` and `_dropped_ids` are the two ways to evaluate it:
as array operations of fixed shape for a compiled program, and over the few candidates that exist for NumPy.
"""

from typing import Any, NamedTuple

import numpy as np

from host_offload.policy import set_row

INT32_MAX = 2**31 - 1
INF_BITS = 0x7F800000  # float32 +inf; keys of numbers lie in [-INF_BITS, INF_BITS]
NAN_KEY = -INT32_MAX
ABSENT_KEY = -INT32_MAX - 1

# Up to this many candidates a compiled plan ranks by comparing all pairs (one fused reduction), above it sorts.
PAIRWISE_LIMIT = 1024


class Plan(NamedTuple):
    """The decision for one event; all arrays describe the state at its start.

    `hit`, `miss`, `admit` (missed and kept), `bypass` (missed, used, not kept): [E] bool. `dest` [E] int32: the row
    that a missing expert is written to, -1 for the others. `evict` [L*E] bool: residents that leave at the end of the
    event. `n_evicted`: int32 scalar. `layer`: the layer of the event.
    """

    layer: Any
    hit: Any
    miss: Any
    admit: Any
    bypass: Any
    dest: Any
    evict: Any
    n_evicted: Any


def plan_event(xp, *, need, slot_of, owner, priority, layer, capacity, global_scope, forced_admit, t, assign_rows=True):
    """Plans one event after the policy observed it.

    Args:
        xp: `numpy` or `jax.numpy`.
        need: [E] bool, the distinct experts that the event's rows need.
        slot_of: [L, E] int32, the row of each resident expert, -1 if absent.
        owner: [rows] int32, the id in each row, -1 if free; the inverse of `slot_of`.
        priority: `priority(layer [n] int32, expert [n] int32, t) -> float32 [n]`, higher = keep, NaN = lowest;
            `functools.partial(policy.priority, xp, state)`. NumPy does not call it if all candidates fit.
        layer: int or int32 scalar, static or traced.
        capacity: int or int32 scalar: slots of this layer, or of all layers when `global_scope`.
        global_scope: residents of all layers compete. A Python bool compiles for one scope, and `False` then looks at E
            candidates instead of L*E; a traced bool serves both scopes by one program.
        forced_admit: the contract, a Python or traced bool. False, `atomic-bypass`: needed experts compete like
            residents. True, `atomic-forced-admit`: all needed experts stay; if there are more than `capacity`, they are
            processed hits first, then misses, each in ascending order, and the last `capacity` of them stay.
        t: int32 scalar, the event clock, handed to `priority`.
        assign_rows: static; False leaves `dest` at -1 for an event that is served in rounds (`schedule.py`), which may
            miss more experts than there are free rows.

    Returns:
        A `Plan`; the j-th missing expert in ascending order is written to the j-th lowest free row.

    Raises:
        ValueError: wrong shapes or dtypes; under NumPy also too few free rows, a negative capacity, a layer out of
            range. In a compiled program the caller promises `rows >= residents + misses`; a missing row shows as
            `dest == rows`, which scatters of mode "drop" ignore.
    """
    L, E = slot_of.shape
    if need.shape != (E,) or need.dtype != bool:
        raise ValueError(f"need: expected bool of shape {(E,)}, got {need.dtype} of shape {need.shape}")
    if owner.ndim != 1 or owner.dtype != np.int32 or slot_of.dtype != np.int32:
        raise ValueError(
            f"owner and slot_of: expected int32 [rows] and [L, E], got {owner.dtype} {owner.shape} and {slot_of.dtype}"
        )
    if xp is np:
        settings = int(layer), int(capacity), global_scope, forced_admit
        return _plan_numpy(need, slot_of, owner, priority, *settings, t, assign_rows)

    row = slot_of[layer]  # [E]
    hit, miss = need & (row >= 0), need & (row < 0)
    forced = _forced_key(xp, hit, miss)
    if global_scope is False:  # static: only this layer's experts are candidates
        expert = xp.arange(E, dtype=xp.int32)
        key = _retention_key(xp, priority(xp.full_like(expert, layer), expert, t), E)
        key = xp.where(forced_admit & need, forced, key)
        kept = _keep_traced(xp, key, need | (row >= 0), capacity)
        admit = miss & kept
        leaving = (row >= 0) & ~kept
        evict = set_row(xp, xp.zeros((L, E), bool), layer, leaving).reshape(-1)
    else:
        grid = xp.arange(L * E, dtype=xp.int32)
        in_layer = grid // E == layer
        resident = slot_of.reshape(-1) >= 0
        needed = in_layer & xp.tile(need, L)
        key = _retention_key(xp, priority(grid // E, grid % E, t), L * E)
        key = xp.where(forced_admit & needed, xp.tile(forced, L), key)
        in_scope = in_layer | global_scope
        kept = _keep_traced(xp, key, (resident & in_scope) | needed, capacity)
        admit = miss & kept.reshape(L, E)[layer]
        evict = leaving = resident & in_scope & ~kept
    if not assign_rows:
        dest = xp.full((E,), -1, xp.int32)
        return Plan(layer, hit, miss, admit, miss & ~admit, dest, evict, leaving.sum(dtype=xp.int32))
    # The j-th free row is preceded by exactly the rows whose running count of free rows is below j.
    free_count = xp.cumsum(owner < 0, dtype=xp.int32)  # [rows]
    nth = _running_count(xp, miss)  # [E], 1-based for the missing
    nth_free = (free_count[None, :] < nth[:, None]).sum(axis=1, dtype=xp.int32)
    dest = xp.where(miss, nth_free, -1)
    return Plan(layer, hit, miss, admit, miss & ~admit, dest, evict, leaving.sum(dtype=xp.int32))


def apply(xp, plan, slot_of, owner):
    """Returns `(slot_of, owner)` at the end of the event: evicted rows are free, admitted experts own their `dest` row.

    Rows of bypassed experts stay free. Under NumPy both arrays are updated in place and returned; under jax.numpy new
    ones are returned. Apply a plan once, and only to the state it was made from.
    """
    L, E = slot_of.shape
    if xp is np:
        if plan.n_evicted:
            layers, experts = np.divmod(np.flatnonzero(plan.evict), E)
            owner[slot_of[layers, experts]] = -1
            slot_of[layers, experts] = -1
        admitted = np.flatnonzero(plan.admit)
        rows = plan.dest[admitted]
        slot_of[plan.layer, admitted] = rows
        owner[rows] = plan.layer * E + admitted
        return slot_of, owner
    slot_of = xp.where(plan.evict.reshape(L, E), -1, slot_of)
    slot_of = set_row(xp, slot_of, plan.layer, xp.where(plan.admit, plan.dest, slot_of[plan.layer]))
    owner = xp.where((owner >= 0) & plan.evict[xp.maximum(owner, 0)], -1, owner)
    ids = plan.layer * E + xp.arange(E, dtype=xp.int32)
    nowhere = owner.shape[0]
    owner = owner.at[xp.where(plan.admit, plan.dest, nowhere)].set(ids, mode="drop")
    return slot_of, owner


def check_invariants(slot_of, owner):
    """Raises ValueError, naming the expert or row, unless `owner` and `slot_of` (NumPy) are inverse to each other."""
    slot_of, owner = np.asarray(slot_of), np.asarray(owner)
    (L, E), rows = slot_of.shape, len(owner)
    for name, array, limit in (("slot_of", slot_of.reshape(-1), rows), ("owner", owner, L * E)):
        bad = np.flatnonzero((array < -1) | (array >= limit))
        if bad.size:
            raise ValueError(f"{name}: entry {bad[0]} is {array[bad[0]]}, outside -1..{limit - 1}")
    ids = owner[owner >= 0]
    twice = np.flatnonzero(np.bincount(ids, minlength=L * E) > 1)
    if twice.size:
        where = np.flatnonzero(owner == twice[0]).tolist()
        raise ValueError(f"owner: layer {twice[0] // E} expert {twice[0] % E} owns several rows: {where}")
    expected = np.full(L * E, -1, np.int64)
    expected[ids] = np.flatnonzero(owner >= 0)
    wrong = np.flatnonzero(expected != slot_of.reshape(-1))
    if wrong.size:
        layer, expert = divmod(int(wrong[0]), E)
        raise ValueError(
            f"layer {layer} expert {expert}: slot_of says row {slot_of[layer, expert]}, owner says {expected[wrong[0]]}"
        )


# ----------------------------------------------------------------------------------------------------- the rule's parts


def _retention_key(xp, priority, n):
    """int32 [n] that orders as float32 `priority` [n] does: -0 equals +0, NaN is below -inf.

    Raises ValueError for a priority of another shape, which would rank other experts than it was made for.
    """
    priority = xp.asarray(priority, xp.float32)
    if priority.shape != (n,):
        raise ValueError(f"priority: has shape {priority.shape}, must be ({n},): a value for each expert asked about")
    bits = priority.view(xp.int32)
    magnitude = bits & INT32_MAX
    key = xp.where(bits < 0, -magnitude, magnitude)
    return xp.where(magnitude > INF_BITS, NAN_KEY, key)


def _running_count(xp, mask):
    """int32 [n]: how many of `mask` [n] are true up to and including each place; for n up to a layer's experts."""
    if xp is np:
        return np.cumsum(mask, dtype=np.int32)
    place = xp.arange(mask.shape[0], dtype=xp.int32)
    # All pairs in one reduction: XLA may split a cumsum into several kernels, and their number bounds a decode step.
    return (mask[None, :] & (place[None, :] <= place[:, None])).sum(axis=1, dtype=xp.int32)


def _forced_key(xp, hit, miss):
    """int32 [E] keys above every priority, rising in processing order: hits, then misses, each ascending."""
    order = xp.where(miss, hit.sum(dtype=xp.int32) + _running_count(xp, miss), _running_count(xp, hit))
    return INT32_MAX - hit.shape[0] + order


def _keep_traced(xp, key, candidate, capacity):
    """[n] bool: the `capacity` candidates of highest `key` [n] int32, ties to the lower index."""
    n = key.shape[0]
    index = xp.arange(n, dtype=xp.int32)
    key = xp.where(candidate, key, ABSENT_KEY)
    if n <= PAIRWISE_LIMIT:
        mine, other = key[:, None], key[None, :]
        before = (other > mine) | ((other == mine) & (index[None, :] < index[:, None]))
        return candidate & (before.sum(axis=1, dtype=xp.int32) < capacity)
    order = xp.argsort(~key, stable=True)  # ~key falls as key rises, without overflow
    last = order[xp.clip(capacity, 1, n) - 1]  # the last one that stays
    keep = (key > key[last]) | ((key == key[last]) & (index <= last))
    return candidate & keep & (capacity > 0)


def _dropped_ids(ids, key, n_drop):
    """The `n_drop` of `ids` [n] with the lowest `key` [n]; ties: the higher id is dropped first."""
    threshold = np.partition(key, n_drop - 1)[n_drop - 1]
    below = ids[key < threshold]
    tied = np.sort(ids[key == threshold])
    return np.concatenate([below, tied[len(tied) - (n_drop - len(below)) :]])


def _plan_numpy(need, slot_of, owner, priority, layer, capacity, global_scope, forced_admit, t, assign_rows):
    L, E = slot_of.shape
    if not 0 <= layer < L:
        raise ValueError(f"layer: {layer} is outside 0..{L - 1}")
    if capacity < 0:
        raise ValueError(f"capacity: {capacity} is negative")
    resident = slot_of[layer] >= 0
    hit, miss = need & resident, need & ~resident
    missing = np.flatnonzero(miss)
    base = layer * E

    dest = np.full(E, -1, np.int32)
    if missing.size and assign_rows:
        free = np.flatnonzero(owner < 0)
        if free.size < missing.size:
            raise ValueError(
                f"owner: layer {layer} misses {missing.size} experts but only {free.size} of {len(owner)} rows are "
                "free; give at least as many spare rows as an event can miss"
            )
        dest[missing] = free[: missing.size]

    n_resident = np.count_nonzero(owner >= 0) if global_scope else np.count_nonzero(resident)
    n_drop = n_resident + missing.size - capacity
    evict = np.zeros(L * E, bool)
    if n_drop <= 0:  # everything fits: there is nothing to rank
        return Plan(layer, hit, miss, miss, np.zeros(E, bool), dest, evict, np.int32(0))

    residents = owner[owner >= 0] if global_scope else base + np.flatnonzero(resident)
    ids = np.concatenate([residents, base + missing]).astype(np.int32)
    key = _retention_key(np, priority(ids // E, ids % E, t), len(ids))
    if forced_admit:
        local = ids - base
        here = (local >= 0) & (local < E)
        here[here] = need[local[here]]
        key[here] = _forced_key(np, hit, miss)[local[here]]
    evict[_dropped_ids(ids, key, n_drop)] = True
    bypass = miss & evict[base : base + E]
    evict[base : base + E] &= resident
    return Plan(layer, hit, miss, miss & ~bypass, bypass, dest, evict, np.int32(np.count_nonzero(evict)))
