"""One row times a weight: program j computes BO outputs from BO whole rows of the weight.

Rows of the weight are contiguous, so a program streams BO * D numbers and needs no partner: nothing is summed across
programs, and a result does not depend on their order. The first tile of the weight is asked for before the norm's sum,
which waits for x, so that the memory is busy meanwhile; every program computes the norm of the whole row again.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._compat import call, cdiv, fma, load, next_power_of_2, pl, store
from pallas_kernels.tile_table import table_key, with_measured

# Columns of the weight that a program holds at once.
COLUMNS = 4096
# Programs that fill an H200 twice: 2 x 132 multiprocessors.
PROGRAMS = 264


def column_block(n_in: int) -> int:
    """Columns a tile: the largest power of two up to `COLUMNS` that wastes less than a tenth on the last tile."""
    block = min(COLUMNS, next_power_of_2(n_in))
    while block > 128 and cdiv(n_in, block) * block > 1.1 * n_in:
        block //= 2
    return block


def row_tiles(n_out: int, n_in: int, itemsize: int, gated: bool = False) -> dict:
    """Parameters of the kernel: `block_out` outputs and `block_in` columns a tile, its launch.

    n_out: outputs, of two rows each with `gated`; itemsize: bytes of a weight. Measured ones take the place of these.
    """
    block_in = column_block(n_in)
    # About 16 KiB a tile: 32 registers of each of 128 threads. Fewer rows where there would be too few programs.
    rows = max(1, min(16, 16384 // (block_in * itemsize * (2 if gated else 1))))
    while rows > 1 and cdiv(n_out, rows) < PROGRAMS:
        rows //= 2
    formula = dict(block_out=rows, block_in=block_in, num_warps=4, num_stages=2)
    return with_measured(row_key(n_out, n_in, itemsize, gated), formula)


def row_key(n_out: int, n_in: int, itemsize: int, gated: bool = False) -> str:
    """The key of `row_tiles` in the table of measured tiles."""
    return table_key("row_linear", f"w{8 * itemsize}", f"N{n_out} D{n_in}{' gated' if gated else ''}")


def _kernel(*refs, n_out, n_in, block_out, block_in, gated, norm, biased, residual):
    x_ref, w_ref, *refs = refs
    norm_ref = refs.pop(0) if norm else None
    bias_ref = refs.pop(0) if biased else None
    residual_ref = refs.pop(0) if residual else None
    y_ref, n_ref = refs if norm else (refs[0], None)
    dtype = x_ref.dtype
    j = pl.program_id(0)
    steps = cdiv(n_in, block_in)
    row = j * block_out + jnp.arange(block_out, dtype=jnp.int32)
    real_row = row < n_out
    starts = (0, n_out) if gated else (0,)
    whole = n_in % block_in == 0 and n_out % block_out == 0

    def columns(i):
        at = i * block_in + jnp.arange(block_in, dtype=jnp.int32)
        return at, at < n_in

    def tiles(i):
        at, real = columns(i)
        mask = {} if whole else dict(mask=real_row[:, None] & real[None, :], other=0.0)
        return [load(w_ref.at[(start + row)[:, None], at[None, :]], **mask) for start in starts]

    def x_part(ref, i):
        at, real = columns(i)
        return load(ref.at[at], **({} if n_in % block_in == 0 else dict(mask=real, other=0.0)))

    def normed(i, inverse, parts=None):
        x, scale = parts or (x_part(x_ref, i), x_part(norm_ref, i) if norm else None)
        return x if norm is None else norm.scaled(x.astype(jnp.float32) * inverse, scale, dtype)

    def add(accs, tiles, n):
        n = n.astype(jnp.float32)[None, :]
        return [fma(w.astype(jnp.float32), n, acc) for acc, w in zip(accs, tiles, strict=True)]

    # All that the first tile needs is asked for before the norm's sum, which waits.
    first = tiles(0)
    parts = x_part(x_ref, 0), x_part(norm_ref, 0) if norm else None
    inverse = None
    if norm is not None:
        row_x = parts[0]
        if steps > 1:
            at = jnp.arange(next_power_of_2(n_in), dtype=jnp.int32)
            row_x = load(x_ref.at[at], mask=at < n_in, other=0.0)
        row_x = row_x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.sum(row_x * row_x) / n_in + norm.eps)
    zeros = [jnp.zeros((block_out, block_in), jnp.float32) for _ in starts]
    accs = add(zeros, first, normed(0, inverse, parts))
    if steps > 1:
        accs = jax.lax.fori_loop(1, steps, lambda i, accs: add(accs, tiles(i), normed(i, inverse)), accs)
    values = [jnp.sum(acc, axis=1) for acc in accs]
    if biased:
        at = [start + row for start in starts]
        values = [
            value + load(bias_ref.at[index], mask=real_row, other=0.0).astype(jnp.float32)
            for value, index in zip(values, at, strict=True)
        ]
    values = [value.astype(dtype) for value in values]
    y = values[0]
    if gated:
        gate = y.astype(jnp.float32)
        y = ((gate / (1.0 + jnp.exp(-gate))).astype(dtype).astype(jnp.float32) * values[1].astype(jnp.float32)).astype(
            dtype
        )
    if residual:
        before = load(residual_ref.at[row], mask=real_row, other=0.0)
        y = (before.astype(jnp.float32) + y.astype(jnp.float32)).astype(dtype)
    store(y_ref.at[row], y, mask=real_row)

    if norm is not None:

        @pl.when(j == 0)
        def _keep():
            for i in range(steps):
                at, real = columns(i)
                store(n_ref.at[at], normed(i, inverse), mask=real)


@functools.partial(jax.jit, static_argnames=("norm", "gated", "tiles", "feeds_kernels", "interpret"))
def _run(x, weight, norm, norm_weight, bias, residual, gated, *, tiles, feeds_kernels, interpret):
    (n_in,), rows = x.shape, weight.shape[0]
    n_out = rows // 2 if gated else rows
    t = dict(tiles)
    body = functools.partial(
        _kernel,
        n_out=n_out,
        n_in=n_in,
        block_out=t["block_out"],
        block_in=t["block_in"],
        gated=gated,
        norm=norm,
        biased=bias is not None,
        residual=residual is not None,
    )
    out = [jax.ShapeDtypeStruct((n_out,), x.dtype)]
    if norm is not None:
        out.append(jax.ShapeDtypeStruct((n_in,), x.dtype))
    extra = [value for value in (norm_weight, bias, residual) if value is not None]
    y, *n = call(
        body,
        grid=(cdiv(n_out, t["block_out"]),),
        out_shape=tuple(out),
        num_warps=t["num_warps"],
        num_stages=t["num_stages"],
        name="row_linear",
        feeds_kernels=feeds_kernels,
        interpret=interpret,
    )(x, weight, *extra)
    return y, (n[0] if n else x)


def row_linear(x, weight, norm, norm_weight, bias, residual, gated, *, tiles=None, feeds_kernels=False, interpret=False
):  # fmt: skip
    """See `pallas_kernels.row_linear.row_linear`.

    tiles: overrides of `row_tiles` (for the benchmarks). Raises ValueError for an unknown one, and for a block that is
    no power of two.
    """
    n_out = weight.shape[0] // 2 if gated else weight.shape[0]
    found = row_tiles(n_out, x.shape[0], weight.dtype.itemsize, gated)
    if unknown := set(tiles or {}) - set(found):
        raise ValueError(f"tiles: no parameter {', '.join(sorted(unknown))}; they are {', '.join(found)}")
    found |= tiles or {}
    for name in ("block_out", "block_in"):
        if found[name] < 1 or found[name] & (found[name] - 1):
            raise ValueError(f"tiles[{name!r}] = {found[name]}: must be a power of two")
    if norm is None:
        norm_weight = None
    static = tuple(sorted(found.items()))
    operands = x, weight, norm, norm_weight, bias, residual, gated
    return _run(*operands, tiles=static, feeds_kernels=feeds_kernels, interpret=interpret)
