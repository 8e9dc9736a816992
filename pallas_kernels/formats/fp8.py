"""FP8: 8-bit floats (e4m3fn) with one float32 scale for a square block of weights, as DeepSeek-V3 is stored."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.formats.base import Format, finite_float64
from pallas_kernels.formats.words import halves, pack, unpack

# e4m3 values with their bits where float16 has them are their values over UNIT.
UNIT = 2.0**8
_LARGEST = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)  # 448


@dataclass(frozen=True)
class FP8(Format):
    """Matrices [out, in] as

    * "" uint32 [out, ceil(in / 4)]: value 4 w + i of a row is the byte in bits 8 i .. 8 i + 7 of its word w;
    * "_scale" float32 [sum of ceil(out / block) over the matrices, ceil(in / block)]: W[r, c] = value[r, c] *
      scale[r // block, c // block] within each matrix. Blocks at the right and lower edges may be partial, and each of
      the stacked matrices begins a block of its own.

    Args:
      block: side of a block.

    Raises:
      ValueError: block below 1.
    """

    name: ClassVar[str] = "fp8"
    block: int = 128

    def __post_init__(self):
        if self.block < 1:
            raise ValueError(f"block = {self.block!r}: the side of an FP8 block is at least 1")

    @property
    def suffixes(self) -> tuple[str, ...]:
        return "", "_scale"

    def row_tensors(self, outs: tuple[int, ...], width: int) -> dict[str, tuple[tuple[int, ...], np.dtype | None]]:
        blocks = sum(-(-out // self.block) for out in outs)
        return {
            "": ((sum(outs), -(-width // 4)), np.dtype(np.uint32)),
            "_scale": ((blocks, -(-width // self.block)), np.dtype(np.float32)),
        }

    def decode(self, parts: Mapping[str, Any], outs: tuple[int, ...], width: int, dtype) -> jax.Array:
        byte = unpack(parts[""], 8)[..., :width].astype(jnp.uint8)
        value = jax.lax.bitcast_convert_type(byte, jnp.float8_e4m3fn).astype(jnp.float32)
        return (value * self._each_value(parts["_scale"], outs, width)).astype(dtype)

    def _each_value(self, scale, outs, width):
        """The scale of every value: [..., sum(outs), width]."""
        scale = jnp.repeat(scale, self.block, axis=-1)[..., :width]
        if all(out % self.block == 0 for out in outs[:-1]):  # only the last matrix may end within a block
            return jnp.repeat(scale, self.block, axis=-2)[..., : sum(outs), :]
        matrices, first = [], 0
        for out in outs:
            blocks = -(-out // self.block)
            matrix = jnp.repeat(scale[..., first : first + blocks, :], self.block, axis=-2)
            matrices.append(matrix[..., :out, :])
            first += blocks
        return jnp.concatenate(matrices, axis=-2)

    def encode(self, w: np.ndarray) -> dict[str, np.ndarray]:
        """The scale of a block is its largest magnitude / 448 (1 for a block of zeros), in float32; values go to the
        nearest e4m3, ties to even."""
        w = finite_float64(w)
        side = self.block
        padded = np.pad(w, [(0, -size % side) for size in w.shape])
        blocks = padded.reshape(padded.shape[0] // side, side, padded.shape[1] // side, side)
        largest = np.abs(blocks).max(axis=(1, 3))
        # Never a subnormal scale, which has too few bits and which devices flush.
        scale = np.where(largest == 0, 1, np.maximum(largest / _LARGEST, np.finfo(np.float32).tiny)).astype(np.float32)
        scaled = blocks / scale[:, None, :, None].astype(np.float64)
        value = np.clip(scaled, -_LARGEST, _LARGEST).astype(ml_dtypes.float8_e4m3fn)
        value = value.reshape(padded.shape)[: w.shape[0], : w.shape[1]]
        return {"": pack(value.view(np.uint8), 8), "_scale": scale}


def float16_pairs(words: jax.Array) -> Iterator[jax.Array]:
    """Bytes i and i + 2 of each word, for i = 0, 1, as float16 bits of their values over UNIT: byte i in the lower half
    of a word. NaN comes out as 480 / UNIT.

    For kernels: two bytes an operation, and no conversion that only newer cards have.
    """
    for placed in (words << 8, words):
        yield (placed & np.uint32(0x80008000)) | ((placed >> 1) & np.uint32(0x3F803F80))


def nan_where_stored(pairs: jax.Array) -> jax.Array:
    """`float16_pairs` with NaN for the bytes that stand for it: these alone carry into the next bit of the exponent,
    which with those that were set makes a NaN of float16."""
    return pairs | ((pairs + np.uint32(0x00800080)) & np.uint32(0x40004000))


def lane_values(words: jax.Array) -> list[jax.Array]:
    """Values 4 w + i of each word w over UNIT, float32, for i = 0 .. 3; NaN comes out as 480 / UNIT, see `has_nan`."""
    values = [half.astype(jnp.float32) for pair in float16_pairs(words) for half in halves(pair, jnp.float16)]
    return [values[0], values[2], values[1], values[3]]


def has_nan(words: jax.Array) -> jax.Array:
    """Whether one of the four bytes of a word stands for NaN: all bits set but the sign."""
    return ((words & np.uint32(0x7F7F7F7F)) + np.uint32(0x01010101)) & np.uint32(0x80808080) != 0
