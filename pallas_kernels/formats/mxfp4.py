"""MXFP4: 4-bit floats (e2m1) with one power-of-two scale (e8m0) for 32 neighbours along the input dimension.

Open Compute Project, "Microscaling Formats (MX)" 1.0, sections 5 and 6.3. gpt-oss and the FP4 experts of DeepSeek-V4
are stored so.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.formats.base import Format, finite_float64
from pallas_kernels.formats.words import halves, pack, unpack

# e2m1 codes with their bits where float16 has them are their values over UNIT.
UNIT = 2.0**14
# Exponent of the largest power of two in e2m1 (4), and the bias of e8m0.
_LARGEST_EXPONENT = 2
_BIAS = 127


@dataclass(frozen=True)
class MXFP4(Format):
    """Matrices [out, in], `in` a multiple of 32, as

    * "" uint32 [out, in / 8]: value 8 w + i of a row is in bits 4 i .. 4 i + 3 of its word w;
    * "_scale" uint32 [out, ceil(in / 128)]: the exponent byte of block 4 w + i of a row is in bits 8 i .. 8 i + 7 of
      its word w; unused bytes of the last word are never read.

    A value is +-{0, 0.5, 1, 1.5, 2, 3, 4, 6} * 2^(byte - 127); byte 255 stands for NaN. Decoding is exact in float32
    and bfloat16 wherever the value is a normal float32 (smaller ones depend on the device's treatment of subnormals).
    """

    name: ClassVar[str] = "mxfp4"
    block: ClassVar[int] = 32

    @property
    def suffixes(self) -> tuple[str, ...]:
        return "", "_scale"

    def row_tensors(self, outs: tuple[int, ...], width: int) -> dict[str, tuple[tuple[int, ...], np.dtype | None]]:
        if width % self.block:
            raise ValueError(f"an MXFP4 row of {width} values: must be a multiple of {self.block}")
        out, word = sum(outs), np.dtype(np.uint32)
        return {"": ((out, width // 8), word), "_scale": ((out, -(-width // (4 * self.block))), word)}

    def decode(self, parts: Mapping[str, Any], outs: tuple[int, ...], width: int, dtype) -> jax.Array:
        code = unpack(parts[""], 4).astype(jnp.uint16)
        code = code.reshape(*code.shape[:-1], width // self.block, self.block)
        # Sign, exponent and mantissa moved to where float16 has them: the value / UNIT, subnormals of e2m1
        # included. Not bfloat16, whose subnormals a device flushes.
        bits = (code & 8) << 12 | (code & 7) << 9
        value = jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
        byte = unpack(parts["_scale"], 8)[..., : width // self.block]
        # 2^(byte - 127) as float32, NaN for 255; that of byte 0 would be subnormal, so a factor 1/2 goes to the other
        # side.
        power = jnp.where(byte == 255, jnp.uint32(0x7FC00000), jnp.maximum(byte, 1) << 23)
        power = jax.lax.bitcast_convert_type(power, jnp.float32)
        unit = jnp.where(byte == 0, jnp.float32(UNIT / 2), jnp.float32(UNIT))
        w = value * unit[..., None] * power[..., None]
        return w.reshape(*w.shape[:-2], width).astype(dtype)

    def encode(self, w: np.ndarray) -> dict[str, np.ndarray]:
        """As the specification's section 6.3 asks: the scale of a block is the largest power of two that is at most
        its largest magnitude, divided by 4; values go to the nearest e2m1, ties to even, and saturate at 6."""
        w = finite_float64(w)
        self.row_tensors(w.shape[:1], w.shape[1])
        blocks = w.reshape(len(w), -1, self.block)
        _, exponent = np.frexp(np.abs(blocks).max(axis=-1))  # magnitude in [0.5, 1) * 2^exponent
        byte = np.clip(exponent - 1 - _LARGEST_EXPONENT + _BIAS, 0, 254)
        scaled = np.ldexp(blocks, _BIAS - byte[..., None])
        code = np.clip(scaled, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
        return {"": pack(code.reshape(w.shape), 4), "_scale": pack(byte, 8)}


def float16_pairs(words: jax.Array) -> Iterator[jax.Array]:
    """Nibbles i and i + 4 of each word, for i = 0 .. 3, as float16 bits of their values over UNIT: nibble i in the
    lower half of a word. For kernels: two nibbles an operation, and one shift a pair.

    A sign belongs three bits further from its code than in a nibble. Of every other nibble this can be had at once, by
    taking all bits but the signs three places to the right; nibble 0 would lose its code that way.
    """
    low, signs = words >> 3, np.uint32(0x80808080)
    odd = (words & signs) | (low & ~signs)
    even = (words & signs >> 4) | (low & ~(signs >> 4))
    both = np.uint32(0x8E008E00)
    yield (words << 12) & np.uint32(0x80008000) | (words << 9) & np.uint32(0x0E000E00)
    yield (odd << 8) & both
    yield (even << 4) & both
    yield odd & both


def lane_values(words: jax.Array) -> list[jax.Array]:
    """Values 8 w + i of each word w over UNIT, float32, for i = 0 .. 7. For kernels."""
    values = [half.astype(jnp.float32) for pair in float16_pairs(words) for half in halves(pair, jnp.float16)]
    return values[0::2] + values[1::2]


def block_factors(bytes_: jax.Array) -> jax.Array:
    """2^(byte - 127) in float32 of e8m0 bytes, NaN of 255. For kernels, which keep subnormals (that of byte 0)."""
    bits = jnp.where(bytes_ == 0, np.uint32(1 << 22), bytes_ << 23)
    return jax.lax.bitcast_convert_type(jnp.where(bytes_ == 255, np.uint32(0x7FC00000), bits), jnp.float32)
