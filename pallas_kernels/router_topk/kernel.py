"""The k largest scores of each row, without a sort: k rounds of maximum and mask in registers.

Limits on a GPU: a program holds 16 rows of E scores (E rounded up to a power of two) over 128 threads, E / 8 registers
a thread, and the k rounds are unrolled. Made for E of at most some hundred and k of at most some ten.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._compat import call, cdiv, load, next_power_of_2, pl, store

# Rows a program: enough work for long prefills, one program for a decode step.
ROWS = 16


def _topk_kernel(scores_ref, values_ref, ids_ref, *, tokens, experts, k, rows):
    e = jnp.arange(next_power_of_2(experts), dtype=jnp.int32)
    t = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    inside = (t < tokens)[:, None] & (e < experts)[None, :]
    left = load(scores_ref.at[t[:, None], e[None, :]], mask=inside, other=-jnp.inf)
    # NaN loses against every number, as an id must still come out; the value that is returned stays NaN-free.
    left = jnp.where(left == left, left, -jnp.inf)
    free = inside
    for i in range(k):
        best = jnp.max(jnp.where(free, left, -jnp.inf), axis=1)
        chosen = jnp.min(jnp.where(free & (left == best[:, None]), e[None, :], experts - 1), axis=1)
        column = jnp.full((rows,), i, jnp.int32)
        store(values_ref.at[t, column], best, mask=t < tokens)
        store(ids_ref.at[t, column], chosen, mask=t < tokens)
        free = free & (e[None, :] != chosen[:, None])


def router_topk(scores, k: int, *, interpret=False):
    """The k largest of each row, descending; ties: the lower id first.

    As `jax.lax.top_k`, except that NaN counts (and is returned) as -inf and zeros of both signs are equal. The ids of a
    row are distinct whatever its scores.

    Args:
      scores: [T, E] f32.
      k: static, 1 <= k <= E.

    Returns:
      values [T, k] f32 and ids [T, k] i32.

    Raises:
      ValueError: k out of range.
    """
    tokens, experts = scores.shape
    if not 1 <= k <= experts:
        raise ValueError(f"k = {k}: must be from 1 to the {experts} experts")
    return _run(scores, k=k, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("k", "interpret"))
def _run(scores, *, k, interpret):
    tokens, experts = scores.shape
    rows = min(ROWS, next_power_of_2(tokens))
    body = functools.partial(_topk_kernel, tokens=tokens, experts=experts, k=k, rows=rows)
    return call(
        body,
        grid=(cdiv(tokens, rows),),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, k), jnp.float32),
            jax.ShapeDtypeStruct((tokens, k), jnp.int32),
        ),
        num_warps=4 if rows > 1 else 1,
        num_stages=1,
        name="router_topk",
        interpret=interpret,
    )(scores)
