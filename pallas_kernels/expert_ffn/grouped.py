"""Prefill kernels of the expert FFN: thousands of rows grouped by expert; the next ones move while these are computed.

Token-expert pairs are sorted by expert and padded to blocks of BM rows (see `layout.py`), so that a block belongs to
one expert. One launch handles one round: `copy_programs` programs copy the experts of the *next* round from pinned host
memory into their bank rows, the other programs walk over this round's tiles with tensor cores. A round therefore takes
max(copy, compute), without streams.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._compat import call, cdiv, divisor_block, load, pl, pltriton, store
from pallas_kernels.expert_ffn.tiles import resolve_tiles


def _copy_next(program, programs, span_ref, pos_row_ref, pos_src_ref, pool_ref, bank_out_ref, *, n_out, n_in):
    """Copies the missing rows among positions span[2]:span[3] into the bank, `programs` programs side by side."""
    cols = divisor_block(n_in, 2048)
    rows = divisor_block(n_out, max(1, 8192 // cols))
    across = n_in // cols
    chunks = (n_out // rows) * across

    def position(p, carry):
        src, row = pos_src_ref[p], pos_row_ref[p]

        @pl.when(src >= 0)
        def _():
            def chunk(i, carry):
                c = program + i * programs
                at = (pl.ds((c // across) * rows, rows), pl.ds((c % across) * cols, cols))
                store(bank_out_ref.at[row, *at], load(pool_ref.at[src, *at]))
                return carry

            jax.lax.fori_loop(0, cdiv(chunks - program, programs), chunk, jnp.int32(0))

        return carry

    jax.lax.fori_loop(span_ref[2], span_ref[3], position, jnp.int32(0))


def _each_tile(program, programs, span_ref, tiles, body):
    """body(block, tile) for every tile of blocks span[0]:span[1], strided over the compute programs."""
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


def _split(copy_programs, compute_programs, copy, compute):
    pid = pl.program_id(0)
    if copy_programs:

        @pl.when(pid < copy_programs)
        def _():
            copy(pid)

    @pl.when(pid >= copy_programs)
    def _():
        compute(pid - copy_programs, compute_programs)


def _gate_up_kernel(*refs, width, n_in, block_rows, block_out, block_in, copy_programs, compute_programs):
    if copy_programs:
        x_ref, token_ref, block_row_ref, span_ref, pos_row_ref, pos_src_ref, bank_ref, pool_ref, h_ref, bank_out_ref = (
            refs
        )
    else:
        x_ref, token_ref, block_row_ref, span_ref, bank_ref, h_ref = refs

    def copy(program):
        _copy_next(
            program,
            copy_programs,
            span_ref,
            pos_row_ref,
            pos_src_ref,
            pool_ref,
            bank_out_ref,
            n_out=2 * width,
            n_in=n_in,
        )

    def tile(block, n):
        row = block_row_ref[block]
        rows = pl.ds(block * block_rows, block_rows)
        tokens = load(token_ref.at[rows])

        def step(i, accs):
            cols = pl.ds(i * block_in, block_in)
            x = load(x_ref.at[tokens[:, None], _columns(i, block_in)])
            gate = load(bank_ref.at[row, pl.ds(n * block_out, block_out), cols]).astype(x.dtype)
            up = load(bank_ref.at[row, pl.ds(width + n * block_out, block_out), cols]).astype(x.dtype)
            return (
                accs[0] + pltriton.dot(x, gate, trans_b=True, allow_tf32=False),
                accs[1] + pltriton.dot(x, up, trans_b=True, allow_tf32=False),
            )

        zero = jnp.zeros((block_rows, block_out), jnp.float32)
        gate, up = jax.lax.fori_loop(0, n_in // block_in, step, (zero, zero))
        h = (gate * jax.nn.sigmoid(gate) * up).astype(h_ref.dtype)
        store(h_ref.at[rows, pl.ds(n * block_out, block_out)], h)

    def compute(program, programs):
        _each_tile(program, programs, span_ref, width // block_out, tile)

    _split(copy_programs, compute_programs, copy, compute)


def _down_kernel(*refs, n_in, n_out, block_rows, block_out, block_in, copy_programs, compute_programs):
    if copy_programs:
        (
            h_ref,
            pair_ref,
            block_row_ref,
            span_ref,
            pos_row_ref,
            pos_src_ref,
            y_in,
            bank_ref,
            pool_ref,
            y_ref,
            bank_out_ref,
        ) = refs
    else:
        h_ref, pair_ref, block_row_ref, span_ref, y_in, bank_ref, y_ref = refs
    del y_in  # aliased with y_ref: each round writes its own pairs

    def copy(program):
        _copy_next(
            program, copy_programs, span_ref, pos_row_ref, pos_src_ref, pool_ref, bank_out_ref, n_out=n_out, n_in=n_in
        )

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
        pair = load(pair_ref.at[rows])
        live = jnp.broadcast_to((pair >= 0)[:, None], y.shape)
        # Padding points past the end: the interpreter writes what masked lanes read back, and drops it there only.
        pair = jnp.where(pair >= 0, pair, y_ref.shape[0])
        store(y_ref.at[pair[:, None], _columns(n, block_out)], y.astype(y_ref.dtype), mask=live)

    def compute(program, programs):
        _each_tile(program, programs, span_ref, n_out // block_out, tile)

    _split(copy_programs, compute_programs, copy, compute)


def grouped_tiles(width: int, model: int) -> dict:
    """Tile sizes and warps of the two kernels: power-of-two divisors of the real widths."""
    return {
        "gate_up": dict(
            block_out=divisor_block(width, 128), block_in=divisor_block(model, 64), num_warps=8, num_stages=3
        ),
        "down": dict(block_out=divisor_block(model, 128), block_in=divisor_block(width, 64), num_warps=8, num_stages=3),
    }


@functools.partial(jax.jit, static_argnames=("block_rows", "programs", "copy_programs", "tiles", "interpret"))
def _run(x, y, layout, span, banks, pool, *, block_rows, programs, copy_programs, tiles, interpret):
    tiles = {name: dict(t) for name, t in tiles}
    copies = copy_programs if pool is not None else 0
    model, width = x.shape[1], banks["down"].shape[2]

    def launch(kernel, name, operands, out, aliases, **static):
        t, bank = tiles[name], banks[name]
        args = (*operands, bank)
        if copies:
            at = len(operands) - (1 if name == "down" else 0)
            order = (layout["pos_row"], layout["pos_src"])
            args = (*operands[:at], *order, *operands[at:], bank, pool[name])
            out = (*out, jax.ShapeDtypeStruct(bank.shape, bank.dtype))
            aliases = {k + 2: v for k, v in aliases.items()} | {len(args) - 2: 1}
        body = functools.partial(
            kernel,
            n_in=model if name == "gate_up" else width,
            block_rows=block_rows,
            block_out=t["block_out"],
            block_in=t["block_in"],
            copy_programs=copies,
            compute_programs=programs - copies,
            **static,
        )
        result = call(
            body,
            grid=(programs,),
            out_shape=out,
            num_warps=t["num_warps"],
            num_stages=t["num_stages"],
            name=f"expert_ffn_grouped_{name}",
            input_output_aliases=aliases,
            interpret=interpret,
        )(*args)
        return (result[0], result[1]) if copies else (result[0], bank)

    rows = layout["token"].shape[0]
    h, gate_up = launch(
        _gate_up_kernel,
        "gate_up",
        (x, layout["token"], layout["block_row"], span),
        (jax.ShapeDtypeStruct((rows, width), x.dtype),),
        {},
        width=width,
    )
    y, down = launch(
        _down_kernel,
        "down",
        (h, layout["pair"], layout["block_row"], span, y),
        (jax.ShapeDtypeStruct(y.shape, y.dtype),),
        {4: 0},
        n_out=model,
    )
    return y, {"gate_up": gate_up, "down": down}


def expert_ffn_round(
    x, y, layout, span, banks, pool, *, block_rows, programs=132, copy_programs=16, tiles=None, interpret=False
):
    """One prefill round: computes blocks span[0]:span[1] and copies the missing experts of positions span[2]:span[3].

    Args:
      x: [T, D] compute dtype, D and F multiples of 16; y: [T*K, D] outputs per token-expert pair, updated in place.
      layout: `token` and `pair` [blocks*BM] i32 of `group_pairs` (pair -1 on padding), `block_row` [blocks] i32 bank
        row of each block's expert, `pos_row` and `pos_src` [positions] i32 bank row and pool row (-1: resident) of each
        expert in processing order.
      span: [4] i32 as above.
      banks, pool: as in `expert_ffn_decode`.
      block_rows: BM, a power of two >= 16.
      programs: programs launched (about the number of multiprocessors), of which `copy_programs` copy.
      tiles: overrides of `grouped_tiles` (for the benchmarks).

    Returns:
      y and the banks.

    Raises:
      ValueError: block_rows, copy_programs or tiles out of range.
    """
    if block_rows < 16 or block_rows & (block_rows - 1):
        raise ValueError(f"block_rows = {block_rows}: must be a power of two >= 16")
    if not 0 < copy_programs < programs:
        raise ValueError(f"copy_programs = {copy_programs}: must be between 1 and programs - 1 = {programs - 1}")
    width, model = banks["down"].shape[2], x.shape[1]
    static = resolve_tiles(grouped_tiles(width, model), tiles, width=width, model=model, least=16)
    return _run(
        x,
        y,
        layout,
        span,
        banks,
        pool,
        block_rows=block_rows,
        programs=programs,
        copy_programs=copy_programs,
        tiles=static,
        interpret=interpret,
    )
