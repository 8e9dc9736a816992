"""Expert FFN in plain jax.numpy: the kernels' reference, and the path of platforms and row formats without a kernel."""

import jax
import jax.numpy as jnp

from pallas_kernels.expert_ffn import mxfp4
from pallas_kernels.expert_ffn.spec import SILU, ExpertSpec

_HIGHEST = jax.lax.Precision.HIGHEST


def _matmul_t(x, w):
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision=_HIGHEST, preferred_element_type=jnp.float32)


def _product(x, row, tensor, spec: ExpertSpec):
    """x w^T + b for the weights `tensor` of a row {name: array}: x [M, in] -> [M, out] f32."""
    w = row[tensor]
    if getattr(spec, tensor) == "mxfp4":
        w = mxfp4.decode(w, row[f"{tensor}_scale"], x.dtype)
    y = _matmul_t(x, w.astype(x.dtype))
    return y + row[f"{tensor}_bias"].astype(jnp.float32) if spec.biases else y


def _hidden(x, row, spec):
    """Hidden vectors [M, F] in x's dtype of x [M, D]."""
    gate, up = jnp.split(_product(x, row, "gate_up", spec), 2, axis=-1)
    return spec.activate(gate, up).astype(x.dtype)


def _row(banks, index):
    return {name: jax.lax.dynamic_index_in_dim(bank, index, keepdims=False) for name, bank in banks.items()}


def fetch_rows(rows, src, count, banks, pool):
    """Moves the missing experts (src >= 0) among the first `count` entries from the pool (host memory) to bank rows.

    One row at a time by slice, then move, then an in-place update: the only form that is safe on a pinned_host operand.
    """
    index = jnp.arange(src.shape[0], dtype=jnp.int32)
    wanted = (src >= 0) & (index < count)
    order = jnp.argsort(~wanted, stable=True)

    def move(i, banks):
        at = order[i]
        new = {}
        for name, bank in banks.items():
            row = jax.lax.dynamic_index_in_dim(pool[name], src[at], keepdims=False)
            row = jax.device_put(row, jax.memory.Space.Device)
            new[name] = jax.lax.dynamic_update_index_in_dim(bank, row, rows[at], 0)
        return new

    return jax.lax.fori_loop(0, jnp.sum(wanted), move, banks)


def expert_ffn_decode(x, rows, src, deposit, count, banks, pool, *, distinct, between=None, spec=SILU):
    """As `pallas_kernels.expert_ffn.decode.expert_ffn_decode`; a bypassed expert passes through its (free) bank row."""
    del deposit
    if pool is not None:
        banks = fetch_rows(rows, src, count[0], banks, pool)

    def each(body, tensor, like):
        """body(u, row) for every valid entry, with what `tensor` needs of its row: [distinct, B, width of `like`]."""
        used = {name: banks[name] for name in spec.parts(tensor)}

        def expert(u, out):
            return jax.lax.dynamic_update_index_in_dim(out, body(u, _row(used, rows[u])), u, 0)

        return jax.lax.fori_loop(0, count[0], expert, jnp.zeros((distinct, *like.shape), like.dtype))

    width = banks["gate_up"].shape[1] // 2
    hidden = jax.ShapeDtypeStruct((x.shape[0], width), x.dtype)
    h = each(lambda u, row: _hidden(x, row, spec), "gate_up", hidden)
    if between is not None:
        banks = between(h, banks)
    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return each(lambda u, row: _product(h[u], row, "down", spec), "down", out), banks


def expert_ffn_round(x, y, layout, span, banks, *, block_rows, spec=SILU):
    """As `pallas_kernels.expert_ffn.grouped.expert_ffn_round`."""

    def block(b, y):
        tokens = jax.lax.dynamic_slice_in_dim(layout["token"], b * block_rows, block_rows)
        pair = jax.lax.dynamic_slice_in_dim(layout["pair"], b * block_rows, block_rows)
        row = _row(banks, layout["block_row"][b])
        out = _product(_hidden(x[tokens], row, spec), row, "down", spec).astype(y.dtype)
        return y.at[jnp.where(pair >= 0, pair, y.shape[0])].set(out, mode="drop")

    return jax.lax.fori_loop(span[0], span[1], block, y)
