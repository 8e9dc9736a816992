"""Products with packed weights inside the kernels: rows are read as they are stored and decoded in registers.

A tile is some output rows by some whole *units* of each: a unit is the W words that one entry of the row's scales
serves (a word of four e8m0 bytes, the float of a block or group). So every word and scale is loaded once, deposited
from where it is, and used. A word holds `lanes` neighbours of its row, and the operand is split alike (`to_lanes`):
each lane is a product of two arrays, without any interleaving,

    y[r] = sum over words w of factor[r, w] * (sum over lanes i of value_i[r, w] * x_i[w]).

A single token is multiplied and summed in this order in fp32. For more tokens the tensor cores take one product a lane,
with weights rounded to the compute dtype as `Format.decode` rounds them.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._compat import cdiv, fma, load, next_power_of_2, pl, pltriton, store
from pallas_kernels.formats import FP8, INT4, MXFP4, Format, fp8, int4, mxfp4

# Side of the tensor cores' smallest tile, and so the fewest rows that one FP8 scale must serve.
_LEAST = 16
# Words of a tile's row for tensor cores: the decoded values of a lane already take most registers (compiled for sm_90).
_MOST_WORDS = 32


# How the tiles of a format are read: `lanes` values a word, `words` a unit, `scale` the constant that `decode` leaves
# out; `sides` the (index in the row's part, shape, whether its last axis counts units) of each part after the words, of
# the `units` from `first` on; `decode` the values of each lane [size, units, words] / `scale`, and their factor.


class _MXFP4Tiles:
    lanes, words, scale = 8, 16, mxfp4.UNIT

    def __init__(self, form: MXFP4, units: int):
        self.units = units

    def sides(self, rows, size, block_row, first):
        return [((rows, pl.ds(first, self.units)), (size, self.units), True)]

    def decode(self, words, sides, first):
        bytes_at = 8 * (jnp.arange(self.words, dtype=jnp.uint32) // 4)
        bytes_ = (sides[0][:, :, None] >> bytes_at[None, None, :]) & 255
        return mxfp4.lane_values(words), mxfp4.block_factors(bytes_)


class _FP8Tiles:
    lanes, scale = 4, fp8.UNIT

    def __init__(self, form: FP8, units: int):
        self.units, self.words = units, form.block // self.lanes

    def sides(self, rows, size, block_row, first):
        return [((block_row, pl.ds(first, self.units)), (self.units,), True)]

    def decode(self, words, sides, first):
        factor = jnp.where(fp8.has_nan(words), jnp.nan, sides[0][None, :, None])
        return fp8.lane_values(words), factor


class _INT4Tiles:
    lanes, scale = 8, 1.0

    def __init__(self, form: INT4, units: int):
        self.units, self.words, self.zeros = units, form.group // self.lanes, form.zeros

    def sides(self, rows, size, block_row, first):
        scale = ((rows, pl.ds(first, self.units)), (size, self.units), True)
        # A word holds the zero points of 8 units, so of whole tiles.
        return [scale, ((rows, first >> 3), (size,), False)] if self.zeros else [scale]

    def decode(self, words, sides, first):
        zero = np.uint32(int4.MIDDLE)
        if self.zeros:
            nibble = 4 * ((first & 7).astype(jnp.uint32) + jnp.arange(self.units, dtype=jnp.uint32))
            zero = ((sides[1][:, None] >> nibble[None, :]) & 15)[:, :, None]
        return int4.lane_values(words, zero), sides[0].astype(jnp.float32)[:, :, None]


_TILES = {MXFP4: _MXFP4Tiles, FP8: _FP8Tiles, INT4: _INT4Tiles}


def without_kernel(form: Format) -> str | None:
    """Why `project` does not serve a packed format, one clause; None if it does."""
    if isinstance(form, INT4) and form.order:
        return "no kernel undoes the column order of int4 rows"
    if isinstance(form, MXFP4):
        return None
    side = form.block if isinstance(form, FP8) else form.group
    most = _MOST_WORDS * lanes(form)
    if not _LEAST <= side <= most or side & (side - 1):
        return f"kernels read {form.name} rows with a scale for 16, 32, .. or {most} columns, not {side}"
    return None


def lanes(form: Format) -> int:
    """Values a word."""
    return _TILES[type(form)].lanes


def unit_words(form: Format) -> int:
    """Words of a unit."""
    return _TILES[type(form)](form, 1).words


def default_units(form: Format, batch: int, itemsize: int) -> int:
    """Units of a tile for `batch` rows of a compute dtype of `itemsize` bytes, a power of two up to 8."""
    if batch > 1 and itemsize > 2:
        return 1  # products of float32 are no tensor core's: all operands lie in registers
    # One token: 256 bytes of a row, fewer words than a program of four warps has threads (`decode_tiles`).
    return min(8, (64 if batch == 1 else _MOST_WORDS) // unit_words(form))


def most_rows(form: Format, most: int) -> int:
    """Output rows of a tile, at most `most`: those of FP8 lie within one block."""
    return min(most, form.block) if isinstance(form, FP8) else most


def lane_place(columns: jax.Array, form: Format) -> tuple[jax.Array, jax.Array]:
    """Where `to_lanes` puts columns: (lane, word), of their shape."""
    return columns % lanes(form), columns // lanes(form)


def to_lanes(x: jax.Array, form: Format) -> jax.Array:
    """The operand of `project`, [..., lanes, n / lanes], of x [..., n].

    Raises:
      ValueError: the last word of a row would be partly filled.
    """
    if x.shape[-1] % lanes(form):
        raise ValueError(f"{form.name} rows of {x.shape[-1]} values: kernels need a multiple of {lanes(form)}")
    return x.reshape(*x.shape[:-1], -1, lanes(form)).swapaxes(-1, -2)


def _block_row(form, matrix, start, n_out):
    """Row of FP8's scales that serves the output rows from `start`, of which each matrix has n_out."""
    if not isinstance(form, FP8):
        return None
    return matrix * cdiv(n_out, form.block) + (start - matrix * n_out) // form.block


