"""One kernel for all row counts: a tile of weights is decoded in registers and multiplied by tensor cores.

Program (j, i, s) sums BN outputs of BM rows of x over the s-th share of the columns, in fp32. The tile is computed as
y^T = W x^T: tensor cores of Hopper take their first operand from registers, where decoded weights are, and the second
from shared memory, where x can stay. Up to BM rows of x read every word of W once.

Where outputs and rows give too few programs for the machine, the columns are shared out over `splits` of them. Each
writes its sums to a place of its own; they are added in order, so the result is the same in every run.

A row past the end of W is the last one again: it computes and stores the same values, and nothing is masked. Rows past
the end of x are zeros, which are neither read nor stored.

Limits on a GPU (bf16, compiled for sm_90): the default tiles take up to 231 registers a thread and 128 KiB of shared
memory (FP8, BM = BN = 128, three stages). Products of float32 are no tensor core's.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels._compat import call, cdiv, next_power_of_2, pl, pltriton, store
from pallas_kernels.dequant_gemm.weights import (
    LEAST,
    MOST_COLUMNS,
    arrange,
    least_columns,
    load_columns,
    most_columns,
    scale,
    shifts,
    tile,
    unit,
)
from pallas_kernels.formats import INT4, Dense, Format
from pallas_kernels.tile_table import table_key, with_measured

PROGRAMS = 132  # multiprocessors of an H200
MOST_SPLITS = 16


def _kernel(x_ref, *refs, form, size, width, count, block_rows, block_out, block_in, unroll, splits, biased):
    """refs: parts of W [size, width] and, if any, their `shifts`; bias if `biased`; y [count, size] or, of splits,
    [splits, count, size]."""
    *weights, y_ref = refs
    bias_ref = weights.pop() if biased else None
    j, i, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    out = jnp.minimum(j * block_out + jnp.arange(block_out, dtype=jnp.int32), size - 1)
    rows = i * block_rows + jnp.arange(block_rows, dtype=jnp.int32)
    live = rows < count if count % block_rows else None
    steps = cdiv(width, block_in)
    first = split * steps // splits
    share = steps // splits if steps % splits == 0 else (split + 1) * steps // splits - first

    def step(at, carry):
        acc, factor = carry
        # The next step's scales arrive while this one is computed.
        following = scale(form, weights, out, jnp.minimum(at + 1, steps - 1), block_in)
        w = tile(form, weights, out, at, width=width, columns=block_in, dtype=x_ref.dtype)
        x = load_columns(x_ref, rows, at, block_in, x_ref.shape[1], live)
        product = pltriton.dot(w, x, trans_b=True, allow_tf32=False)
        return acc + (product if factor is None else product * factor[:, None]), following

    def some_steps(k, carry):
        for at in range(unroll):
            carry = step(first + k * unroll + at, carry)
        return carry

    zeros = jnp.zeros((block_out, block_rows), jnp.float32)
    y, _ = jax.lax.fori_loop(0, share // unroll, some_steps, (zeros, scale(form, weights, out, first, block_in)))
    y *= unit(form)
    if biased:
        y += bias_ref[out].astype(jnp.float32)[:, None]
    place = rows[:, None], out[None, :]
    mask = None if live is None else jnp.broadcast_to(live[:, None], (block_rows, block_out))
    store(y_ref.at[place if splits == 1 else (split, *place)], y.T.astype(y_ref.dtype), mask=mask)


def _padded(rows: int) -> int:
    """The row count by which tiles are chosen: rows of one class get the same bits."""
    return max(LEAST, next_power_of_2(rows))


def gemm_key(size: int, width: int, rows: int, form: Format, itemsize: int = 2) -> str:
    """The key of `gemm_tiles` in the table of measured tiles."""
    return table_key("dequant_gemm", repr(form), f"N{size} D{width} {itemsize}-byte M{_padded(rows)}")


def gemm_tiles(size: int, width: int, rows: int, form: Format, itemsize: int = 2) -> dict:
    """Tiles for W [N, D] = [size, width] and `rows` rows of x of a compute dtype of `itemsize` bytes.

    block_rows and block_out: BM and BN. block_in: columns of a step, at most those of one scale; unroll: steps in a
    round of the loop, whose words are on their way together. splits: programs that share the columns of a tile.
    Measured ones take the place of these.
    """
    padded = _padded(rows)
    if itemsize > 2:  # all operands of a product lie in registers
        block_rows, block_out, block_in = min(padded, 32), 32, 32
    else:
        # From 32 rows on, x is the most of what a program reads: the wider tile halves it.
        block_rows, block_out = min(padded, 128), 64 if padded < 32 else 128
        block_in = 64 if isinstance(form, Dense) else 128
    block_in = min(block_in, most_columns(form))
    programs = cdiv(size, block_out) * cdiv(padded, block_rows)
    # Programs of few rows wait for memory: several keep a multiprocessor busy.
    wanted = PROGRAMS * (1 if block_rows == 128 else 2 if block_out == 128 else 4)
    splits = max(1, min(wanted // programs, width // 512, MOST_SPLITS))
    splits = 1 << (splits.bit_length() - 1)
    unroll = MOST_COLUMNS // block_in if itemsize <= 2 and most_columns(form) < MOST_COLUMNS else 1
    while unroll > 1 and cdiv(width, block_in) % (splits * unroll):
        unroll //= 2
    formula = dict(
        block_rows=block_rows,
        block_out=block_out,
        block_in=block_in,
        unroll=unroll,
        splits=splits,
        num_warps=8 if block_out == 128 else 4,
        num_stages=3 if block_rows >= 64 else 4,
    )
    return with_measured(gemm_key(size, width, rows, form, itemsize), formula)


def resolved(defaults, overrides, form, width):
    """All tiles as a static argument; raises ValueError for those that cannot run."""
    if unknown := set(overrides or {}) - set(defaults):
        raise ValueError(f"tiles: no parameter {', '.join(sorted(unknown))}; they are {', '.join(defaults)}")
    tiles = defaults | (overrides or {})
    columns = least_columns(form), most_columns(form)
    for name, (least, most) in {"block_rows": (LEAST, 256), "block_out": (LEAST, 256), "block_in": columns}.items():
        value = tiles[name]
        if not least <= value <= most or value & (value - 1):
            raise ValueError(
                f"tiles[{name!r}] = {value} for {form.name} weights: must be a power of two from {least} to {most}"
            )
    steps = cdiv(width, tiles["block_in"])
    if not 1 <= tiles["splits"] <= steps:
        raise ValueError(f"tiles['splits'] = {tiles['splits']}: a row of {steps} steps has 1 to {steps} shares")
    if tiles["unroll"] != 1 and (tiles["unroll"] < 1 or steps % (tiles["splits"] * tiles["unroll"])):
        raise ValueError(
            f"tiles['unroll'] = {tiles['unroll']}: must divide each of {tiles['splits']} equal shares of {steps} steps"
        )
    return tuple(tiles.items())


@functools.partial(jax.jit, static_argnames=("form", "out_dtype", "tiles", "interpret"))
def _run(x, weights, order, bias, *, form, out_dtype, tiles, interpret):
    tiles = dict(tiles)
    launch = {name: tiles.pop(name) for name in ("num_warps", "num_stages")}
    (count, width), size, splits = x.shape, weights[0].shape[0], tiles["splits"]
    if order is not None:
        x = jnp.take(x, order, axis=1)
    x = arrange(x, form, tiles["block_in"])
    one = splits == 1
    biased = bias is not None and one
    body = functools.partial(_kernel, form=form, size=size, width=width, count=count, biased=biased, **tiles)
    y = call(
        body,
        grid=(cdiv(size, tiles["block_out"]), cdiv(count, tiles["block_rows"]), splits),
        out_shape=jax.ShapeDtypeStruct(
            (count, size) if one else (splits, count, size), out_dtype if one else jnp.float32
        ),
        name="dequant_gemm",
        interpret=interpret,
        **launch,
    )(x, *weights, *((bias,) if biased else ()))
    if one:
        return y
    total = functools.reduce(jnp.add, [y[split] for split in range(splits)])  # in this order
    return (total if bias is None else total + bias.astype(jnp.float32)).astype(out_dtype)


def dequant_gemm(x, parts, form, bias, out_dtype, *, tiles=None, interpret=False):
    """See `pallas_kernels.dequant_gemm.dequant_gemm`.

    tiles: overrides of `gemm_tiles` (for the benchmarks). Raises ValueError for unknown ones, and for those out of
    range.
    """
    order = None
    if isinstance(form, INT4) and form.order:
        order, form = parts["_order"][0], replace(form, order=False)
    (rows, width), size = x.shape, parts[""].shape[0]
    static = resolved(gemm_tiles(size, width, rows, form, x.dtype.itemsize), tiles, form, width)
    weights = tuple(parts[suffix] for suffix in form.suffixes)
    if (table := shifts(form)) is not None:
        weights += (jnp.asarray(table),)
    return _run(x, weights, order, bias, form=form, out_dtype=jnp.dtype(out_dtype), tiles=static, interpret=interpret)
