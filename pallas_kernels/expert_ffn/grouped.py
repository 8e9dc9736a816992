"""Prefill kernels of the expert FFN: thousands of rows grouped by expert, all of whose weights are in the bank.

Token-expert pairs are sorted by expert and padded to blocks of BM rows (see `layout.py`), so that a block belongs to
one expert. A launch has a fixed number of programs, which walk over the tiles of a range of blocks that is known on the
device only: the next round's experts can move while it runs.

Limits on a GPU: tensor cores take tiles of 16 and more, so D and F are multiples of 16. A stage of the software
pipeline holds (BM + 2 block_out) * block_in elements in shared memory, and there are up to `num_stages` of them: at BM
128 and the default tiles 3 of 48 KiB for bf16, 2 of 32 KiB for fp32. Tiles that do not fit are refused when the kernel
is compiled, which a lowering without a GPU does not reach.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._compat import call, cdiv, divisor_block, load, pl, pltriton, store
from pallas_kernels.expert_ffn.spec import SILU
from pallas_kernels.expert_ffn.tiles import resolve_tiles


def _each_tile(span_ref, tiles, body, programs):
    """body(block, tile) for every tile of blocks span[0]:span[1], strided over the programs."""
    program = pl.program_id(0)
    first = span_ref[0] * tiles + program
    count = cdiv(jnp.maximum(span_ref[1] * tiles - first, 0), programs)

    def step(i, carry):
        t = first + i * programs
        body(t // tiles, t % tiles)
        return carry

    jax.lax.fori_loop(0, count, step, jnp.int32(0))


def _columns(i, size):
    """[1, size] column numbers of the i-th block: a row gather takes index arrays in both dimensions."""
    return (i * size + jnp.arange(size, dtype=jnp.int32))[None, :]


def _bias(bias_ref, row, start, size):
    """[1, size] fp32 of bias[row, start:start+size]."""
    return load(bias_ref.at[row, pl.ds(start, size)]).astype(jnp.float32)[None, :]


def _gate_up_kernel(
    x_ref, token_ref, block_row_ref, span_ref, bank_ref, *refs,
    width, n_in, block_rows, block_out, block_in, programs, spec,
):  # fmt: skip
    *bias_ref, h_ref = refs

    def tile(block, n):
        row = block_row_ref[block]
        rows = pl.ds(block * block_rows, block_rows)
        tokens = load(token_ref.at[rows])
        first = n * block_out
        starts = (first, width + first) if spec.gated else (first,)

        def step(i, accs):
            cols = pl.ds(i * block_in, block_in)
            x = load(x_ref.at[tokens[:, None], _columns(i, block_in)])
            new = []
            for start, acc in zip(starts, accs, strict=True):
                w = load(bank_ref.at[row, pl.ds(start, block_out), cols]).astype(x.dtype)
                new.append(acc + pltriton.dot(x, w, trans_b=True, allow_tf32=False))
            return new

        products = jax.lax.fori_loop(
            0, n_in // block_in, step, [jnp.zeros((block_rows, block_out), jnp.float32) for _ in starts]
        )
        if bias_ref:
            products = [
                z + _bias(bias_ref[0], row, start, block_out) for z, start in zip(products, starts, strict=True)
            ]
        h = spec.activate(*products).astype(h_ref.dtype)
        store(h_ref.at[rows, pl.ds(n * block_out, block_out)], h)

    _each_tile(span_ref, width // block_out, tile, programs)


def _down_kernel(
    h_ref, pair_ref, block_row_ref, span_ref, y_in, bank_ref, *refs,
    n_in, n_out, block_rows, block_out, block_in, programs,
):  # fmt: skip
    *bias_ref, y_ref = refs
    del y_in  # aliased with y_ref: each round writes its own pairs

    def tile(block, n):
        row = block_row_ref[block]
        rows = pl.ds(block * block_rows, block_rows)
        out = pl.ds(n * block_out, block_out)

        def step(i, acc):
            cols = pl.ds(i * block_in, block_in)
            h = load(h_ref.at[rows, cols])
            return acc + pltriton.dot(
                h, load(bank_ref.at[row, out, cols]).astype(h.dtype), trans_b=True, allow_tf32=False
            )

        y = jax.lax.fori_loop(0, n_in // block_in, step, jnp.zeros((block_rows, block_out), jnp.float32))
        if bias_ref:
            y += _bias(bias_ref[0], row, n * block_out, block_out)
        pair = load(pair_ref.at[rows])
        live = jnp.broadcast_to((pair >= 0)[:, None], y.shape)
        # Padding points past the end: the interpreter writes what masked lanes read back, and drops it there only.
        pair = jnp.where(pair >= 0, pair, y_ref.shape[0])
        store(y_ref.at[pair[:, None], _columns(n, block_out)], y.astype(y_ref.dtype), mask=live)

    _each_tile(span_ref, n_out // block_out, tile, programs)


def grouped_tiles(width: int, model: int, itemsize: int = 2) -> dict:
    """Tile sizes and warps of the two kernels: power-of-two divisors of the real widths.

    `itemsize`: bytes of the compute dtype; float32 takes smaller tiles, as all stages of a tile must fit shared memory.
    """
    out, step, stages = (128, 64, 3) if itemsize <= 2 else (64, 32, 2)

    def tiles(n_out, n_in):
        block = dict(block_out=divisor_block(n_out, out), block_in=divisor_block(n_in, step))
        return dict(**block, num_warps=8, num_stages=stages)

    return {"gate_up": tiles(width, model), "down": tiles(model, width)}


@functools.partial(jax.jit, static_argnames=("block_rows", "programs", "tiles", "interpret", "spec"))
def _run(x, y, layout, span, banks, *, block_rows, programs, tiles, interpret, spec):
    tiles = {name: dict(t) for name, t in tiles}
    model, width = x.shape[1], banks["down"].shape[2]

    def launch(kernel, name, operands, out, aliases, **static):
        t = tiles[name]
        body = functools.partial(
            kernel, block_rows=block_rows, block_out=t["block_out"], block_in=t["block_in"], programs=programs, **static
        )
        return call(
            body,
            grid=(programs,),
            out_shape=out,
            num_warps=t["num_warps"],
            num_stages=t["num_stages"],
            name=f"expert_ffn_grouped_{name}",
            input_output_aliases=aliases,
            interpret=interpret,
        )(*operands, *[banks[part] for part in spec.parts(name)])

    h = launch(
        _gate_up_kernel,
        "gate_up",
        (x, layout["token"], layout["block_row"], span),
        jax.ShapeDtypeStruct((layout["token"].shape[0], width), x.dtype),
        {},
        width=width,
        n_in=model,
        spec=spec,
    )
    return launch(
        _down_kernel,
        "down",
        (h, layout["pair"], layout["block_row"], span, y),
        jax.ShapeDtypeStruct(y.shape, y.dtype),
        {4: 0},
        n_in=width,
        n_out=model,
    )


def expert_ffn_round(x, y, layout, span, banks, *, block_rows, spec=SILU, programs=132, tiles=None, interpret=False):
    """One prefill round: the experts of blocks span[0]:span[1].

    Args:
      x: [T, D] compute dtype, D and F multiples of 16; y: [T*K, D] outputs per token-expert pair, updated in place.
      layout: `token` and `pair` [blocks*BM] i32 of `group_pairs` (pair -1 on padding), `block_row` [blocks] i32 bank
        row of each block's expert.
      span: [2] i32 as above.
      banks: {"gate_up": [R, 2F, D], "down": [R, D, F]}, with biases also {"gate_up_bias": [R, 2F], "down_bias": [R,
        D]}, F instead of 2F without a gate.
      block_rows: BM, a power of two >= 16.
      spec: `ExpertSpec` with dense weights.
      programs: programs launched, about the number of multiprocessors.
      tiles: overrides of `grouped_tiles` (for the benchmarks).

    Returns:
      y.

    Raises:
      ValueError: block_rows or tiles out of range.
    """
    if block_rows < 16 or block_rows & (block_rows - 1):
        raise ValueError(f"block_rows = {block_rows}: must be a power of two >= 16")
    width, model = banks["down"].shape[2], x.shape[1]
    static = resolve_tiles(grouped_tiles(width, model, x.dtype.itemsize), tiles, width=width, model=model, least=16)
    return _run(
        x,
        y,
        layout,
        span,
        banks,
        block_rows=block_rows,
        programs=programs,
        tiles=static,
        interpret=interpret,
        spec=spec,
    )
