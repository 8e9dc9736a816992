"""Copy kernel: program (u, p) of U x PROGRAMS copies every PROGRAMS-th tile of the row of entry u, all its tensors.

A tensor is copied region by region, each in tiles of its own: the whole of it, or what `regions` names.

The multiprocessors read the link at nine tenths of the copy engine's rate once 16 or more programs share a row
(docs/measurements.md), and no host call is needed.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._compat import call, cdiv, load, pl, store

PROGRAMS = 32
TILE = 2048  # elements of a tile, at most
WARPS = 4


def tile_of(shape: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of a tile for a tensor [a, b]: powers of two that overshoot the columns least, then widest."""
    a, b = shape
    widths = [1 << i for i in range(10, 4, -1)]
    columns = min(widths, key=lambda width: (cdiv(b, width) * width, -width))
    rows = 1
    while rows * 2 <= min(a, TILE // columns):
        rows *= 2
    return rows, columns


def _kernel(*refs, regions, ranks):
    """refs: rows, src, count, the banks (aliased by the outputs), the pool's slabs, the output banks.

    regions: by tensor, (offset [2], shape [2]) of each part that is copied; ranks: axes of a row of the tensor.
    """
    row_ref, src_ref, count_ref, *refs = refs
    n = len(regions)
    slabs, outs = refs[n : 2 * n], refs[2 * n :]
    u, p = pl.program_id(0), pl.program_id(1)
    src = src_ref[u]

    @pl.when((u < count_ref[0]) & (src >= 0))
    def _():
        row = row_ref[u]
        parts = [
            (*part, rank, slab, out)
            for spans, rank, slab, out in zip(regions, ranks, slabs, outs, strict=True)
            for part in spans
        ]
        for (top, left), (a, b), rank, slab, out in parts:
            height, width = tile_of((a, b))
            across = cdiv(b, width)
            tiles = cdiv(a, height) * across

            def copy(
                i, _, top=top, left=left, a=a, b=b, rank=rank, slab=slab, out=out, height=height, width=width,
                across=across,
            ):  # fmt: skip
                tile = p + i * PROGRAMS
                # Past the edge a lane repeats the last row or column: the same value to the same place.
                rows = top + jnp.minimum(tile // across * height + jnp.arange(height, dtype=jnp.int32), a - 1)
                columns = left + jnp.minimum(tile % across * width + jnp.arange(width, dtype=jnp.int32), b - 1)
                if rank == 1:
                    store(out.at[row, columns], load(slab.at[src, columns]))
                else:
                    at = rows[:, None], columns[None, :]
                    store(out.at[row, *at], load(slab.at[src, *at]))
                return None

            # Program p has the tiles p, p + PROGRAMS, ...
            jax.lax.fori_loop(0, (tiles - p + PROGRAMS - 1) // PROGRAMS, copy, None)


def fetch_rows(rows, src, count, banks, pool, *, distinct, interpret=False, regions=None):
    """See `pallas_kernels.fetch_rows.fetch_rows`."""
    names = list(banks)
    ranks = tuple(banks[name].ndim - 1 for name in names)
    if wrong := [name for name, rank in zip(names, ranks, strict=True) if rank not in (1, 2)]:
        raise ValueError(f"row tensors {', '.join(wrong)}: must have one or two axes")

    def spans(name):
        shape = banks[name].shape[1:]
        for start, stop in ((0, shape[0]),) if regions is None else regions[name]:
            yield ((0, start), (1, stop - start)) if len(shape) == 1 else ((start, 0), (stop - start, shape[1]))

    out = call(
        functools.partial(_kernel, regions=tuple(tuple(spans(name)) for name in names), ranks=ranks),
        grid=(distinct, PROGRAMS),
        out_shape=tuple(jax.ShapeDtypeStruct(banks[name].shape, banks[name].dtype) for name in names),
        num_warps=WARPS,
        num_stages=1,
        name="fetch_rows" if regions is None else "stage_rows",
        input_output_aliases={3 + i: i for i in range(len(names))},
        interpret=interpret,
    )(rows, src, count, *[banks[name] for name in names], *[pool[name] for name in names])
    return dict(zip(names, out, strict=True))
