"""`row_linear` in plain jax.numpy: the kernel's reference."""

import jax
import jax.numpy as jnp


def row_linear(x, weight, norm, norm_weight, bias, residual, gated):
    """As `pallas_kernels.row_linear.row_linear`."""
    n = x
    if norm is not None:
        wide = x.astype(jnp.float32)
        r = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide)) + norm.eps)
        n = norm.scaled(r, norm_weight, x.dtype)
    y = jnp.sum(weight.astype(jnp.float32) * n.astype(jnp.float32), axis=1)
    y = (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)
    if gated:
        gate, up = jnp.split(y, 2)
        y = jax.nn.silu(gate) * up
    return (y if residual is None else residual + y), n
