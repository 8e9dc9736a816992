"""Expert FFN in plain jax.numpy: the kernels' reference, and the path of platforms and row formats without a kernel."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dequant_gemm.ref import product
from pallas_kernels.expert_ffn.spec import SILU, ExpertSpec
from pallas_kernels.expert_ffn.staging import Staging, regions
from pallas_kernels.fetch_rows import fetch_rows


def _weights(row, tensor, n_in, spec: ExpertSpec, dtype):
    """(w [out, n_in] in `dtype`, bias [out] or None) of `tensor` of a row {name: array}."""
    form = getattr(spec, tensor)
    parts = {suffix: row[tensor + suffix] for suffix in form.suffixes}
    w = form.decode(parts, spec.outs(tensor, parts[""].shape[0]), n_in, dtype)
    return w, row[f"{tensor}_bias"] if spec.biases else None


def _hidden(x, weights, spec):
    """Hidden vectors [M, F] in x's dtype of x [M, D]."""
    z = product(x, *weights)
    return spec.activate(*(jnp.split(z, 2, axis=-1) if spec.gated else (z,))).astype(x.dtype)


def _row(banks, index):
    return {name: jax.lax.dynamic_index_in_dim(bank, index, keepdims=False) for name, bank in banks.items()}


def _from_staging(rows, src, count, banks, staging: Staging, spec):
    """The banks with the staged parts of missing rows in the place of the pool's."""
    entries = jnp.arange(src.shape[0], dtype=jnp.int32) < count[0]
    shapes = {name: bank.shape[1:] for name, bank in banks.items()}
    banks = dict(banks)
    for p in range(staging.ids.shape[0]):
        wanted = entries & (src >= 0) & (src == staging.ids[p])
        row, held = rows[jnp.argmax(wanted)], jnp.any(wanted)
        for name, spans in regions(staging.prefix, spec, shapes).items():
            bank, given = banks[name], staging.rows[name][p]
            for start, stop in spans:
                place = (row, np.int32(start), *[np.int32(0)] * (bank.ndim - 2))
                now = jax.lax.dynamic_slice(bank, place, (1, stop - start, *bank.shape[2:]))
                bank = jax.lax.dynamic_update_slice(bank, jnp.where(held, given[start:stop][None], now), place)
            banks[name] = bank
    return banks


def expert_ffn_decode(
    x, rows, src, deposit, count, banks, pool, *, distinct, between=None, spec=SILU, fetch="xla", staging=None
):
    """As `pallas_kernels.expert_ffn.decode.expert_ffn_decode`; a bypassed expert passes through its (free) bank row.

    fetch: implementation of `fetch_rows`, which moves the missing rows first; the staged parts are then laid over them.
    """
    del deposit
    if pool is not None:
        banks = fetch_rows(rows, src, count, banks, pool, distinct=distinct, implementation=fetch)
        if staging is not None:
            banks = _from_staging(rows, src, count, banks, staging, spec)

    def each(body, tensor, like):
        """body(u, row) for every valid entry, with what `tensor` needs of its row: [distinct, B, width of `like`]."""
        used = {name: banks[name] for name in spec.parts(tensor)}

        def expert(u, out):
            return jax.lax.dynamic_update_index_in_dim(out, body(u, _row(used, rows[u])), u, 0)

        return jax.lax.fori_loop(0, count[0], expert, jnp.zeros((distinct, *like.shape), like.dtype))

    (batch, model), dtype = x.shape, x.dtype
    width = spec.outs("gate_up", banks["gate_up"].shape[1])[0]
    hidden = jax.ShapeDtypeStruct((batch, width), dtype)
    h = each(lambda u, row: _hidden(x, _weights(row, "gate_up", model, spec, dtype), spec), "gate_up", hidden)
    if between is not None:
        banks = between(h, banks)
    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    y = each(lambda u, row: product(h[u], *_weights(row, "down", width, spec, dtype)), "down", out)
    return (y, banks) if staging is None else (y, banks, staging)


def expert_ffn_round(x, y, layout, span, banks, *, block_rows, spec=SILU):
    """As `pallas_kernels.expert_ffn.grouped.expert_ffn_round`; an expert's weights are decoded once for its blocks."""
    block_row, model = layout["block_row"], x.shape[1]
    width = spec.outs("gate_up", banks["gate_up"].shape[1])[0]

    def expert(carry):
        first, y = carry
        bank_row = block_row[first]
        row = _row(banks, bank_row)
        gate_up = _weights(row, "gate_up", model, spec, x.dtype)
        down = _weights(row, "down", width, spec, x.dtype)

        def block(carry):
            b, y = carry
            tokens = jax.lax.dynamic_slice_in_dim(layout["token"], b * block_rows, block_rows)
            pair = jax.lax.dynamic_slice_in_dim(layout["pair"], b * block_rows, block_rows)
            out = product(_hidden(x[tokens], gate_up, spec), *down).astype(y.dtype)
            return b + 1, y.at[jnp.where(pair >= 0, pair, y.shape[0])].set(out, mode="drop")

        # The condition reads within bounds: past the last block a gather clamps its index.
        return jax.lax.while_loop(lambda c: (c[0] < span[1]) & (block_row[c[0]] == bank_row), block, (first, y))

    return jax.lax.while_loop(lambda c: c[0] < span[1], expert, (span[0], y))[1]
