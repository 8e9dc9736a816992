"""Two kernels: partial softmax sums of a share of a sequence's tokens, and their exact merge.

* `partial`: program (b, h, s) of B x head blocks x splits takes the token blocks s, s + S, ... of sequence b, for up to
  `heads` query heads that share a key head, and keeps running maximum, sum and weighted values in fp32 (Milakov and
  Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2023, "Flash-Decoding").
* `merge`: program (b, n) rescales the S parts to their common maximum, adds the sink, and divides.

A token block lies within one page, so that rows of a power-of-two width are read as whole tiles.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._compat import call, cdiv, load, next_power_of_2, pl, pltriton, store
from pallas_kernels.tile_table import table_key, with_measured

HEADS = 16  # query heads of a program unless measured otherwise: the least rows of a tensor-core product
PROGRAMS = 264  # two for each multiprocessor of an H200
FLOOR = -1e30  # finite, so that a share without tokens gives weight 0 and no NaN


def splits_of(batch: int, head_blocks: int, blocks: int) -> int:
    """S: shares of a sequence of at most `blocks` token blocks, a power of two; more only where programs are idle."""
    most = max(1, min(PROGRAMS // (batch * head_blocks), blocks, 64))
    return 1 << (most.bit_length() - 1)


def partial_key(queries, values, page_table) -> str:
    """The key of `partial_tiles` in the table of measured tiles: heads, widths, page, and powers of two above batch and
    tokens. The arguments are those of the kernel, or their abstract shapes."""
    B, N, _ = queries[0].shape
    _, page, G, value_width = values.shape
    parts = "+".join(str(query.shape[-1]) for query in queries)
    tokens = next_power_of_2(page_table.shape[1] * page)
    shape = f"N{N} G{G} H{parts} V{value_width} P{page} B{next_power_of_2(B)} S{tokens}"
    return table_key("paged_attention", jnp.dtype(values.dtype).name, shape)


def partial_tiles(queries, values, page_table) -> dict:
    """Parameters of the first kernel: query `heads` of a program, `tokens` of a block within a page, `splits` (None:
    `splits_of`), its launch.

    Measured ones take the place of these. Arguments as of `partial_key`.
    """
    _, page, _, value_width = values.shape
    warps = 4 if value_width <= 128 else 8
    formula = dict(heads=HEADS, tokens=min(64, page), splits=None, num_warps=warps, num_stages=2)
    return with_measured(partial_key(queries, values, page_table), formula)


def _tiles(overrides, queries, values, page_table):
    tiles = partial_tiles(queries, values, page_table)
    if unknown := set(overrides or {}) - set(tiles):
        raise ValueError(f"tiles: no parameter {', '.join(sorted(unknown))}; they are {', '.join(tiles)}")
    tiles |= overrides or {}
    for name, least, most in (("heads", HEADS, 128), ("tokens", 1, values.shape[1]), ("splits", 1, 64)):
        value = tiles[name]
        if value is not None and not (least <= value <= most and value & (value - 1) == 0):
            raise ValueError(f"tiles[{name!r}] = {value}: must be a power of two from {least} to {most}")
    return tiles


def _columns(width: int):
    """(columns of a row of `width` elements, padded to a power of two by repeating the last; which are real)."""
    lanes = jnp.arange(next_power_of_2(width), dtype=jnp.int32)
    return jnp.minimum(lanes, width - 1), lanes < width


def _tile(ref, index, width: int, keep=None, rows=None):
    """Rows of `ref` at `index` x all columns, zero past the last column and where `keep` [rows, 1], if any, is false.

    rows: None: `index` has an array [rows, 1]; else it is (page, start, key head) and `rows` places of the page follow.
    The mask is the load's own: a copy into shared memory fills with zeros, where a choice after it would take the tile
    through registers.
    """
    columns, real = _columns(width)
    whole = width == columns.shape[0]
    if rows is not None:
        number, start, g = index
        if whole:
            at = ref.at[number, pl.ds(start, rows), g, pl.ds(0, width)]
        else:
            places = start + jnp.arange(rows, dtype=jnp.int32)
            at = ref.at[number, places[:, None], g, columns[None, :]]
    else:
        at = ref.at[*index, columns[None, :]]
    if whole and keep is None:
        return load(at)
    count = rows if rows is not None else index[-1].shape[0]
    mask = jnp.ones((count, 1), jnp.bool_) if keep is None else keep
    mask = jnp.broadcast_to(mask if whole else mask & real[None, :], (count, columns.shape[0]))
    return load(at, mask=mask, other=0)


def _partial_kernel(
    *refs, parts, widths, value_width, rows, group, page, tokens, splits, scale, window, softcap, shared
):
    """refs: queries, key pools, [value pool], table, lengths, outputs o [B, N, S, Hv], m and l [B, N, S]."""
    queries, refs = refs[:parts], refs[parts:]
    pools, refs = refs[:parts], refs[parts:]
    value_ref, refs = (pools[shared], refs) if shared is not None else (refs[0], refs[1:])
    table_ref, length_ref, o_ref, m_ref, l_ref = refs
    b, block, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    blocks = cdiv(group, rows)
    g = block // blocks
    within = (block % blocks) * rows + jnp.arange(rows, dtype=jnp.int32)  # rows of the group, some past its end
    heads = g * group + jnp.minimum(within, group - 1)
    q = [_tile(ref, (b, heads[:, None]), width) for ref, width in zip(queries, widths, strict=True)]
    length = length_ref[b]
    first = jnp.maximum(length - window, 0) // tokens if window is not None else length * 0
    count = (length + tokens - 1) // tokens - first  # token blocks of the sequence

    def step(i, carry):
        top, total, out = carry
        start = (first + split + i * splits) * tokens
        token = start + jnp.arange(tokens, dtype=jnp.int32)
        seen = token < length
        if window is not None:
            seen &= length - 1 - token < window
        at = table_ref[b, start // page], start % page, g
        keep = seen[:, None]
        scores = jnp.zeros((rows, tokens), jnp.float32)
        # Keys need no mask, whatever a page holds past the sequence: their scores are replaced. Values times 0 do.
        masks = [keep if i == shared else None for i in range(parts)]
        tiles = [
            _tile(pool, at, width, mask, tokens) for pool, width, mask in zip(pools[:parts], widths, masks, strict=True)
        ]
        for query, tile in zip(q, tiles, strict=True):
            scores += pltriton.dot(query, tile.astype(query.dtype), trans_b=True, allow_tf32=False)
        scores *= scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(seen[None, :], scores, FLOOR)
        higher = jnp.maximum(top, jnp.max(scores, axis=1))
        weights = jnp.where(seen[None, :], jnp.exp(scores - higher[:, None]), 0.0)
        fade = jnp.exp(top - higher)
        value = tiles[shared] if shared is not None else _tile(value_ref, at, value_width, keep, tokens)
        out = out * fade[:, None] + pltriton.dot(weights.astype(value.dtype), value, allow_tf32=False)
        return higher, total * fade + jnp.sum(weights, axis=1), out

    # Real values, not constants: a constant carry does not lower.
    zero = jnp.zeros((rows,), jnp.float32) + (length * 0).astype(jnp.float32)
    wide = jnp.zeros((rows, next_power_of_2(value_width)), jnp.float32) + (length * 0).astype(jnp.float32)
    steps = jnp.maximum(count - split + splits - 1, 0) // splits
    top, total, out = jax.lax.fori_loop(0, steps, step, (zero + FLOOR, zero, wide))
    columns, _ = _columns(value_width)
    # Lanes past the end of group or row repeat the last one: the same value to the same place.
    store(o_ref.at[b, heads[:, None], split, columns[None, :]], _repeat_last(out, value_width))
    store(m_ref.at[b, heads, split], top)
    store(l_ref.at[b, heads, split], total)


def _repeat_last(out, width):
    """out with its last real column in the columns past `width`."""
    lanes = jnp.arange(out.shape[1], dtype=jnp.int32)
    if width == out.shape[1]:
        return out
    last = jnp.sum(jnp.where(lanes[None, :] == width - 1, out, 0.0), axis=1, keepdims=True)
    return jnp.where(lanes[None, :] < width, out, last)


def _merge_kernel(*refs, splits, width, sinks):
    o_ref, m_ref, l_ref, *refs = refs
    out_ref = refs[-1]
    b, n = pl.program_id(0), pl.program_id(1)
    s = jnp.arange(splits, dtype=jnp.int32)
    m, total = load(m_ref.at[b, n, s]), load(l_ref.at[b, n, s])
    top = jnp.max(m)
    if sinks:
        sink = refs[0][n].astype(jnp.float32)
        top = jnp.maximum(top, sink)
    weight = jnp.exp(m - top)
    whole = jnp.sum(weight * total)
    if sinks:
        whole += jnp.exp(sink - top)
    columns, _ = _columns(width)
    parts = load(o_ref.at[b, n, s[:, None], columns[None, :]])
    out = jnp.sum(parts * weight[:, None], axis=0) / jnp.where(whole > 0, whole, 1.0)
    store(out_ref.at[b, n, columns], out.astype(out_ref.dtype))


def paged_decode_attention(
    queries, keys, values, page_table, lengths, sinks, *, scale, window, softcap, tiles=None,
    feeds_kernels=False, interpret=False
):  # fmt: skip
    """See `pallas_kernels.paged_attention.paged_decode_attention`.

    tiles: overrides of `partial_tiles` (for the benchmarks). Raises ValueError for an unknown one, and for tokens or
    splits out of range.
    """
    B, N, _ = queries[0].shape
    _, page, G, value_width = values.shape
    group = N // G
    tiles = _tiles(tiles, queries, values, page_table)
    rows = tiles["heads"]
    blocks = G * cdiv(group, rows)
    splits = tiles["splits"] or splits_of(B, blocks, page_table.shape[1] * page // tiles["tokens"])
    shared = next((i for i, pool in enumerate(keys) if pool is values), None)
    pools = (*keys,) if shared is not None else (*keys, values)
    float32 = jnp.float32
    o, m, total = call(
        functools.partial(
            _partial_kernel,
            parts=len(queries),
            widths=tuple(pool.shape[-1] for pool in keys),
            value_width=value_width,
            rows=rows,
            group=group,
            page=page,
            tokens=tiles["tokens"],
            splits=splits,
            scale=scale,
            window=window,
            softcap=softcap,
            shared=shared,
        ),
        grid=(B, blocks, splits),
        out_shape=(
            jax.ShapeDtypeStruct((B, N, splits, value_width), float32),
            jax.ShapeDtypeStruct((B, N, splits), float32),
            jax.ShapeDtypeStruct((B, N, splits), float32),
        ),
        num_warps=tiles["num_warps"],
        num_stages=tiles["num_stages"],
        name="paged_attention_partial",
        feeds_kernels=True,
        interpret=interpret,
    )(*queries, *pools, page_table, lengths)
    extra = () if sinks is None else (sinks,)
    return call(
        functools.partial(_merge_kernel, splits=splits, width=value_width, sinks=sinks is not None),
        grid=(B, N),
        out_shape=jax.ShapeDtypeStruct((B, N, value_width), queries[0].dtype),
        num_warps=4,
        num_stages=1,
        name="paged_attention_merge",
        feeds_kernels=feeds_kernels,
        interpret=interpret,
    )(o, m, total, *extra)
