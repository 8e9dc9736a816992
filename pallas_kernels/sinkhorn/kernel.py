"""`sinkhorn` in registers: a program keeps some matrices through all iterations."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._compat import call, cdiv, load, next_power_of_2, pl, store

# Matrices a program: with the n = 4 of DeepSeek-V4, 4 numbers a thread of 128.
ROWS = 32


def _sinkhorn_kernel(logits_ref, out_ref, *, rows, n, iterations, eps, block):
    side = jnp.arange(next_power_of_2(n), dtype=jnp.int32)
    t = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
    at = t[:, None, None], side[None, :, None], side[None, None, :]
    inside = (at[0] < rows) & (at[1] < n) & (at[2] < n)
    logits = load(logits_ref.at[at], mask=inside, other=0.0)
    largest = jnp.max(jnp.where(inside, logits, -jnp.inf), axis=2)
    # Rows outside have no largest value; they stay zero.
    powers = jnp.where(inside, jnp.exp(logits - jnp.where(largest == -jnp.inf, 0.0, largest)[:, :, None]), 0.0)
    totals = jnp.sum(powers, axis=2)
    matrix = jnp.where(inside, powers / jnp.where(totals == 0.0, 1.0, totals)[:, :, None] + eps, 0.0)

    def columns(matrix):
        return matrix / (jnp.sum(matrix, axis=1) + eps)[:, None, :]

    def both(_, matrix):
        return columns(matrix / (jnp.sum(matrix, axis=2) + eps)[:, :, None])

    matrix = jax.lax.fori_loop(1, iterations, both, columns(matrix))
    store(out_ref.at[at], matrix, mask=inside)


@functools.partial(jax.jit, static_argnames=("iterations", "eps", "interpret"))
def sinkhorn_kernel(logits: jax.Array, *, iterations: int, eps: float, interpret: bool = False) -> jax.Array:
    """logits [R, n, n] f32 -> [R, n, n] f32."""
    rows, n, _ = logits.shape
    block = min(ROWS, next_power_of_2(rows))
    body = functools.partial(_sinkhorn_kernel, rows=rows, n=n, iterations=iterations, eps=eps, block=block)
    return call(
        body,
        grid=(cdiv(rows, block),),
        out_shape=jax.ShapeDtypeStruct(logits.shape, jnp.float32),
        num_warps=4 if block * n * n > 128 else 1,
        num_stages=1,
        name="sinkhorn",
        interpret=interpret,
    )(logits)
