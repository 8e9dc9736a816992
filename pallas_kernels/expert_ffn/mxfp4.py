"""MXFP4 rows: 4-bit floats (e2m1) with one power-of-two scale (e8m0) for 32 neighbours along the input dimension.

Open Compute Project, "Microscaling Formats (MX)" 1.0, sections 5.1 and 6.3. A matrix [out, in] is held as

* words [out, in / 8] uint32: value 8 w + i of a row is in bits 4 i .. 4 i + 3 of its word w;
* scales [out, ceil(in / 128)] uint32: the exponent byte of block 4 w + i of a row is in bits 8 i .. 8 i + 7 of its
  word w; unused bytes of the last word are never read.

Whole words, as a Pallas-Triton operand of one-byte elements between 2 and 4 GiB would wrap its 32-bit offsets.
"""

import jax
import jax.numpy as jnp

BLOCK = 32


def row_shapes(out: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of words and scales (both uint32) of a matrix [out, width].

    Raises ValueError unless `width` is a multiple of 32.
    """
    if width % BLOCK:
        raise ValueError(f"an MXFP4 row of {width} values: must be a multiple of {BLOCK}")
    return (out, width // 8), (out, -(-width // (4 * BLOCK)))


def decode(words: jax.Array, scales: jax.Array, dtype) -> jax.Array:
    """The matrix [..., out, in] in `dtype` of words [..., out, in / 8] and scales [..., out, ceil(in / 128)].

    A value is +-{0, 0.5, 1, 1.5, 2, 3, 4, 6} * 2^(byte - 127). Exact in float32 and bfloat16 wherever the value is a
    normal float32 (smaller ones depend on the device's treatment of subnormals); byte 255 gives infinities and NaN.
    """
    *lead, out, n = words.shape
    code = (words[..., None] >> jnp.arange(0, 32, 4, dtype=jnp.uint32)) & 15
    code = code.reshape(*lead, out, n // 4, BLOCK).astype(jnp.uint16)
    # Sign, exponent and mantissa moved to where float16 has them: the value times 2^-14, subnormals of e2m1 included.
    # Not bfloat16, whose subnormals a device flushes.
    bits = (code & 8) << 12 | (code & 7) << 9
    value = jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
    byte = (scales[..., None] >> jnp.arange(0, 32, 8, dtype=jnp.uint32)) & 255
    byte = byte.reshape(*lead, out, -1)[..., : n // 4]
    # 2^(byte - 127) as float32; that of byte 0 would be subnormal, so a factor 1/2 goes to the other side.
    power = jax.lax.bitcast_convert_type(jnp.maximum(byte, 1) << 23, jnp.float32)
    unit = jnp.where(byte == 0, jnp.float32(2**13), jnp.float32(2**14))
    return (value * unit[..., None] * power[..., None]).reshape(*lead, out, n * 8).astype(dtype)
