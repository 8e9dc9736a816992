"""Prefill kernels of the expert FFN: thousands of rows grouped by expert, all of whose weights are in the bank.

Token-expert pairs are sorted by expert and padded to blocks of BM rows (see `layout.py`), so that a block belongs to
one expert. A launch has a fixed number of programs, which walk over the tiles of a range of blocks that is known on the
device only: the next round's experts can move while it runs.

Limits on a GPU: tensor cores take tiles of 16 and more, so D and F are multiples of 16. A stage of the software
pipeline holds (BM + 2 block_out) * block_in elements in shared memory, and there are up to `num_stages` of them: at BM
128 and the default tiles 3 of 48 KiB for bf16, 2 of 32 KiB for fp32; tiles of packed rows take up to 150 KiB (MXFP4,
compiled for sm_90). Tiles that do not fit are refused when the kernel is compiled, which a lowering without a GPU does
not reach.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._compat import call, cdiv, divisor_block, load, pl, pltriton, store
from pallas_kernels.expert_ffn import packed
from pallas_kernels.expert_ffn.spec import SILU
from pallas_kernels.expert_ffn.tiles import resolve_tiles, tiles_key
from pallas_kernels.formats import Dense
from pallas_kernels.tile_table import with_measured


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


def _columns(start, size):
    """[1, size] column numbers from `start` on: a row gather takes index arrays in both dimensions."""
    return (start + jnp.arange(size, dtype=jnp.int32))[None, :]


def _bias(bias_ref, row, start, size):
    """[1, size] fp32 of bias[row, start:start+size]."""
    return load(bias_ref.at[row, pl.ds(start, size)]).astype(jnp.float32)[None, :]


def _products(form, x_at, tensors, row, starts, n_in, *, n_out, block_rows, block_out, block_in):
    """x w^T + b, [block_rows, block_out] fp32, for the outputs from each of `starts` on, one in each stacked matrix.

    x_at(start, size, lane=None): the place of columns of the operand's rows; of packed weights, whose tiles have
    `block_in` units, columns count the words of a lane.
    """
    n = len(form.suffixes)
    weights, bias = tensors[:n], tensors[n:]
    if isinstance(form, Dense):

        def step(i, accs):
            x = load(x_at(i * block_in, block_in))
            new = []
            for start, acc in zip(starts, accs, strict=True):
                w = load(weights[0].at[row, pl.ds(start, block_out), pl.ds(i * block_in, block_in)]).astype(x.dtype)
                new.append(acc + pltriton.dot(x, w, trans_b=True, allow_tf32=False))
            return new

        zeros = [jnp.zeros((block_rows, block_out), jnp.float32) for _ in starts]
        products = jax.lax.fori_loop(0, n_in // block_in, step, zeros)
    else:
        products = packed.project(
            form,
            lambda lane, start, size: x_at(start, size, lane),
            weights,
            row,
            [(start, block_out) for start in starts],
            n_in,
            n_out=n_out,
            units=block_in,
            unroll=1,
            row_sides=False,
            batch=block_rows,
        )
    if bias:
        products = [z + _bias(bias[0], row, start, block_out) for z, start in zip(products, starts, strict=True)]
    return products


def _gate_up_kernel(
    x_ref, token_ref, block_row_ref, span_ref, *refs,
    n_in, n_out, block_rows, block_out, block_in, programs, spec,
):  # fmt: skip
    *tensors, h_ref = refs

    def tile(block, n):
        rows = pl.ds(block * block_rows, block_rows)
        tokens = load(token_ref.at[rows])[:, None]
        first = n * block_out
        starts = (first, n_out + first) if spec.gated else (first,)

        def x_at(start, size, lane=None):
            return x_ref.at[(tokens, *(() if lane is None else (lane,)), _columns(start, size))]

        products = _products(
            spec.gate_up, x_at, tensors, block_row_ref[block], starts, n_in,
            n_out=n_out, block_rows=block_rows, block_out=block_out, block_in=block_in,
        )  # fmt: skip
        store(h_ref.at[rows, pl.ds(first, block_out)], spec.activate(*products).astype(h_ref.dtype))

    _each_tile(span_ref, n_out // block_out, tile, programs)


def _down_kernel(
    h_ref, pair_ref, block_row_ref, span_ref, y_in, *refs,
    n_in, n_out, block_rows, block_out, block_in, programs, spec,
):  # fmt: skip
    *tensors, y_ref = refs
    del y_in  # aliased with y_ref: each round writes its own pairs

    def tile(block, n):
        rows = pl.ds(block * block_rows, block_rows)

        def h_at(start, size, lane=None):
            return h_ref.at[(rows, *(() if lane is None else (lane,)), pl.ds(start, size))]

        (y,) = _products(
            spec.down, h_at, tensors, block_row_ref[block], (n * block_out,), n_in,
            n_out=n_out, block_rows=block_rows, block_out=block_out, block_in=block_in,
        )  # fmt: skip
        pair = load(pair_ref.at[rows])
        live = jnp.broadcast_to((pair >= 0)[:, None], y.shape)
        # Padding points past the end: the interpreter writes what masked lanes read back, and drops it there only.
        pair = jnp.where(pair >= 0, pair, y_ref.shape[0])
        store(y_ref.at[pair[:, None], _columns(n * block_out, block_out)], y.astype(y_ref.dtype), mask=live)

    _each_tile(span_ref, n_out // block_out, tile, programs)


def grouped_key(width: int, model: int, itemsize: int = 2, spec=SILU) -> str:
    """The key of `grouped_tiles` in the table of measured tiles."""
    return tiles_key("expert_ffn_prefill", spec, width, model, itemsize)


def grouped_tiles(width: int, model: int, itemsize: int = 2, spec=SILU) -> dict:
    """Tile sizes and warps of the two kernels: power-of-two divisors of the real widths.

    `itemsize`: bytes of the compute dtype; float32 takes smaller tiles, as all stages of a tile must fit shared memory.
    Tiles of packed weights have `units` instead of `block_in`, see `packed.py`. Measured ones take the place of these.
    """
    out, step, stages = (128, 64, 3) if itemsize <= 2 else (64, 32, 2)

    def tiles(form, n_out, n_in):
        if not isinstance(form, Dense):
            block_out = divisor_block(n_out, packed.most_rows(form, out // 2))
            units = packed.default_units(form, 16, itemsize)
            return dict(block_out=block_out, units=units, num_warps=8, num_stages=min(stages, 2))
        block = dict(block_out=divisor_block(n_out, out), block_in=divisor_block(n_in, step))
        return dict(**block, num_warps=8, num_stages=stages)

    formula = {"gate_up": tiles(spec.gate_up, width, model), "down": tiles(spec.down, model, width)}
    return with_measured(grouped_key(width, model, itemsize, spec), formula)


@functools.partial(jax.jit, static_argnames=("block_rows", "programs", "tiles", "interpret", "spec"))
def _run(x, y, layout, span, banks, *, block_rows, programs, tiles, interpret, spec):
    tiles = {name: dict(t) for name, t in tiles}
    model, width = x.shape[1], spec.outs("gate_up", banks["gate_up"].shape[1])[0]

    def launch(kernel, name, operands, out, aliases, n_in, n_out):
        t, form = tiles[name], getattr(spec, name)
        if not isinstance(form, Dense):
            operands = (packed.to_lanes(operands[0], form), *operands[1:])
        body = functools.partial(
            kernel,
            n_in=n_in,
            n_out=n_out,
            block_rows=block_rows,
            block_out=t["block_out"],
            block_in=t["block_in" if isinstance(form, Dense) else "units"],
            programs=programs,
            spec=spec,
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
        n_in=model,
        n_out=width,
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
        D]}, F instead of 2F without a gate; packed weights as their `Format` says.
      block_rows: BM, a power of two >= 16.
      spec: `ExpertSpec` of which `without_kernel` says nothing.
      programs: programs launched, about the number of multiprocessors.
      tiles: overrides of `grouped_tiles` (for the benchmarks).

    Returns:
      y.

    Raises:
      ValueError: block_rows or tiles out of range.
    """
    if block_rows < 16 or block_rows & (block_rows - 1):
        raise ValueError(f"block_rows = {block_rows}: must be a power of two >= 16")
    width, model = spec.outs("gate_up", banks["gate_up"].shape[1])[0], x.shape[1]
    default = grouped_tiles(width, model, x.dtype.itemsize, spec)
    static = resolve_tiles(default, tiles, width=width, model=model, least=16)
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
