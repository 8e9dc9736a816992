"""Small unsigned integers in uint32 words: value k * i + j of a row is in bits b * j .. b * j + b - 1 of its word i.

Whole words, as a Pallas-Triton operand of one-byte elements between 2 and 4 GiB would wrap its 32-bit offsets. k =
32 / b values of b bits fill a word; this is the byte order of little-endian memory.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np


def unpack(words: jax.Array, bits: int) -> jax.Array:
    """All values [..., n * 32 / bits] uint32 of words [..., n]."""
    values = (words[..., None] >> jnp.arange(0, 32, bits, dtype=jnp.uint32)) & (2**bits - 1)
    return values.reshape(*words.shape[:-1], -1)


def halves(words: jax.Array, dtype) -> Iterator[jax.Array]:
    """The lower, then the upper 16 bits of each word as numbers of the 16-bit floating `dtype`. For kernels."""
    for half in (words, words >> 16):
        yield jax.lax.bitcast_convert_type(half.astype(jnp.uint16), dtype)


def pack(values: np.ndarray, bits: int) -> np.ndarray:
    """Words [..., ceil(n * bits / 32)] uint32 of values [..., n] below 2^bits, bits 4 or 8; zeros fill the last word.

    By bytes, for speed: loading an AWQ checkpoint packs every weight.
    """
    values = values.astype(np.uint8, copy=False)
    if missing := -values.shape[-1] % (32 // bits):
        values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)])
    if bits == 4:
        values = values[..., 0::2] | values[..., 1::2] << 4
    return np.ascontiguousarray(values).view("<u4")
