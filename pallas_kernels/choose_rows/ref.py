"""The choice in plain jax.numpy: the kernel's reference, and the path of platforms without it."""

import jax.numpy as jnp


def choose_rows(likely, slot_of, on, *, layer, count, width):
    """As `pallas_kernels.choose_rows.choose_rows`."""
    e = jnp.arange(likely.shape[0], dtype=jnp.int32)
    left = jnp.where((slot_of[layer] < 0) & (on[layer] != 0), likely, -jnp.inf)
    ids = []
    for _ in range(count):
        best, most = jnp.argmax(left).astype(jnp.int32), jnp.max(left)
        before = jnp.sum((likely > most) | ((likely == most) & (e < best)))
        ids.append(jnp.where((most > -jnp.inf) & (before < width), best, -1))
        left = jnp.where(e == best, -jnp.inf, left)
    return jnp.stack(ids), slot_of
