"""The choice in plain jax.numpy: the kernel's reference, and the path of platforms without it."""

import jax.numpy as jnp


def choose_rows(likely, slot_of, on, *, layer, count):
    """As `pallas_kernels.choose_rows.choose_rows`."""
    left = jnp.where((slot_of[layer] < 0) & (on[layer] != 0), likely, -jnp.inf)
    ids = []
    for _ in range(count):
        best = jnp.argmax(left).astype(jnp.int32)
        ids.append(jnp.where(jnp.max(left) > -jnp.inf, best, -1))
        left = jnp.where(jnp.arange(left.shape[0], dtype=jnp.int32) == best, -jnp.inf, left)
    return jnp.stack(ids), slot_of
