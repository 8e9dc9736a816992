"""One new token a sequence from projected heads to queries and pages: program (b, m) does one head.

A rotated head is loaded again as its two halves, for registers cannot be cut; the loads after the first find the row in
the first-level cache.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._compat import call, load, next_power_of_2, pl, store


def _clipped(x, clip):
    """x within +-clip, NaN where it is."""
    if clip is None:
        return x
    return jnp.where(x > clip, jnp.asarray(clip, x.dtype), jnp.where(x < -clip, jnp.asarray(-clip, x.dtype), x))


def _head(heads_ref, b, row, weight_ref, first_row, count, step, head, cos_ref, sin_ref, put, *, width, norm, clip):
    """Norm, clip and rotation of row `row` of sequence b; `put(columns, mask, values)` takes the result in pieces.

    first_row, count, step: which rows are normed together, if they are; head: number of this one among them. weight_ref
    None: no norm; cos_ref None: no rotation.
    """
    dtype = heads_ref.dtype
    inverse = None
    if weight_ref is not None:
        lanes = jnp.arange(next_power_of_2(width), dtype=jnp.int32)
        if norm.over_all:
            # Rows of the group times its columns: one sum, the same in every program.
            group = jnp.arange(next_power_of_2(count), dtype=jnp.int32)
            rows = first_row + group * step
            mask = (group < count)[:, None] & (lanes < width)[None, :]
            wide = load(heads_ref.at[b, rows[:, None], lanes[None, :]], mask=mask, other=0.0).astype(jnp.float32)
            total = jnp.sum(jnp.sum(wide * wide, axis=1)) / (count * width)
        else:
            wide = load(heads_ref.at[b, row, lanes], mask=lanes < width, other=0.0).astype(jnp.float32)
            total = jnp.sum(wide * wide) / width
        inverse = jax.lax.rsqrt(total + norm.row.eps)

    def piece(start, size):
        lanes = jnp.arange(next_power_of_2(size), dtype=jnp.int32)
        mask = lanes < size
        columns = start + lanes
        x = load(heads_ref.at[b, row, columns], mask=mask, other=0.0)
        if inverse is not None:
            at = head * width + columns if norm.over_all else columns
            x = norm.row.scaled(x.astype(jnp.float32) * inverse, load(weight_ref.at[at], mask=mask, other=0.0), dtype)
        return columns, mask, _clipped(x, clip)

    half = 0 if cos_ref is None else cos_ref.shape[-1]
    if half:
        (low, mask, a), (high, _, c) = piece(0, half), piece(half, half)
        cos, sin = (load(ref.at[b, low], mask=mask, other=0.0).astype(jnp.float32) for ref in (cos_ref, sin_ref))
        a, c = a.astype(jnp.float32), c.astype(jnp.float32)
        put(low, mask, (a * cos - c * sin).astype(dtype))
        put(high, mask, (c * cos + a * sin).astype(dtype))
    if 2 * half < width:
        put(*piece(2 * half, width - 2 * half))


def _kernel(*refs, query_heads, step, groups, width, page, columns, norm, clip, rotates):
    heads_ref, _, _, table_ref, position_ref, live_ref, *refs = refs  # the pools are written through their outputs
    cos_ref, sin_ref = (refs.pop(0), refs.pop(0)) if rotates else (None, None)
    q_weight, k_weight = (refs.pop(0), refs.pop(0)) if norm else (None, None)
    q_ref, k_ref, v_ref = refs
    b, m = pl.program_id(0), pl.program_id(1)
    position = position_ref[b]
    first_key = query_heads * step
    one = functools.partial(_head, heads_ref, b, width=width, norm=norm, clip=clip)

    @pl.when(m < query_heads)
    def _query():
        def put(at, mask, x):
            store(q_ref.at[b, m, at], x, mask=mask)

        one(m * step, q_weight, 0, query_heads, step, m, cos_ref, sin_ref, put)

    def into(pool, g):
        column = jnp.minimum(position // page, columns - 1)
        number = jnp.where(live_ref[b] != 0, table_ref[b, column], 0)

        def put(at, mask, x):
            store(pool.at[number, position % page, g, at], x.astype(pool.dtype), mask=mask)

        return put

    @pl.when((m >= query_heads) & (m < query_heads + groups))
    def _key():
        g = m - query_heads
        one(first_key + g, k_weight, first_key, groups, 1, g, cos_ref, sin_ref, into(k_ref, g))

    @pl.when(m >= query_heads + groups)
    def _value():
        g = m - query_heads - groups
        one(first_key + groups + g, None, 0, 0, 1, 0, None, None, into(v_ref, g))


@functools.partial(jax.jit, static_argnames=("query_heads", "step", "norm", "clip", "feeds_kernels", "interpret"))
def turn_heads(
    heads, keys, values, page_table, positions, live, cos, sin, *, query_heads, step, norm, q_weight, k_weight, clip,
    feeds_kernels=False, interpret=False,
):  # fmt: skip
    """See `pallas_kernels.turn_heads.turn_heads`."""
    B, _, H = heads.shape
    _, page, G, _ = keys.shape
    rotates = cos is not None
    body = functools.partial(
        _kernel,
        query_heads=query_heads,
        step=step,
        groups=G,
        width=H,
        page=page,
        columns=page_table.shape[1],
        norm=norm,
        clip=clip,
        rotates=rotates,
    )
    extra = ((cos, sin) if rotates else ()) + ((q_weight, k_weight) if norm else ())
    return call(
        body,
        grid=(B, query_heads + 2 * G),
        out_shape=(
            jax.ShapeDtypeStruct((B, query_heads, H), heads.dtype),
            jax.ShapeDtypeStruct(keys.shape, keys.dtype),
            jax.ShapeDtypeStruct(values.shape, values.dtype),
        ),
        num_warps=1,
        num_stages=1,
        name="turn_heads",
        feeds_kernels=feeds_kernels,
        input_output_aliases={1: 1, 2: 2},
        interpret=interpret,
    )(heads, keys, values, page_table, positions, live, *extra)
