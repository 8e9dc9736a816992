"""Decode kernels of the expert FFN: few tokens, each distinct expert read once, missing ones from pinned host memory.

Two kernels, because the down projection needs the whole hidden vector of an expert:

* `gate_up`: program (u, j) computes BF columns of h[u] = act(x gate^T, x up^T) for distinct expert u, or of act(x w^T)
  if the experts have no gate.
* `down`: program (u, j) computes BO columns of y[u] = h[u] down^T.

Activation, biases and formats are those of an `ExpertSpec`; `packed.py` multiplies with weights that are not dense.

A program whose expert is resident streams its tile from the bank. Otherwise it streams the tile from the pool
(`pinned_host`, over the link), uses it, and deposits it in the bank in the same pass unless the policy bypasses the
expert. If its block was brought ahead (`staging.py`), it comes from the staging row instead. The arithmetic is the same
in all cases, so the result does not depend on what was resident or staged, bit for bit.
"""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._compat import call, divisor_block, fma, load, pl, pltriton, store
from pallas_kernels.expert_ffn import packed
from pallas_kernels.expert_ffn.spec import SILU
from pallas_kernels.expert_ffn.staging import staging_row
from pallas_kernels.expert_ffn.tiles import resolve_tiles, tiles_key
from pallas_kernels.formats import Dense
from pallas_kernels.tile_table import with_measured


def _project(
    x_ref, x_row, parts, row, outs, n_in, *, block_in, unroll, batch, targets=None, deposit_row=None, deposit=None
):  # fmt: skip
    """x @ w[row, start:start+width].T for each (start, width) of `outs` and dense weights w, summed in fp32.

    x_ref [.., batch, n_in] (or [.., n_in] when batch == 1, indexed by `x_row` if not None), parts: the ref of w [rows,
    n_out, n_in]. A step takes `unroll` tiles of `block_in` columns: all are on their way before the first is used.
    With `targets`, a ref like that, the tiles also go to its row `deposit_row` where `deposit` holds.
    Returns a list of [width] (batch == 1) or [batch, width] arrays.
    """
    (w_ref,) = parts
    single = batch == 1
    steps = n_in // (block_in * unroll)

    def step(i, accs):
        tiles = [pl.ds((i * unroll + tile) * block_in, block_in) for tile in range(unroll)]
        x, w = [], []
        for cols in tiles:
            index = (cols,) if single else (pl.ds(0, batch), cols)
            x.append(load(x_ref.at[index if x_row is None else (x_row, *index)]))
            w.append([load(w_ref.at[row, pl.ds(start, width), cols]) for start, width in outs])
        for cols, matrices in zip(tiles, w, strict=True):
            if targets is None:
                break
            for values, (start, width) in zip(matrices, outs, strict=True):
                target = targets[0].at[deposit_row, pl.ds(start, width), cols]
                store(target, values, mask=jnp.broadcast_to(deposit, values.shape))
        for at, matrices in zip(x, w, strict=True):
            if single:
                at = at.astype(jnp.float32)[None, :]
                accs = [fma(values.astype(jnp.float32), at, acc) for values, acc in zip(matrices, accs, strict=True)]
            else:
                accs = [
                    acc + pltriton.dot(at, values.astype(at.dtype), trans_b=True, allow_tf32=False)
                    for values, acc in zip(matrices, accs, strict=True)
                ]
        return accs

    shape = (lambda width: (width, block_in)) if single else (lambda width: (batch, width))
    accs = [jnp.zeros(shape(width), jnp.float32) for _, width in outs]
    accs = jax.lax.fori_loop(0, steps, step, accs) if steps > 1 else step(0, accs)
    return [jnp.sum(acc, axis=1) for acc in accs] if single else accs


