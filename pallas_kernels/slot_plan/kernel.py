"""The slot plan of one decode event in a single program (the rule is that of `host_offload/plan.py`).

Victims and free rows are found one at a time by block-wide reductions: an event with only hits does none of them, and
a miss costs far more on the link than its reductions here. State is read once and written once, so no thread depends on
another's store. Priorities are compared as integers, so the GPU orders subnormals, -0 and NaN as NumPy does.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._compat import call, load, next_power_of_2, pl, store

_BIG = 2**30
_INT32_MAX = 2**31 - 1
_INF_BITS = 0x7F800000  # float32 +inf


def _count(mask):
    return jnp.sum(mask.astype(jnp.int32))


def _retention_key(priority):
    """int32 that orders as float32 `priority` does: -0 equals +0, NaN is below -inf; as in `host_offload/plan.py`."""
    bits = jax.lax.bitcast_convert_type(priority, jnp.int32)
    magnitude = bits & _INT32_MAX
    return jnp.where(magnitude > _INF_BITS, -_INT32_MAX, jnp.where(bits < 0, -magnitude, magnitude))


def _plan_kernel(
    ids_ref, live_ref, control_ref, priority_ref, slot_ref, owner_ref, counters_ref, resident_ref,
    rows_ref, src_ref, deposit_ref, count_ref, entry_ref, slot_out, owner_out, counters_out, resident_out,
    *, layer, layers, experts, rows, pairs,
):  # fmt: skip
    capacity, global_scope, forced = control_ref[layer], control_ref[layers] != 0, control_ref[layers + 1] != 0
    e = jnp.arange(next_power_of_2(experts), dtype=jnp.int32)
    p = jnp.arange(next_power_of_2(pairs), dtype=jnp.int32)
    base = layer * experts

    ids = load(ids_ref.at[p], mask=p < pairs, other=-1)
    alive = load(live_ref.at[p], mask=p < pairs, other=0) != 0
    same = ids[:, None] == e[None, :]
    need = jnp.max((same & alive[:, None]).astype(jnp.int32), axis=0) > 0
    slot = load(slot_ref.at[base + e], mask=e < experts, other=-1)
    miss = need & (slot < 0)
    n_need, n_miss = _count(need), _count(miss)
    # Needed experts ascending, then the others: a permutation, so that scattered stores need no mask.
    entry = jnp.where(need, jnp.cumsum(need.astype(jnp.int32)) - 1, n_need + jnp.cumsum((~need).astype(jnp.int32)) - 1)

    # Entry of each (token, k) pair: where its expert stands in the ascending list of distinct experts.
    at_pair = jnp.sum(jnp.where(same, entry[None, :], 0), axis=1)
    store(entry_ref.at[p], jnp.where(alive, at_pair, 0), mask=p < pairs)
    count_ref[0] = n_need
    store(src_ref.at[entry], jnp.where(miss, e, -1))

    n_total = resident_ref[0]
    n_resident = jnp.where(global_scope, n_total, _count(slot >= 0))
    n_drop = jnp.maximum(n_resident + n_miss - capacity, 0)
    counters_out[layer * 4] = counters_ref[layer * 4] + n_need - n_miss
    counters_out[layer * 4 + 1] = counters_ref[layer * 4 + 1] + n_miss

    @pl.when(n_miss + n_drop == 0)
    def _only_hits():
        store(rows_ref.at[entry], slot)
        store(deposit_ref.at[entry], jnp.zeros_like(entry))

    @pl.when(n_miss + n_drop > 0)
    def _change():
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
        n = jnp.arange(next_power_of_2(layers * experts), dtype=jnp.int32)
        n_expert, real = n - base, n < layers * experts
        mine = (n_expert >= 0) & (n_expert < experts)

        def mark(i, needed):
            return needed | ((n_expert == ids_ref[i]) & mine & (live_ref[i] != 0))

        needed = jax.lax.fori_loop(0, pairs, mark, real & ~real)
        all_slots = load(slot_ref.at[n], mask=real, other=-1)
        priority = load(priority_ref.at[n], mask=real, other=0.0)
        candidate = ((all_slots >= 0) & (mine | global_scope)) | needed
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

        def own(j, carry):
            chosen = admit & (miss_rank == j)
            row = jnp.max(jnp.where(chosen, dest, -1))

            @pl.when(row >= 0)
            def _():
                store(owner_out.at[row], jnp.max(jnp.where(chosen, base + e, -1)))

            return carry

        jax.lax.fori_loop(0, n_miss, own, n_miss * 0)
        resident_out[0] = n_total + n_admit - evicted
        counters_out[layer * 4 + 2] = counters_ref[layer * 4 + 2] + n_miss - n_admit
        counters_out[layer * 4 + 3] = counters_ref[layer * 4 + 3] + evicted


@functools.partial(jax.jit, static_argnames=("layer", "interpret"))
def slot_plan(ids, live, control, priority, slot_of, owner, counters, resident, *, layer, interpret=False):
    """Plans one decode event of MoE layer `layer` and updates the slot state in place.

    Args:
      ids: [B*K] i32 expert of each pair; live: [B*K] i32, 0 for rows that do not count.
      control: [L+2] i32: capacity of each layer (the total in every entry under global scope), global scope (0/1),
        forced admission (0/1).
      priority: [L*E] f32, of account for candidates only; NaN counts as lowest, below -inf.
      slot_of: [L*E] i32; owner: [rows] i32 with at least as many free rows as the event misses.
      counters: [L*4] i32 (hits, misses, bypasses, evictions); resident: [1] i32, occupied rows.

    Returns:
      A dict with `rows`, `src`, `deposit` [E padded to a power of two] i32, of which the first `count` [1] entries are
      the needed experts in ascending order (bank row, expert number to fetch or -1, 1 to keep a fetched one), and
      `entry` [B*K] i32, the index of each pair's expert among them (0 on dead rows);
      and the new (slot_of, owner, counters, resident).
    """
    layers, pairs = control.shape[0] - 2, ids.shape[0]
    experts = slot_of.shape[0] // layers
    listed = next_power_of_2(experts)
    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    body = functools.partial(
        _plan_kernel, layer=layer, layers=layers, experts=experts, rows=owner.shape[0], pairs=pairs
    )
    out = call(
        body,
        grid=(1,),
        out_shape=tuple(
            i32(s)
            for s in ((listed,), (listed,), (listed,), (1,), (pairs,), slot_of.shape, owner.shape, counters.shape, (1,))
        ),
        num_warps=4,
        num_stages=1,
        name="slot_plan",
        input_output_aliases={4: 5, 5: 6, 6: 7, 7: 8},
        interpret=interpret,
    )(ids, live, control, priority, slot_of, owner, counters, resident)
    rows, src, deposit, count, entry, *state = out
    return {"rows": rows, "src": src, "deposit": deposit, "count": count, "entry": entry}, tuple(state)
