"""Expert FFN in plain jax.numpy: the kernels' reference, and the path of platforms without Pallas-Triton (CPU)."""

import jax
import jax.numpy as jnp

_HIGHEST = jax.lax.Precision.HIGHEST


def _hidden(x, gate_up):
    """silu(x gate^T) * (x up^T): x [M, D], gate_up [2F, D] -> [M, F] in x's dtype."""
    gate, up = jnp.split(_matmul_t(x, gate_up), 2, axis=-1)
    return (gate * jax.nn.sigmoid(gate) * up).astype(x.dtype)


def _ffn(x, gate_up, down):
    """x [M, D], gate_up [2F, D], down [D, F] -> [M, D] f32."""
    return _matmul_t(_hidden(x, gate_up), down)


def _matmul_t(x, w):
    return jax.lax.dot_general(
        x, w.astype(x.dtype), (((1,), (1,)), ((), ())), precision=_HIGHEST, preferred_element_type=jnp.float32
    )


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


def expert_ffn_decode(x, rows, src, deposit, count, banks, pool, *, distinct, between=None):
    """As `pallas_kernels.expert_ffn.decode.expert_ffn_decode`; a bypassed expert passes through its (free) bank row."""
    del deposit
    if pool is not None:
        banks = fetch_rows(rows, src, count[0], banks, pool)

    def each(body, bank, like):
        """body(u, weights) for every valid entry: [distinct, B, width of `like`]."""

        def expert(u, out):
            weights = jax.lax.dynamic_index_in_dim(bank, rows[u], keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(out, body(u, weights), u, 0)

        return jax.lax.fori_loop(0, count[0], expert, jnp.zeros((distinct, *like.shape), like.dtype))

    width = banks["down"].shape[2]
    hidden = jax.ShapeDtypeStruct((x.shape[0], width), x.dtype)
    h = each(lambda u, weights: _hidden(x, weights), banks["gate_up"], hidden)
    if between is not None:
        banks = between(h, banks)
    y = each(lambda u, weights: _matmul_t(h[u], weights), banks["down"], jax.ShapeDtypeStruct(x.shape, jnp.float32))
    return y, banks


def expert_ffn_round(x, y, layout, span, banks, *, block_rows):
    """As `pallas_kernels.expert_ffn.grouped.expert_ffn_round`."""

    def block(b, y):
        rows = jax.lax.dynamic_slice_in_dim(layout["token"], b * block_rows, block_rows)
        pair = jax.lax.dynamic_slice_in_dim(layout["pair"], b * block_rows, block_rows)
        row = layout["block_row"][b]
        weights = {name: jax.lax.dynamic_index_in_dim(bank, row, keepdims=False) for name, bank in banks.items()}
        out = _ffn(x[rows], weights["gate_up"], weights["down"]).astype(y.dtype)
        return y.at[jnp.where(pair >= 0, pair, y.shape[0])].set(out, mode="drop")

    return jax.lax.fori_loop(span[0], span[1], block, y)
