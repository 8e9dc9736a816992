"""The slot plan of one decode event in a single program (the rule is that of `host_offload/plan.py`).

Victims and free rows are found one at a time by block-wide reductions: an event with only hits does none of them, and
a miss costs far more on the link than its reductions here. State is read once and written once, so no thread depends on
another's store. Priorities are compared as integers, so the GPU orders subnormals, -0 and NaN as NumPy does.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._compat import call, load, next_power_of_2, pl, store

_BIG = 2**30
_INT32_MAX = 2**31 - 1
_INF_BITS = 0x7F800000  # float32 +inf


def _count(mask):
    return jnp.sum(mask.astype(jnp.int32))


def _counts(*masks):
    """How many of each of up to three masks [n] are true: in one sum, whose barriers cost more than it does, where n
    has no more than ten bits."""
    if masks[0].shape[0] >= 1024:
        return [_count(mask) for mask in masks]
    total = jnp.sum(sum(mask.astype(jnp.int32) << (10 * i) for i, mask in enumerate(masks)))
    return [(total >> (10 * i)) & 1023 for i in range(len(masks))]


def _retention_key(priority):
    """int32 that orders as float32 `priority` does: -0 equals +0, NaN is below -inf; as in `host_offload/plan.py`."""
    bits = jax.lax.bitcast_convert_type(priority, jnp.int32)
    magnitude = bits & _INT32_MAX
    return jnp.where(magnitude > _INF_BITS, -_INT32_MAX, jnp.where(bits < 0, -magnitude, magnitude))


class _Policy(NamedTuple):
    """A policy inside the kernel: its rule, and refs of its state's leaves (tables [L*E], scalars [1]).

    `rule` is the caller's object, see `slot_plan`; `tree` its state's structure; `is_table` says what each leaf is;
    `outs` holds the refs that the tables of `leaves` are updated in, by leaf.
    """

    rule: Any
    tree: Any
    is_table: tuple
    leaves: tuple
    outs: tuple
    t: Any

    def own(self, index, mask):
        """The state with the entries of experts `index` in the place of each table."""
        return jax.tree.unflatten(
            self.tree,
            [
                load(ref.at[index], mask=mask, other=0) if table else ref[0]
                for ref, table in zip(self.leaves, self.is_table, strict=True)
            ],
        )

    def store(self, index, mask, own, new):
        """Writes what differs between `own` and `new`, which the rule made of it."""
        pairs = zip(jax.tree.leaves(own), jax.tree.leaves(new), self.leaves, self.outs, strict=True)
        for old, value, ref, out in pairs:
            if value is old:
                continue
            if out is None:
                raise TypeError(f"{self.rule}: `seen` changes a scalar of the state; only [L, E] arrays may change")
            store(out.at[index], jnp.broadcast_to(value, old.shape).astype(ref.dtype), mask=mask)


def _plan_kernel(*refs, layer, layers, experts, rows, pairs, policy, tree, is_table):
    ids_ref, live_ref, control_ref, *refs = refs
    priority_ref = None if policy else refs.pop(0)
    slot_ref, owner_ref, counters_ref, resident_ref, *refs = refs
    (step_ref, *leaves), refs = (refs[: 1 + len(is_table)], refs[1 + len(is_table) :]) if policy else ((None,), refs)
    rows_ref, src_ref, deposit_ref, count_ref, entry_ref, slot_out, owner_out, counters_out, resident_out, *tables = (
        refs
    )
    capacity, global_scope, forced = control_ref[layer], control_ref[layers] != 0, control_ref[layers + 1] != 0
    e = jnp.arange(next_power_of_2(experts), dtype=jnp.int32)
    p = jnp.arange(next_power_of_2(pairs), dtype=jnp.int32)
    base = layer * experts

    ids = load(ids_ref.at[p], mask=p < pairs, other=-1)
    alive = load(live_ref.at[p], mask=p < pairs, other=0) != 0
    slot = load(slot_ref.at[base + e], mask=e < experts, other=-1)
    # Asked for with the rest: after the barriers below each would be waited for by itself.
    n_total, hits, misses = resident_ref[0], counters_ref[layer * 4], counters_ref[layer * 4 + 1]
    if policy:
        tables = iter(tables)
        outs = tuple(next(tables) if table else None for table in is_table)
        policy = _Policy(policy, tree, is_table, tuple(leaves), outs, step_ref[0] * layers + layer)
        own = policy.own(base + e, e < experts)  # before the reductions below, whose barriers keep it from the stores
    same = ids[:, None] == e[None, :]
    need = jnp.max((same & alive[:, None]).astype(jnp.int32), axis=0) > 0
    miss = need & (slot < 0)
    n_need, n_miss, n_held = _counts(need, miss, slot >= 0)
    # Needed experts ascending, then the others: a permutation, so that scattered stores need no mask.
    before = jnp.cumsum(need.astype(jnp.int32))  # and itself
    entry = jnp.where(need, before - 1, n_need + e - before)

    # Entry of each (token, k) pair: where its expert stands in the ascending list of distinct experts.
    at_pair = jnp.sum(jnp.where(same, entry[None, :], 0), axis=1)
    store(entry_ref.at[p], jnp.where(alive, at_pair, 0), mask=p < pairs)
    count_ref[0] = n_need
    store(src_ref.at[entry], jnp.where(miss, e, -1))

    n_resident = jnp.where(global_scope, n_total, n_held)
    n_drop = jnp.maximum(n_resident + n_miss - capacity, 0)
    counters_out[layer * 4] = hits + n_need - n_miss
    counters_out[layer * 4 + 1] = misses + n_miss
    changes = n_miss + n_drop > 0

    @pl.when(~changes)
    def _only_hits():
        store(rows_ref.at[entry], slot)
        store(deposit_ref.at[entry], jnp.zeros_like(entry))

    def change(first, size):
        """The event's changes, with the `size` experts from number `first` on in scope."""
        # 1. The lowest rows that are free now, for the missing experts in ascending order.
        r = jnp.arange(next_power_of_2(rows), dtype=jnp.int32)
        free = load(owner_ref.at[r], mask=r < rows, other=0) < 0
        miss_rank = jnp.cumsum(miss.astype(jnp.int32)) - 1

        def take(j, carry):
            dest, last = carry
            row = jnp.min(jnp.where(free & (r > last), r, _BIG))
            return jnp.where(miss & (miss_rank == j), row, dest), row

        dest, _ = jax.lax.fori_loop(0, n_miss, take, (e * 0 - 1, n_miss * 0 - 1))

        # 2. Who leaves: the n_drop lowest of the candidates, by key; ties: the higher number first.
        place = jnp.arange(next_power_of_2(size), dtype=jnp.int32)
        n, real = first + place, place < size
        n_expert = n - base
        mine = (n_expert >= 0) & (n_expert < experts)

        def mark(i, needed):
            return needed | ((n_expert == ids_ref[i]) & mine & (live_ref[i] != 0))

        needed = jax.lax.fori_loop(0, pairs, mark, real & ~real)
        all_slots = load(slot_ref.at[n], mask=real, other=-1)
        if policy:
            before = policy.own(n, real)
            after = policy.rule.seen(jnp, before, needed, policy.t)
            now = jax.tree.map(lambda old, new: old if new is old else jnp.where(mine, new, old), before, after)
            priority = jnp.broadcast_to(policy.rule.worth(jnp, now, policy.t, layers), n.shape).astype(jnp.float32)
        else:
            priority = load(priority_ref.at[n], mask=real, other=0.0)
        candidate = (all_slots >= 0) | needed
        # Forced admission: keys of needed experts are above every priority's, and rise in the order of processing: hits
        # first, each ascending.
        order = jnp.where(all_slots >= 0, n_expert, n_expert + experts)
        key = jnp.where(needed & forced, _INT32_MAX - 2 * experts + order, _retention_key(priority))

        def drop(_, carry):
            left, bypassed, evicted = carry
            lowest = jnp.min(jnp.where(left, key, _INT32_MAX))
            victim = jnp.max(jnp.where(left & (key == lowest), n, -1))
            row = jnp.max(jnp.where(n == victim, all_slots, -1))

            @pl.when(row >= 0)
            def _evict():
                store(slot_out.at[victim], jnp.int32(-1))
                store(owner_out.at[row], jnp.int32(-1))

            bypassed = jnp.where((e + base == victim) & (row < 0), 1, bypassed)
            return left & (n != victim), bypassed, evicted + (row >= 0).astype(jnp.int32)

        _, bypassed, evicted = jax.lax.fori_loop(0, n_drop, drop, (candidate, e * 0, n_miss * 0))

        # 3. The new state.
        admit = miss & (bypassed == 0)
        n_admit = _count(admit)
        store(slot_out.at[base + e], dest, mask=admit)
        store(rows_ref.at[entry], jnp.where(miss, dest, slot))
        store(deposit_ref.at[entry], admit.astype(jnp.int32))

        def own_row(j, carry):
            chosen = admit & (miss_rank == j)
            row = jnp.max(jnp.where(chosen, dest, -1))

            @pl.when(row >= 0)
            def _():
                store(owner_out.at[row], jnp.max(jnp.where(chosen, base + e, -1)))

            return carry

        jax.lax.fori_loop(0, n_miss, own_row, n_miss * 0)
        resident_out[0] = n_total + n_admit - evicted
        counters_out[layer * 4 + 2] = counters_ref[layer * 4 + 2] + n_miss - n_admit
        counters_out[layer * 4 + 3] = counters_ref[layer * 4 + 3] + evicted

    # Two bodies: a layer with slots of its own need not look at (and hold in registers) L times as many experts.
    @pl.when(changes & ~global_scope)
    def _in_layer():
        change(base, experts)

    @pl.when(changes & global_scope)
    def _everywhere():
        change(0, layers * experts)

    if policy:  # without a live row there was no event
        policy.store(base + e, (e < experts) & (n_need > 0), own, policy.rule.seen(jnp, own, need, policy.t))