def _add_bias(values, bias_ref, row, outs, *, deposit_ref=None, deposit_row=None, deposit=None):
    """values + bias[row, start:start+width] for each (start, width) of `outs`; deposits as `_project`."""
    new = []
    for value, (start, width) in zip(values, outs, strict=True):
        bias = load(bias_ref.at[row, pl.ds(start, width)])
        if deposit_ref is not None:
            store(deposit_ref.at[deposit_row, pl.ds(start, width)], bias, mask=jnp.broadcast_to(deposit, bias.shape))
        bias = bias.astype(jnp.float32)
        new.append(value + (bias if value.ndim == 1 else bias[None, :]))
    return new


class _Refs(NamedTuple):
    """The refs of a kernel by role. Without offloading src, deposit and pools are None; staged ones are None where
    nothing of the kernel's tensors is staged."""

    operand: Any
    rows: Any
    src: Any
    deposit: Any
    count: Any
    banks: Any
    pools: Any
    staged_ids: Any
    staged: Any
    out: Any
    bank_outs: Any


def _split(refs, parts, offload, staged) -> _Refs:
    """refs: operand, rows, [src, deposit,] count, banks, [pools, [staging ids, staging rows]], output, [banks, [staging
    rows]]; those in brackets with `offload`, and with `staged` output rows."""
    operand, rows, *refs = refs
    if not offload:
        count, *banks, out = refs
        return _Refs(operand, rows, None, None, count, banks, None, None, None, out, None)
    src, deposit, count, *refs = refs
    banks, pools, refs = refs[:parts], refs[parts : 2 * parts], refs[2 * parts :]
    ids, held = None, None
    if staged:
        ids, held, refs = refs[0], refs[1 : 1 + parts], refs[1 + parts :]
    return _Refs(operand, rows, src, deposit, count, banks, pools, ids, held, refs[0], refs[1 : 1 + parts])


def _if_needed(refs, u, in_prefix, use):
    """Calls `use(row tensors, row, deposit targets or None, missing, ...)` if there is a u-th expert: with its bank row
    if it is resident, else the staging row that holds it, if the block is `in_prefix`, else the pool's.

    The row tensors are the weights and, if any, their bias.
    """
    # Asked for together, whether or not there is such an expert: one wait in place of two.
    row, src, count = refs.rows[u], None if refs.src is None else refs.src[u], refs.count[0]
    pl.when(u < count)(lambda: _from_row(refs, u, row, src, in_prefix, use))


def _from_row(refs, u, row, src, in_prefix, use):
    """As `_if_needed` of an expert that there is."""
    if refs.pools is None:
        use(refs.banks, row, None, False)
        return

    @pl.when(src < 0)
    def _resident():
        use(refs.banks, row, None, False)

    def missing(tensors, at, over_link):
        use(tensors, at, refs.bank_outs, over_link, deposit_row=row, deposit=refs.deposit[u] != 0)

    if refs.staged is None:
        pl.when(src >= 0)(lambda: missing(refs.pools, src, True))
        return
    held = jnp.where(in_prefix, staging_row(refs.staged_ids, src, refs.staged[0].shape[0]), -1)
    pl.when((src >= 0) & (held >= 0))(lambda: missing(refs.staged, held, False))
    pl.when((src >= 0) & (held < 0))(lambda: missing(refs.pools, src, True))


def _outputs(form, x_ref, x_row, tensors, row, outs, n_in, targets, missing, *, n_out, tile, batch, **deposit):
    """x w^T + b of the columns `outs`, as `_project`; `targets` are the banks to deposit in, or None.

    tile: `unroll` and `block_in`, or of packed weights, whose operand x_ref is `packed.to_lanes`, `units` and
    `row_sides`; a parameter with `_missing` takes the other's place where an expert is `missing`.
    """
    elsewhere = {name.removesuffix("_missing"): value for name, value in tile.items() if name.endswith("_missing")}
    tile = {name: value for name, value in tile.items() if not name.endswith("_missing")}
    if missing:
        tile |= elsewhere
    n = len(form.suffixes)
    targets, bias_target = (None, [None]) if targets is None else (targets[:n], targets[n:])
    weights, bias = tensors[:n], tensors[n:]
    args = (weights, row, outs, n_in)
    if isinstance(form, Dense):
        values = _project(x_ref, x_row, *args, **tile, batch=batch, targets=targets, **deposit)
    else:

        def x_at(lane, start, size):
            tokens = () if batch == 1 else (pl.ds(0, batch),)
            return x_ref.at[(*(() if x_row is None else (x_row,)), *tokens, lane, pl.ds(start, size))]

        values = packed.project(form, x_at, *args, n_out=n_out, **tile, batch=batch, targets=targets, **deposit)
    return _add_bias(values, bias[0], row, outs, deposit_ref=bias_target[0], **deposit) if bias else values


