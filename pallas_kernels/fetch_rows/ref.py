"""Moving missing rows in plain XLA: the kernel's reference, and the path of platforms without it."""

import jax
import jax.numpy as jnp
import numpy as np


def fetch_rows(rows, src, count, banks, pool, *, regions=None):
    """As `pallas_kernels.fetch_rows.fetch_rows`.

    One row at a time by slice, then move, then an in-place update: the only form that is safe on a pinned_host operand.
    """
    index = jnp.arange(src.shape[0], dtype=jnp.int32)
    wanted = (src >= 0) & (index < count[0])
    order = jnp.argsort(~wanted, stable=True)

    def move(i, banks):
        at = order[i]
        new = {}
        for name, bank in banks.items():
            row = jax.lax.dynamic_index_in_dim(pool[name], src[at], keepdims=False)
            for start, stop in ((0, row.shape[0]),) if regions is None else regions[name]:
                part = jax.device_put(jax.lax.slice_in_dim(row, start, stop), jax.memory.Space.Device)
                place = (rows[at], np.int32(start), *[np.int32(0)] * (part.ndim - 1))
                bank = jax.lax.dynamic_update_slice(bank, part[None], place)
            new[name] = bank
        return new

    return jax.lax.fori_loop(0, jnp.sum(wanted), move, banks)