@functools.partial(jax.jit, static_argnames=("layer", "policy", "feeds_kernels", "interpret"))
def slot_plan(
    ids, live, control, priority, slot_of, owner, counters, resident, *, layer, policy=None, state=None, step=None,
    feeds_kernels=False, interpret=False,
):  # fmt: skip
    """Plans one decode event of MoE layer `layer` and updates the slot state in place.

    Args:
      ids: [B*K] i32 expert of each pair; live: [B*K] i32, 0 for rows that do not count.
      control: [L+2] i32: capacity of each layer (the total in every entry under global scope), global scope (0/1),
        forced admission (0/1).
      priority: [L*E] f32, of account for candidates only; NaN counts as lowest, below -inf. None with a `policy`.
      slot_of: [L*E] i32; owner: [rows] i32 with at least as many free rows as the event misses.
      counters: [L*4] i32 (hits, misses, bypasses, evictions); resident: [1] i32, occupied rows.
      policy: static; an object whose `seen(jnp, own, need, t)` and `worth(jnp, own, t, L)` are those of an
        elementwise policy (`host_offload/policy.py`). The event is recorded in its `state` before it is planned.
      state: with a `policy`, its state: a pytree of [L, E] arrays, updated in place, and of scalars.
      feeds_kernels: see `_compat.call`.
      step: with a `policy`, [] i32; the event clock is t = step * L + layer.

    Returns:
      A dict with `rows`, `src`, `deposit` [E padded to a power of two] i32, of which the first `count` [1] entries are
      the needed experts in ascending order (bank row, expert number to fetch or -1, 1 to keep a fetched one), and
      `entry` [B*K] i32, the index of each pair's expert among them (0 on dead rows);
      the new (slot_of, owner, counters, resident); and the policy's new state (None without one).

    Raises:
      ValueError: a leaf of `state` that is neither a scalar nor [L, E]. TypeError: the policy changes a scalar.
    """
    layers, pairs = control.shape[0] - 2, ids.shape[0]
    experts = slot_of.shape[0] // layers
    listed = next_power_of_2(experts)
    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    leaves, tree = jax.tree.flatten(state if policy else None)
    for leaf in leaves:
        if leaf.shape not in ((), (layers, experts)):
            raise ValueError(f"state of {policy}: an array {leaf.shape}, must be a scalar or {(layers, experts)}")
    is_table = tuple(leaf.ndim > 0 for leaf in leaves)
    flat = [leaf.reshape(-1) for leaf in leaves]
    ranked = (step.reshape(1), *flat) if policy else ()
    first = (ids, live, control) if policy else (ids, live, control, priority)
    tables = [leaf for leaf, table in zip(flat, is_table, strict=True) if table]
    kept = len(first)
    aliases = {kept + i: 5 + i for i in range(4)}
    at = kept + 5  # after the step
    aliases |= {at + i: 9 + j for j, i in enumerate(i for i, table in enumerate(is_table) if table)}
    body = functools.partial(
        _plan_kernel,
        layer=layer,
        layers=layers,
        experts=experts,
        rows=owner.shape[0],
        pairs=pairs,
        policy=policy,
        tree=tree,
        is_table=is_table,
    )
    sizes = ((listed,), (listed,), (listed,), (1,), (pairs,), slot_of.shape, owner.shape, counters.shape, (1,))
    out = call(
        body,
        grid=(1,),
        out_shape=(*map(i32, sizes), *(jax.ShapeDtypeStruct(table.shape, table.dtype) for table in tables)),
        # Above 8192 experts under global scope a thread of 128 would spill (Qwen3-235B: 508 bytes, by ptxas).
        num_warps=4 if layers * experts <= 8192 else 8,
        num_stages=1,
        name="slot_plan",
        feeds_kernels=feeds_kernels,
        input_output_aliases=aliases,
        interpret=interpret,
    )(*first, slot_of, owner, counters, resident, *ranked)
    rows, src, deposit, count, entry = out[:5]
    new = iter(out[9:])
    new_state = jax.tree.unflatten(
        tree, [next(new).reshape(leaf.shape) if table else leaf for leaf, table in zip(leaves, is_table, strict=True)]
    )
    listed = {"rows": rows, "src": src, "deposit": deposit, "count": count, "entry": entry}
    return listed, out[5:9], new_state