def _gate_up_kernel(*refs, batch, n_in, n_out, block_out, tile, offload, staged, parts, spec, dtype):
    refs = _split(refs, parts, offload, staged)
    u, j = pl.program_id(0), pl.program_id(1)

    def use(tensors, row, targets, missing, **deposit):
        first = j * block_out
        outs = [(start, block_out) for start in ((first, n_out + first) if spec.gated else (first,))]
        operands = (spec.gate_up, refs.operand, None, tensors, row, outs, n_in, targets, missing)
        products = _outputs(*operands, n_out=n_out, tile=tile, batch=batch, **deposit)
        h = spec.activate(*products).astype(dtype).astype(refs.out.dtype)
        cols = pl.ds(j * block_out, block_out)
        if batch > 1:
            place = refs.out.at[u, pl.ds(0, batch), cols]
        elif isinstance(spec.down, Dense):
            place = refs.out.at[u, cols]
        else:  # as the down projection reads it
            columns = j * block_out + jnp.arange(block_out, dtype=jnp.int32)
            place = refs.out.at[(u, *packed.lane_place(columns, spec.down))]
        store(place, h)

    _if_needed(refs, u, (j + 1) * block_out <= staged, use)


def _down_kernel(*refs, batch, n_in, n_out, block_out, tile, offload, staged, parts, spec, dtype):
    del dtype
    refs = _split(refs, parts, offload, staged)
    u, j = pl.program_id(0), pl.program_id(1)

    def use(tensors, row, targets, missing, **deposit):
        outs = [(j * block_out, block_out)]
        operands = (spec.down, refs.operand, u, tensors, row, outs, n_in, targets, missing)
        (y,) = _outputs(*operands, n_out=n_out, tile=tile, batch=batch, **deposit)
        cols = pl.ds(j * block_out, block_out)
        store(refs.out.at[u, cols] if batch == 1 else refs.out.at[u, pl.ds(0, batch), cols], y)

    _if_needed(refs, u, (j + 1) * block_out <= staged, use)


def _least_tile(batch: int) -> int:
    """A single token is multiplied and summed without tensor cores, whose tiles have at least 16 rows and columns."""
    return 1 if batch == 1 else 16


def _padded(batch: int) -> int:
    """Rows that the kernels compute for `batch` tokens."""
    return 1 if batch == 1 else max(16, 1 << (batch - 1).bit_length())


def decode_key(width: int, model: int, batch: int, itemsize: int = 2, spec=SILU) -> str:
    """The key of `decode_tiles` in the table of measured tiles."""
    return tiles_key("expert_ffn", spec, width, model, itemsize, f" B{_padded(batch)}")


