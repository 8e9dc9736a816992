"""Moving missing rows in plain XLA: the kernel's reference, and the path of platforms without it."""

import jax
import jax.numpy as jnp


def fetch_rows(rows, src, count, banks, pool):
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
            row = jax.device_put(row, jax.memory.Space.Device)
            new[name] = jax.lax.dynamic_update_index_in_dim(bank, row, rows[at], 0)
        return new

    return jax.lax.fori_loop(0, jnp.sum(wanted), move, banks)
