"""Work on long chunks of queries by blocks, so that what is made for a query at a time stays small."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

# Smallest block: below it, more turns of the loop cost more than they save.
MIN_BLOCK = 16


def fitting_block(numbers: int, most: int) -> int:
    """Largest power of two of queries for which `numbers` a query stay at or under `most`; at least `MIN_BLOCK`."""
    return max(MIN_BLOCK, 1 << max(0, (most // numbers).bit_length() - 1))


def by_blocks(run: Callable[..., Array], block: int, *arrays: Array) -> Array:
    """run(first, *arrays) over blocks of axis 1, one after another.

    Args:
        run: (number of the block's first query, parts [B, block, ...] of `arrays`) -> [B, block, ...].
        block: queries a block.
        arrays: [B, T, ...] each; the last block is padded with zeros.

    Returns:
        The results joined along axis 1, [B, T, ...]. With T <= block it is one call, without padding.
    """
    T = arrays[0].shape[1]
    if T <= block:
        return run(jnp.int32(0), *arrays)
    count = -(-T // block)

    def cut(a):
        a = jnp.pad(a, ((0, 0), (0, count * block - T), *((0, 0),) * (a.ndim - 2)))
        return jnp.moveaxis(a.reshape(a.shape[0], count, block, *a.shape[2:]), 1, 0)  # [blocks, B, block, ...]

    firsts = jnp.arange(count, dtype=jnp.int32) * block
    out = lax.map(lambda part: run(*part), (firsts, *map(cut, arrays)))
    out = jnp.moveaxis(out, 0, 1)
    return out.reshape(out.shape[0], count * block, *out.shape[3:])[:, :T]
