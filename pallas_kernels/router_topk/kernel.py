"""The k largest scores of each row, without a sort: k rounds of maximum and mask in registers; with `route` also the
scores before and the weights after.

Limits on a GPU: a program holds 16 rows of E scores (E rounded up to a power of two) over 128 threads, E / 8 registers
a thread, and the k rounds are unrolled. Made for E of at most some hundred and k of at most some ten.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._compat import call, cdiv, load, next_power_of_2, pl, store

# Rows a program: enough work for long prefills, one program for a decode step.
ROWS = 16
MAGNITUDE = 0x7FFFFFFF  # all bits of a float32 but the sign
LOWEST = -0x7F800001  # the key of -inf
ZERO = -0x80000000  # the bits of -0, the least integer


def _largest(scores, free, e, last, k):
    """k times (value, id), each [rows], of the largest of `scores` [rows, E'] where `free`: descending, low ids first.

    NaN loses against every number, as an id must still come out; the value that is returned is then -inf. e: [E'] ids;
    `last` is given where nothing is free.
    """
    # By integers: a warp has one instruction for their maximum, and five shuffles for that of floats.
    left = _key(jnp.where(scores == scores, scores, -jnp.inf))
    found = []
    for _ in range(k):
        best = jnp.max(jnp.where(free, left, LOWEST), axis=1)
        chosen = jnp.min(jnp.where(free & (left == best[:, None]), e[None, :], last), axis=1)
        free = free & (e[None, :] != chosen[:, None])
        found.append((_value(best), chosen))
    return found


def _key(x):
    """int32 that orders as float32 x does; -0 is +0, NaN is above or below all numbers."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return bits ^ ((bits >> 31) & MAGNITUDE)


def _value(key):
    """float32 of `_key`."""
    return jax.lax.bitcast_convert_type(key ^ ((key >> 31) & MAGNITUDE), jnp.float32)


def _tile(tokens, experts, rows):
    """(ids [E'], rows [rows], which of [rows, E'] exist) of this program."""
    e = jnp.arange(next_power_of_2(experts), dtype=jnp.int32)
    t = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    return e, t, (t < tokens)[:, None] & (e < experts)[None, :]


def _topk_kernel(scores_ref, values_ref, ids_ref, *, tokens, experts, k, rows):
    e, t, inside = _tile(tokens, experts, rows)
    scores = load(scores_ref.at[t[:, None], e[None, :]], mask=inside, other=-jnp.inf)
    for i, (best, chosen) in enumerate(_largest(scores, inside, e, experts - 1, k)):
        column = jnp.full((rows,), i, jnp.int32)
        store(values_ref.at[t, column], best, mask=t < tokens)
        store(ids_ref.at[t, column], chosen, mask=t < tokens)


def _scores(logits, inside, score):
    """Scores of logits [rows, E'] f32, 0 outside."""
    if score == "softmax":
        # The largest number; a NaN or +inf makes the sum NaN, and so the row, as in jax.nn.softmax.
        top = _value(jnp.max(jnp.where(inside, _key(logits), LOWEST), axis=1))
        power = jnp.where(inside, jnp.exp(logits - top[:, None]), 0.0)
        return power / jnp.sum(power, axis=1)[:, None]
    if score == "sigmoid":
        return jnp.where(inside, 1.0 / (1.0 + jnp.exp(-logits)), 0.0)
    # softplus as in jax.nn: max(z, 0) + log(1 + exp(-|z|)), NaN where z is; log1p by its series where 1 + x is 1.
    small = jnp.exp(-jnp.abs(logits))
    log1p = jnp.where(small < 1e-4, small - 0.5 * small * small, jnp.log(1.0 + small))
    return jnp.where(inside, jnp.sqrt(jnp.where(logits > 0, logits, logits * 0.0) + log1p), 0.0)


def _route_kernel(*refs, tokens, experts, rows, how, biased):
    logits_ref, *refs = refs
    bias_ref = refs.pop(0) if biased else None
    ids_ref, weights_ref, scores_ref = refs
    e, t, inside = _tile(tokens, experts, rows)
    logits = load(logits_ref.at[t[:, None], e[None, :]], mask=inside, other=0.0).astype(jnp.float32)
    scores = _scores(logits, inside, how.score)
    store(scores_ref.at[t[:, None], e[None, :]], scores, mask=inside)
    values = logits if how.over_chosen else scores
    if how.rounded is not None:
        values = values.astype(how.rounded).astype(jnp.float32)
    free = inside
    if biased:
        bias = load(bias_ref.at[e], mask=e < experts, other=0.0)
        picked = inside & ~inside
        for _, chosen in _largest(values + bias[None, :], inside, e, experts - 1, how.k):
            picked = picked | (e[None, :] == chosen[:, None])
        free = picked & inside
    ids = [chosen for _, chosen in _largest(values, free, e, experts - 1, how.k)]
    # What was chosen, not the maximum: a NaN stays one.
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    weights = [jnp.max(jnp.where(e[None, :] == chosen[:, None], bits, ZERO), axis=1) for chosen in ids]
    weights = [jax.lax.bitcast_convert_type(value, jnp.float32) for value in weights]
    if how.over_chosen:
        weights = [jnp.exp(value - weights[0]) for value in weights]
        total = functools.reduce(jnp.add, weights)
        weights = [value / total for value in weights]
    elif how.norm is not None:
        powers = weights if how.norm == 1 else [_power(value, how.norm) for value in weights]
        total = functools.reduce(jnp.add, powers)
        total = (total if how.norm == 1 else _power(total, 1 / how.norm)) + how.epsilon
        weights = [value / total for value in weights]
    for i, (chosen, weight) in enumerate(zip(ids, weights, strict=True)):
        column = jnp.full((rows,), i, jnp.int32)
        store(ids_ref.at[t, column], chosen, mask=t < tokens)
        store(weights_ref.at[t, column], (weight * how.scale).astype(weights_ref.dtype), mask=t < tokens)


def _power(x, p: float):
    """x^p [rows] for x >= 0 and a static p > 0; NaN where x is."""
    if p == 2:
        return x * x
    if p == 0.5:
        return jnp.sqrt(x)
    return jnp.where(x == 0, 0.0, jnp.exp(p * jnp.log(x)))


@functools.partial(jax.jit, static_argnames=("how", "feeds_kernels", "interpret"))
def route(logits, bias, how, *, feeds_kernels=False, interpret=False):
    """See `pallas_kernels.router_topk.route`."""
    tokens, experts = logits.shape
    rows = min(ROWS, next_power_of_2(tokens))
    body = functools.partial(_route_kernel, tokens=tokens, experts=experts, rows=rows, how=how, biased=bias is not None)
    return call(
        body,
        grid=(cdiv(tokens, rows),),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, how.k), jnp.int32),
            jax.ShapeDtypeStruct((tokens, how.k), jnp.dtype(how.weights)),
            jax.ShapeDtypeStruct((tokens, experts), jnp.float32),
        ),
        num_warps=4 if rows > 1 else 1,
        num_stages=1,
        name="route",
        feeds_kernels=feeds_kernels,
        interpret=interpret,
    )(logits, *(() if bias is None else (bias,)))


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
