"""`combine` in plain jax.numpy: the kernel's reference."""

import jax.numpy as jnp


def combine(y, entry, weights, live, residual=None):
    """As `pallas_kernels.combine.combine`."""
    B, K = weights.shape
    rows = jnp.arange(B, dtype=jnp.int32)
    out = jnp.zeros(y.shape[1:], jnp.float32)
    for k in range(K):
        out = out + weights[:, k, None].astype(jnp.float32) * (y[k] if entry is None else y[entry[:, k], rows])
    out = jnp.where(live[:, None], out, 0)
    return out if residual is None else residual + out.astype(residual.dtype)