def decode_tiles(width: int, model: int, batch: int, itemsize: int = 2, spec=SILU) -> dict:
    """Tile sizes and warps of the two kernels: divisors of the real widths, so that no dense tile needs a mask.

    `itemsize`: bytes of the compute dtype. Tiles of packed weights have `units` instead of `block_in`, see `packed.py`.
    `unroll` tiles are read before the first is used, and with `row_sides` all scales of an output row at once;
    `unroll_missing` and `row_sides_missing` are of rows in pinned memory, where more and wider reads may pay. None of
    them changes a sum or its order. Measured ones take the place of these.

    The operand of one token has fewer columns (words) a tile than the program has threads. Triton then loads it where
    it is used; else it goes through shared memory, with two barriers a tile (seen in the programs compiled for sm_90).
    """
    least = _least_tile(batch)

    def tiles(form, n_out, n_in, columns):
        if not isinstance(form, Dense):
            return dict(
                block_out=max(least, divisor_block(n_out, 8)),
                units=packed.default_units(form, batch, itemsize),
                unroll=1,
                unroll_missing=1,
                row_sides=False,
                row_sides_missing=batch == 1,
                num_warps=4,
                num_stages=2,
            )
        if batch > 1:
            block_out, block_in = max(least, divisor_block(n_out, 16)), divisor_block(n_in, 256)
            return dict(block_out=block_out, block_in=block_in, unroll=1, unroll_missing=1, num_warps=4, num_stages=3)
        # Measured on an H200 at D = 2048, F = 768 (docs/measurements.md): few numbers a thread, many threads.
        block_in = divisor_block(n_in, columns)
        unroll = divisor_block(n_in // block_in, 128 // columns)
        return dict(
            block_out=divisor_block(n_out, 8),
            block_in=block_in,
            unroll=unroll,
            unroll_missing=unroll,
            num_warps=8,
            num_stages=3,
        )

    formula = {"gate_up": tiles(spec.gate_up, width, model, 64), "down": tiles(spec.down, model, width, 128)}
    return with_measured(decode_key(width, model, batch, itemsize, spec), formula)


def _run(x, rows, src, deposit, count, banks, pool, distinct, tiles, interpret, between, spec, feeds, staging=None):
    tiles = {name: dict(t) for name, t in tiles}
    batch, model = x.shape
    offload = pool is not None
    held = {} if staging is None else dict(staging.rows)
    padded = _padded(batch)
    width = spec.outs("gate_up", banks["gate_up"].shape[1])[0]
    if batch == 1:
        x_in, h_shape, y_shape = x[0], (distinct, width), (distinct, model)
        h_dtype = x.dtype if isinstance(spec.down, Dense) else jnp.dtype(jnp.float32)
    else:
        x_in = jnp.pad(x, ((0, padded - batch), (0, 0)))
        h_shape, y_shape, h_dtype = (distinct, padded, width), (distinct, padded, model), x.dtype
    hidden = jax.ShapeDtypeStruct(h_shape, h_dtype)
    if batch == 1 and not isinstance(spec.down, Dense):
        # By lanes already, and wide: every program would widen it again, an instruction for each weight.
        hidden = jax.eval_shape(functools.partial(packed.to_lanes, form=spec.down), hidden)

    def launch(kernel, name, operand, out, n_in, n_out, feeds_kernels=False):
        t, form = tiles[name], getattr(spec, name)
        if not isinstance(form, Dense) and (batch > 1 or name == "gate_up"):
            operand = packed.to_lanes(operand, form).astype(jnp.float32 if batch == 1 else x.dtype)
        parts = spec.parts(name)
        used = [banks[part] for part in parts]
        out = [out]
        staged = 0 if staging is None else getattr(staging.prefix, name)
        if offload:
            args = [operand, rows, src, deposit, count, *used, *[pool[part] for part in parts]]
            aliases = {5 + i: 1 + i for i in range(len(parts))}
            if staged:
                # Aliased, though the kernel only reads them: who fills the rows next then depends on this kernel.
                used = [*used, *[held[part] for part in parts]]
                aliases |= {len(args) + 1 + i: 1 + len(parts) + i for i in range(len(parts))}
                args += [staging.ids, *used[len(parts) :]]
            out += [jax.ShapeDtypeStruct(row.shape, row.dtype) for row in used]
        else:
            args, aliases = (operand, rows, count, *used), {}
        body = functools.partial(
            kernel,
            batch=padded,
            n_in=n_in,
            n_out=n_out,
            block_out=t["block_out"],
            tile={name: value for name, value in t.items() if name not in ("block_out", "num_warps", "num_stages")},
            offload=offload,
            staged=staged,
            parts=len(parts),
            spec=spec,
            dtype=x.dtype,
        )
        result = call(
            body,
            grid=(distinct, n_out // t["block_out"]),
            out_shape=tuple(out),
            num_warps=t["num_warps"],
            num_stages=t["num_stages"],
            name=f"expert_ffn_{name}",
            feeds_kernels=feeds_kernels,
            input_output_aliases=aliases,
            interpret=interpret,
        )(*args)
        after = result[1:] if offload else used
        if offload and staged:
            held.update(zip(parts, after[len(parts) :], strict=True))
        return result[0], dict(zip(parts, after[: len(parts)], strict=True))

    # Of several tokens packed weights take the hidden vectors by lanes, into which XLA brings them.
    direct = between is None and (batch == 1 or isinstance(spec.down, Dense))
    h, gate_up = launch(_gate_up_kernel, "gate_up", x_in, hidden, model, width, feeds_kernels=direct)
    banks = {**banks, **gate_up}
    if between is not None:
        banks = between(h, banks)
    y, down = launch(_down_kernel, "down", h, jax.ShapeDtypeStruct(y_shape, jnp.float32), width, model, feeds)
    y = y[:, None, :] if batch == 1 else y[:, :batch]
    banks = {**banks, **down}
    return (y, banks) if staging is None else (y, banks, replace(staging, rows=held))


_run_cached = jax.jit(_run, static_argnums=(7, 8, 9, 10, 11, 12))


def expert_ffn_decode(
    x, rows, src, deposit, count, banks, pool, *, distinct, between=None, spec=SILU, tiles=None, interpret=False,
    staging=None, feeds_kernels=False,
):  # fmt: skip
    """Expert FFN of a few tokens through slots: every distinct expert on every token.

    Args:
      x: [B, D] compute dtype; D and F are multiples of 16 unless B is 1.
      rows: [>= U] i32, bank row of each distinct expert (for a missing one: the free row it is deposited in).
      src: [>= U] i32, pool row of a missing expert, -1 for a resident one. Ignored when `pool` is None.
      deposit: [>= U] i32, 1 to keep a missing expert in `rows`, 0 to bypass.
      count: [1] i32, number of valid entries.
      distinct: U, the static bound of `count`.
      banks: {"gate_up": [R, 2F, D], "down": [R, D, F]}, with biases also {"gate_up_bias": [R, 2F], "down_bias": [R,
        D]}, F instead of 2F without a gate; packed weights as their `Format` says. Donated by the caller, updated
        in place.
      pool: the same with E rows in pinned host memory, or None when all rows are resident.
      between: traced `between(h, banks) -> banks` between the two kernels: the place to wait for rows of "down" that
        were still on their way while "gate_up" was computed. h are the hidden vectors: when B is 1 [U, F], of packed
        weights [U, lanes, F / lanes], else [U, B or more, F].
      spec: `ExpertSpec` of which `without_kernel` says nothing.
      tiles: overrides of `decode_tiles` (for the benchmarks).
      feeds_kernels: of y and what is read with it, see `_compat.call`.
      staging: `Staging` of rows of `pool`, of which the whole blocks in its prefix are read there; None: of none.

    Returns:
      y [U, B, D] f32 (entries past `count` are undefined) and the banks; with `staging` that too, unchanged: what fills
      its rows anew must take them from here, or XLA copies them.

    Raises:
      ValueError: tiles that do not divide F and D; packed rows that do not fill their words.
    """
    batch, model = x.shape
    width = spec.outs("gate_up", banks["gate_up"].shape[1])[0]
    default = decode_tiles(width, model, batch, x.dtype.itemsize, spec)
    static = resolve_tiles(default, tiles, width=width, model=model, least=_least_tile(batch))
    # With a hook the kernels are traced in place: what it does belongs to the caller's program.
    run = _run if between is not None else _run_cached
    return run(
        x, rows, src, deposit, count, banks, pool, distinct, static, interpret, between, spec, feeds_kernels, staging
    )
