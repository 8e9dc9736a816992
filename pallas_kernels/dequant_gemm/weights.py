"""Tiles of stored weights, decoded in registers into operands of the tensor cores.

A word holds `2 P` neighbouring values of a row. Shifts and masks on whole words give P words of two values each, value
i in the lower and value i + P in the upper half: two neighbours of an operand in one register. So the columns of a step
are taken in the order

    column P j + i comes at place i C / P + j        of C columns, i = 0 .. P - 1,

by weights and x alike (`arrange`), and no decoded value has to change its thread.

Codes of FP8 and INT4 are exact in 16-bit floats: a tile keeps them as they are, and the scale of a row's columns is
applied to the sums of their products. MXFP4 has four scales a step, powers of two: its values are scaled themselves.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._compat import cdiv, divisor_block, load
from pallas_kernels.formats import FP8, INT4, MXFP4, Dense, Format, fp8, int4, mxfp4
from pallas_kernels.formats.words import halves

LEAST = 16  # side of the tensor cores' smallest tile
MOST_COLUMNS = 128  # that one entry of MXFP4's scales serves; rows of 256 bytes of 16-bit floats


def _scaled_together(form: Format) -> int | None:
    """Columns of a row that share a scale which is applied to sums; None: weights without such scales."""
    if isinstance(form, FP8):
        return form.block
    return form.group if isinstance(form, INT4) else None


def most_columns(form: Format) -> int:
    """The largest power of two of columns that a step may take."""
    together = _scaled_together(form)
    return MOST_COLUMNS if together is None else divisor_block(together, MOST_COLUMNS)


def least_columns(form: Format) -> int:
    """The smallest one: a whole tile of tensor cores, and a whole block of MXFP4."""
    return form.block if isinstance(form, MXFP4) else LEAST


def without_kernel(form: Format) -> str | None:
    """Why no kernel multiplies with weights of a format, one clause; None if one does."""
    if not isinstance(form, Dense | FP8 | INT4 | MXFP4):
        return f"no kernel reads {form.name} weights"
    if most_columns(form) < LEAST:
        return f"the kernel needs a multiple of {LEAST} columns a scale, {form.name} has {_scaled_together(form)}"
    return None


def pairs_a_word(form: Format) -> int:
    """P; 1 for dense weights, which keep their order."""
    return 1 if isinstance(form, Dense) else 2 if isinstance(form, FP8) else 4


def arrange(x: jax.Array, form: Format, columns: int) -> jax.Array:
    """x [M, D] with its columns in the order of the tiles, padded with zeros to whole steps of `columns`.

    Dense weights take x as it is.
    """
    if isinstance(form, Dense):
        return x
    each = pairs_a_word(form)
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % columns)))
    return x.reshape(x.shape[0], -1, columns // each, each).swapaxes(-1, -2).reshape(x.shape)


def tile(form: Format, refs, rows, step, *, width: int, columns: int, dtype):
    """Weights of one step, [R, columns] in `dtype`: W over `scale` and `unit(form)`.

    refs: of the parts of one matrix, as `form.suffixes`, and of `shifts`; rows: [R] i32; step: number of the `columns`
    columns, of rows of `width` values. Columns past the width are zeros.
    """
    read = {Dense: _dense, FP8: _fp8, INT4: _int4, MXFP4: _mxfp4}[type(form)]
    return read(form, refs, rows, step, width, columns, dtype)


def scale(form: Format, refs, rows, step, columns: int):
    """Scale of the sums of one step's products, [R] f32; None: the format has none. Arguments as of `tile`."""
    together = _scaled_together(form)
    if together is None:
        return None
    block = rows // form.block if isinstance(form, FP8) else rows
    return load(refs[1].at[(block, step * columns // together)]).astype(jnp.float32)


def shifts(form: Format) -> np.ndarray | None:
    """Where `tile` finds small numbers in words, an operand after the parts (None: it needs none): of the i-th zero
    point in a word of INT4, or of the scale of the i-th word that one word of MXFP4's scales serves.

    Numbers that the kernel could compute, if Triton did not move the layout of a tensor core's operand back to loads
    and constants alone: with a shift by a computed number, all decoded values went through shared memory.
    """
    if isinstance(form, INT4) and form.zeros:
        return np.arange(0, 32, 4, dtype=np.uint32)
    return np.repeat(np.arange(0, 32, 8, dtype=np.uint32), form.block // 8) if isinstance(form, MXFP4) else None


def unit(form: Format) -> float:
    """The power of two that `tile` leaves out of all values."""
    return fp8.UNIT if isinstance(form, FP8) else 1.0


def _columns(step, size):
    return step * size + jnp.arange(size, dtype=jnp.int32)


def load_columns(ref, rows, step, size, end, live=None):
    """ref [rows, columns] in `rows` [R] and the `size` columns of a step: zeros from column `end` on, and in rows where
    `live` [R], if given, is false. What is zero is not read."""
    at = _columns(step, size)[None, :]
    masks = ([at < end] if end % size else []) + ([] if live is None else [live[:, None]])
    place = ref.at[(rows[:, None], at)]
    if not masks:
        return load(place)
    return load(place, mask=jnp.broadcast_to(masks[0] & masks[-1], (rows.shape[0], size)), other=0)


def _side_by_side(tiles):
    """[R, n] arrays, a power of two of them, one after the other along the columns.

    By stacking, which costs nothing: concatenation does not lower.
    """
    count = len(tiles)
    while len(tiles) > 1:
        half = len(tiles) // 2
        tiles = [jnp.stack(both, axis=-1) for both in zip(tiles[:half], tiles[half:], strict=True)]
    rows, size = tiles[0].shape[:2]
    return jnp.moveaxis(tiles[0], 1, -1).reshape(rows, count * size)


def _operand(pairs, dtype, decode):
    """[R, columns] of arrays [R, n] of words with a float of the 16-bit `dtype` in each half; `decode`: [R, n] of these
    to values."""
    values = [jnp.stack([decode(half) for half in halves(pair, dtype)], axis=-1) for pair in pairs]
    return _side_by_side([both.reshape(both.shape[0], -1) for both in values])


def _dense(form, refs, rows, step, width, columns, dtype):
    return load_columns(refs[0], rows, step, columns, width).astype(dtype)


def _fp8(form, refs, rows, step, width, columns, dtype):
    words = load_columns(refs[0], rows, step, columns // 4, cdiv(width, 4))
    if filled := width % 4:  # what follows the last value may be anything
        last = _columns(step, columns // 4)[None, :] == width // 4
        words &= jnp.where(last, np.uint32(2 ** (8 * filled) - 1), np.uint32(0xFFFFFFFF))
    pairs = [fp8.nan_where_stored(pair) for pair in fp8.float16_pairs(words)]
    return _operand(pairs, jnp.float16, lambda value: value.astype(dtype))


def _int4(form, refs, rows, step, width, columns, dtype):
    words = load_columns(refs[0], rows, step, columns // 8, width // 8)
    group = step * columns // form.group
    # Floats with these bits and n more, n < 32, are base + n: n = 16 + q - zero, and base + 16 is subtracted exactly.
    half, bits, base = (jnp.bfloat16, 0x4300, 128) if dtype == jnp.bfloat16 else (jnp.float16, 0x6400, 1024)
    zero = np.uint32(int4.MIDDLE)
    if form.zeros:
        shift = load(refs[3].at[jnp.broadcast_to(group % 8, rows.shape)])
        zero = ((load(refs[2].at[(rows, group // 8)]) >> shift) & 15)[:, None]
    both = np.uint32(1 << 16 | 1)  # a number in each half of a word
    pairs = [q + (np.uint32(bits + 16) - zero) * both for q in int4.pairs(words)]
    return _operand(pairs, half, lambda value: (value - jnp.asarray(base + 16, half)).astype(dtype))


def _mxfp4(form, refs, rows, step, width, columns, dtype):
    words = load_columns(refs[0], rows, step, columns // 8, width // 8)
    scales = load(refs[1].at[(rows, step * columns // (4 * form.block))])
    # Words past the end are zeros with the last scale: the bytes that follow it may be anything.
    word = jnp.minimum(_columns(step, columns // 8), width // 8 - 1)
    shift = load(refs[2].at[word % (form.block // 2)])
    factor = mxfp4.block_factors((scales[:, None] >> shift[None, :]) & 255)
    whole = jnp.float16(mxfp4.UNIT)  # exact in float16; with the factor it could overflow

    def decode(value):
        return ((value * whole).astype(jnp.float32) * factor).astype(dtype)

    return _operand(mxfp4.float16_pairs(words), jnp.float16, decode)
