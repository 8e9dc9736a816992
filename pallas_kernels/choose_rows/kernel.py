"""One program that finds the best experts one after another by block-wide reductions.

The table of slots is a result, too, though nothing is written to it: the plan of the next event, which changes it in
place, then comes after this kernel, and XLA need not copy the table for it.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._compat import call, load, next_power_of_2


def _kernel(likely_ref, slot_ref, on_ref, ids_ref, _, *, layer, experts, count, width):
    e = jnp.arange(next_power_of_2(experts), dtype=jnp.int32)
    real = e < experts
    likely = load(likely_ref.at[e], mask=real, other=-jnp.inf)
    slot = load(slot_ref.at[layer * experts + e], mask=real, other=0)
    left = jnp.where((slot < 0) & (on_ref[layer] != 0), likely, -jnp.inf)
    for p in range(count):
        most = jnp.max(left)
        best = jnp.min(jnp.where(left == most, e, experts))
        before = jnp.sum(((likely > most) | ((likely == most) & (e < best))).astype(jnp.int32))
        ids_ref[p] = jnp.where((most > -jnp.inf) & (before < width), best, -1)
        left = jnp.where(e == best, -jnp.inf, left)


def choose_rows(likely, slot_of, on, *, layer, count, width, interpret=False):
    """See `pallas_kernels.choose_rows.choose_rows`."""
    experts = likely.shape[0]
    ids, slots = call(
        functools.partial(_kernel, layer=layer, experts=experts, count=count, width=width),
        grid=(1,),
        out_shape=(
            jax.ShapeDtypeStruct((count,), jnp.int32),
            jax.ShapeDtypeStruct((slot_of.size,), slot_of.dtype),
        ),
        num_warps=max(1, min(4, next_power_of_2(experts) // 32)),
        num_stages=1,
        name="choose_rows",
        input_output_aliases={1: 1},
        interpret=interpret,
    )(likely, slot_of.reshape(-1), on)
    return ids, slots.reshape(slot_of.shape)