def _pick(whole, axis, at):
    """Entry `at` of an axis of an array in registers, whose other entries are dropped; of any bits the very same."""
    dtype = whole.dtype
    bits = jax.lax.bitcast_convert_type(whole, {2: jnp.uint16, 4: jnp.uint32}[dtype.itemsize]).astype(jnp.uint32)
    shape = [1] * whole.ndim
    shape[axis] = whole.shape[axis]
    here = jnp.arange(whole.shape[axis], dtype=jnp.int32).reshape(shape) == at
    bits = jnp.sum(jnp.where(here, bits, np.uint32(0)), axis=axis, dtype=jnp.uint32)
    if dtype.itemsize == 2:
        bits = bits.astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(bits, dtype)


def project(
    form, x_at, parts, row, outs, n_in, *, n_out, units, unroll, row_sides, batch, targets=None, deposit_row=None,
    deposit=None,
):  # fmt: skip
    """x @ w[row, start:start+size].T for each (start, size) of `outs`, one in each of the stacked matrices.

    Args:
      form: packed `Format` without `without_kernel`.
      x_at: x_at(lane, start, size), the place in a ref of that many words of the operand's lane, [size] if batch is 1,
        else [batch, size]; the operand is brought into this form by `to_lanes`.
      parts: refs [rows, *shape] of the weights' parts, in the order of `form.suffixes`.
      outs: with sizes and starts that divide the block of FP8.
      n_in, n_out: width and output size of each of the stacked matrices; n_in a multiple of `lanes`.
      units: of a tile, a power of two up to 8. unroll: tiles a step, which are all on their way before the first is
        used; the sums are the same, in the same order.
      row_sides: scales and zero points of the output rows are read at once, before the first tile, and kept: few wide
        reads in place of a narrow one a tile, which cost the link as much as a wide one does.
      batch: rows of the operand, padded to 16 at least; 1 for a single token.
      targets: refs like `parts` whose row `deposit_row` takes the tiles where `deposit` holds, or None.

    Returns:
      A list of [size] (batch == 1) or [batch, size] fp32 arrays.

    Raises:
      ValueError: a tile would lie in two blocks of FP8.
    """
    if isinstance(form, FP8) and form.block % outs[0][1]:
        raise ValueError(f"block_out = {outs[0][1]}: must divide the block of fp8 rows, {form.block}")
    tiles = _TILES[type(form)](form, units)
    shape = (units, tiles.words)
    tile_words, words = units * tiles.words, n_in // tiles.lanes
    ragged = words % (tile_words * unroll) != 0

    def inside(i, size, n):
        """[size] of the i-th block of that size: which lie before n; None if all do."""
        return i * size + jnp.arange(size, dtype=jnp.int32) < n if ragged else None

    def read(place, mask, shape):
        return load(place) if mask is None else load(place, mask=jnp.broadcast_to(mask, shape), other=0)

    def take(part, index, mask, shape):
        """Tile `index` of a part of the row, also deposited."""
        tile = read(parts[part].at[(row, *index)], mask, shape)
        if targets is not None:
            keep = deposit if mask is None else mask & deposit
            store(targets[part].at[(deposit_row, *index)], tile, mask=jnp.broadcast_to(keep, tile.shape))
        return tile

    def read_tile(i):
        """(first unit, words that lie in the row, operand by lane, generator of words and sides of each matrix) of the
        i-th tile."""
        cols, first = pl.ds(i * tile_words, tile_words), i * units
        in_row, in_units = inside(i, tile_words, words), inside(i, units, cdiv(words, tiles.words))
        # The last tile of a step may lie past the row as a whole; the first one never does.
        any_unit = first < cdiv(words, tiles.words) if ragged and unroll > 1 else None
        x_shape = (tile_words,) if batch == 1 else (batch, tile_words)
        each_lane = np.arange(tiles.lanes, dtype=np.int32)
        x = [read(x_at(lane, i * tile_words, tile_words), in_row, x_shape) for lane in each_lane]

        def read_matrix(matrix):
            start, size = outs[matrix]
            rows, block_row = pl.ds(start, size), _block_row(form, matrix, start, n_out)
            w = take(0, (rows, cols), in_row, (size, tile_words)).reshape(size, *shape)
            if whole is not None:
                return w, [_pick(side, axis, i // tiles_an_entry) for side, axis, tiles_an_entry in whole[matrix]]
            sides = [
                take(part, index, in_units if by_unit else any_unit, side)
                for part, (index, side, by_unit) in enumerate(tiles.sides(rows, size, block_row, first), 1)
            ]
            return w, sides

        return first, in_row, x, (read_matrix(matrix) for matrix in range(len(outs)))

    def read_sides(matrix):
        """[(side of all tiles, its axis of entries, tiles that an entry serves)] of the output rows of a matrix."""
        start, size = outs[matrix]
        rows, block_row = pl.ds(start, size), _block_row(form, matrix, start, n_out)
        found = []
        for part, (index, side, by_unit) in enumerate(tiles.sides(rows, size, block_row, 0), 1):
            # Entries of the part's row: one a unit, or one of several tiles.
            n = parts[part].shape[-1]
            entries = max(next_power_of_2(n), units if by_unit else 1)
            mask = jnp.arange(entries, dtype=jnp.int32) < n
            lead = side[:-1] if by_unit else side
            values = take(part, (index[0], pl.ds(0, entries)), mask, (*lead, entries))
            if by_unit:
                values = values.reshape(*lead, entries // units, units)
            found.append((values, len(lead), 1 if by_unit else max(1, 8 // units)))
        return found

    def step(i, accs):
        if unroll == 1:
            return add(accs, *read_tile(i))
        loaded = []
        for tile in range(unroll):
            *rest, matrices = read_tile(i * unroll + tile)
            loaded.append((*rest, list(matrices)))
        for tile in loaded:
            accs = add(accs, *tile)
        return accs

    def add(accs, first, in_row, x, matrices):
        """The sums with a tile's products."""
        new = []
        for (w, sides), acc in zip(matrices, accs, strict=True):
            values, factor = tiles.decode(w, sides, first)
            if ragged:  # what is past the end of the row may be anything
                factor = jnp.where(in_row.reshape(1, *shape), factor, 0)
            if batch == 1:
                x32 = [at.astype(jnp.float32).reshape(1, *shape) for at in x]
                total = values[0] * x32[0]
                for v, at in zip(values[1:], x32[1:], strict=True):
                    total = fma(v, at, total)
                new.append(fma(total, factor, acc))
            else:
                factor = factor * tiles.scale
                for v, at in zip(values, x, strict=True):
                    v = (v * factor).astype(at.dtype).reshape(w.shape[0], tile_words)
                    acc += pltriton.dot(at, v, trans_b=True, allow_tf32=False)
                new.append(acc)
        return new

    whole = [read_sides(matrix) for matrix in range(len(outs))] if row_sides else None
    steps = cdiv(words, tile_words * unroll)
    accs = [jnp.zeros((size, *shape) if batch == 1 else (batch, size), jnp.float32) for _, size in outs]
    # A tile past the end must not be known to be one: that would be refused, masked or not.
    accs = jax.lax.fori_loop(0, steps, step, accs) if steps > 1 or unroll > 1 else step(np.int32(0), accs)
    if batch > 1:
        return accs
    return [jnp.sum(acc.reshape(acc.shape[0], -1), axis=1) * tiles.scale for acc in accs]
