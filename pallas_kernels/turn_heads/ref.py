"""`turn_heads` in plain jax.numpy: the kernel's reference."""

import jax
import jax.numpy as jnp


def _normed(x, weight, norm):
    """x [B, n, H] under `HeadNorm`."""
    wide = x.astype(jnp.float32)
    if norm.over_all:
        wide = wide.reshape(x.shape[0], 1, -1)
    r = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + norm.row.eps)
    return norm.row.scaled(r, weight, x.dtype).reshape(x.shape)


def _turned(x, cos, sin):
    """x [B, n, H] rotated by tables [B, R]."""
    cos, sin = (table.astype(jnp.float32)[:, None] for table in (cos, sin))
    first, second, rest = jnp.split(x, (cos.shape[-1], 2 * cos.shape[-1]), axis=-1)
    a, b = first.astype(jnp.float32), second.astype(jnp.float32)
    return jnp.concatenate([(a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype), rest], axis=-1)


def turn_heads(
    heads, keys, values, page_table, positions, live, cos, sin, *, query_heads, step, norm, q_weight, k_weight, clip
):
    """As `pallas_kernels.turn_heads.turn_heads`."""
    G, page = keys.shape[2], keys.shape[1]
    q, k, v = heads[:, : query_heads * step : step], heads[:, -2 * G : -G], heads[:, -G:]
    if norm is not None:
        q, k = _normed(q, q_weight, norm), _normed(k, k_weight, norm)
    if clip is not None:
        q, k, v = (jnp.clip(x, -clip, clip) for x in (q, k, v))
    if cos is not None:
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
    column = jnp.clip(positions // page, 0, page_table.shape[1] - 1)
    number = jnp.where(live != 0, jnp.take_along_axis(page_table, column[:, None], axis=1)[:, 0], 0)
    write = [pool.at[number, positions % page].set(x.astype(pool.dtype)) for pool, x in ((keys, k), (values, v))]
    return q, *write
