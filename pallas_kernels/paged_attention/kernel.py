"""Two kernels: partial softmax sums of a share of a sequence's tokens, and their exact merge.

* `partial`: program (b, h, s) of B x head blocks x splits takes the token blocks s, s + S, ... of sequence b, for up to
  `heads` query heads that share a key head, and keeps running maximum, sum and weighted values in fp32 (Milakov and
  Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2023, "Flash-Decoding").
* `merge`: program (b, n, c) rescales a block of columns of the S parts to their common maximum, adds the sink, and
  divides; always in the same order.

A token block lies within one page, so that rows of a power-of-two width are read as whole tiles.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._compat import call, cdiv, exp2, load, next_power_of_2, pl, pltriton, shared_memory, store
from pallas_kernels.tile_table import table_key, with_measured

HEADS = 16  # query heads of a program at least: the least rows of a tensor-core product
MULTIPROCESSORS = 132  # of an H200
SPLITS = 256  # most shares of a sequence
LOG2_E = 1.4426950408889634  # scores are kept in units of log(2), so that weights are powers of 2
FLOOR = -1e30  # finite, so that a share without tokens gives weight 0 and no NaN
MERGE_PROGRAMS = 512  # of the second kernel, if its column blocks can be so narrow: they are small and wait for memory
MERGE_TILE = 4096  # partial sums that one of them holds at once: 32 a thread


def splits_of(batch: int, head_blocks: int, blocks: int, programs: int) -> int:
    """S: shares of a sequence of at most `blocks` token blocks, a power of two; more only while there are fewer than
    `programs` in all."""
    most = max(1, min(programs // (batch * head_blocks), blocks, SPLITS))
    return 1 << (most.bit_length() - 1)


def merge_tile(rows: int, splits: int, width: int) -> tuple[int, int]:
    """(columns, splits at a time) of a program of the second kernel, for `rows` = B * N rows of `width` values: narrow
    where rows are few, at least the 128 bytes of a memory transaction."""
    block = min(next_power_of_2(width), max(32, next_power_of_2(cdiv(width * rows, MERGE_PROGRAMS))))
    return block, min(splits, max(1, MERGE_TILE // block))


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
    `splits_of`), blocks that a step of its loop takes at once (`unroll`), its launch.

    Measured ones take the place of these. Arguments as of `partial_key`.
    """
    _, page, G, value_width = values.shape
    wide, group = _wide(value_width), queries[0].shape[1] // G
    formula = dict(heads=HEADS, tokens=min(64, page), splits=None, unroll=1, num_warps=4, num_stages=2)
    room = shared_memory() // (1 if wide else 2) - 1024
    # Many heads that share wide latents: 64 read them a quarter as often as 16. Sums of more have no room, and short
    # sequences leave few programs.
    programs = page_table.size * page // formula["tokens"] * G * cdiv(group, 64)
    if wide and group >= 64 and values.dtype.itemsize == 2 and programs > MULTIPROCESSORS // 2:
        many = formula | {"heads": 64, "num_warps": 8}
        formula = many if shared_bytes(many, queries, values) <= room else formula
    if len(queries) > 1 and formula["heads"] == HEADS and page % 32 == 0:  # latents
        formula |= {"tokens": 32, "unroll": 2}
    # Tiles on their way while another is worked on: four were no faster than three (docs/measurements.md).
    more = formula | {"num_stages": 3}
    formula = more if shared_bytes(more, queries, values) <= room else formula
    return with_measured(partial_key(queries, values, page_table), formula)


def shared_bytes(tiles, queries, values) -> int:
    """Shared memory of a program of the first kernel, as compiled for an H200: queries, a block's weights, and the
    tiles on their way. With several parts the values are among the keys."""
    heads, tokens = tiles["heads"], tiles["tokens"]
    width = sum(query.shape[-1] for query in queries)
    row = width + (values.shape[-1] if len(queries) == 1 else 0)
    # A product of 64 rows and more reads keys where they lie, and later than it is begun: they keep their place longer.
    held = max(1, tiles["num_stages"] - (heads < 64)) * tiles["unroll"]
    return values.dtype.itemsize * (heads * (width + tokens) + held * tokens * row)


def shares_of(tiles, queries, values, page_table, window=None) -> int:
    """S of these tiles: a window's blocks, or those of the whole table, in at most as many shares."""
    B, N, _ = queries[0].shape
    _, page, G, value_width = values.shape
    seen = page_table.shape[1] * page // tiles["tokens"]
    if window is not None:
        seen = min(seen, next_power_of_2(cdiv(window - 1, tiles["tokens"]) + 1))
    programs = MULTIPROCESSORS * (1 if _wide(value_width) else 2)
    head_blocks = G * cdiv(N // G, tiles["heads"])
    return min(tiles["splits"] or splits_of(B, head_blocks, seen, programs), next_power_of_2(seen))


def _wide(value_width: int) -> bool:
    """Whether one program is to fill a multiprocessor; else two share it."""
    return value_width > 128


def _tiles(overrides, queries, values, page_table):
    tiles = partial_tiles(queries, values, page_table)
    if unknown := set(overrides or {}) - set(tiles):
        raise ValueError(f"tiles: no parameter {', '.join(sorted(unknown))}; they are {', '.join(tiles)}")
    tiles |= overrides or {}
    limits = {"heads": (HEADS, 128), "tokens": (1, values.shape[1]), "splits": (1, SPLITS), "unroll": (1, 4)}
    for name, (least, most) in limits.items():
        value = tiles[name]
        if value is not None and not (least <= value <= most and value & (value - 1) == 0):
            raise ValueError(f"tiles[{name!r}] = {value}: must be a power of two from {least} to {most}")
    return tiles


def _columns(width: int, block: int | None = None, number=0):
    """(columns of a block of a row of `width` elements, past its end the last one repeated; which are real).

    block: a power of two; None: that of a whole row.
    """
    block = next_power_of_2(width) if block is None else block
    lanes = number * block + jnp.arange(block, dtype=jnp.int32)
    # Not clamped where none is past the end: seen to be neighbours, so that loads and stores take several at once.
    return lanes if width % block == 0 else jnp.minimum(lanes, width - 1), lanes < width


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
    *refs, parts, widths, value_width, rows, group, page, tokens, splits, unroll, scale, window, softcap, shared
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
    first = jnp.maximum(length - window, 0) // tokens if window is not None else 0
    count = (length + tokens - 1) // tokens - first  # token blocks of the sequence
    most = table_ref.shape[1] - 1
    # Added up once, after the loop: warps would wait for each other. Not where registers are short.
    by_column = rows < 64

    def page_of(k):
        """The page of this program's k-th token block; of one past the table's end the last."""
        return table_ref[b, jnp.minimum((first + split + k * splits) * tokens // page, most)]

    def step(i, carry):
        numbers, top, total, out = carry
        # One step ahead: where the keys of the next step lie is known before they are asked for.
        ahead = [page_of((i + 1) * unroll + j) for j in range(unroll)]
        scores, values = [], []
        for j, number in enumerate(numbers):
            start = (first + split + (i * unroll + j) * splits) * tokens
            token = start + jnp.arange(tokens, dtype=jnp.int32)
            seen = token < length
            if window is not None:
                seen &= length - 1 - token < window
            # A block past the sequence's end reads a page that it surely has: what its own entry holds is not known.
            at = jnp.where(start < length, number, numbers[0]) if j else number, start % page, g
            keep = seen[:, None]
            # Keys need no mask, whatever a page holds past the sequence: their scores are replaced. Values times 0 do.
            masks = [keep if part == shared else None for part in range(parts)]
            keys = [
                _tile(pool, at, width, mask, tokens)
                for pool, width, mask in zip(pools[:parts], widths, masks, strict=True)
            ]
            values.append(keys[shared] if shared is not None else _tile(value_ref, at, value_width, keep, tokens))
            score = jnp.zeros((rows, tokens), jnp.float32)
            for query, key in zip(q, keys, strict=True):
                score += pltriton.dot(query, key.astype(query.dtype), trans_b=True, allow_tf32=False)
            if softcap is None:
                score *= scale * LOG2_E
            else:
                score = softcap * LOG2_E * jnp.tanh(score * (scale / softcap))
            scores.append(jnp.where(seen[None, :], score, FLOOR))
        higher = jnp.maximum(top, jnp.max(functools.reduce(jnp.maximum, scores), axis=1))
        fade = exp2(top - higher)
        total, out = total * (fade[:, None] if by_column else fade), out * fade[:, None]
        for score, value in zip(scores, values, strict=True):
            weights = exp2(score - higher[:, None])  # 0 where unseen: every step's first block has a token that is seen
            total += weights if by_column else jnp.sum(weights, axis=1)
            out += pltriton.dot(weights.astype(value.dtype), value, allow_tf32=False)
        return ahead, higher, total, out

    # Real values, not constants: a constant carry does not lower.
    zero = (length * 0).astype(jnp.float32)
    top = jnp.full((rows,), FLOOR, jnp.float32) + zero
    total = jnp.zeros((rows, tokens) if by_column else (rows,), jnp.float32) + zero
    out = jnp.zeros((rows, next_power_of_2(value_width)), jnp.float32) + zero
    steps = cdiv(jnp.maximum(count - split + splits - 1, 0) // splits, unroll)
    numbers = [page_of(j) for j in range(unroll)]
    _, top, total, out = jax.lax.fori_loop(0, steps, step, (numbers, top, total, out))
    columns, _ = _columns(value_width)
    # Lanes past the end of group or row repeat the last one: the same value to the same place.
    store(o_ref.at[b, heads[:, None], split, columns[None, :]], _repeat_last(out, value_width))
    store(m_ref.at[b, heads, split], top)
    store(l_ref.at[b, heads, split], jnp.sum(total, axis=1) if by_column else total)


def _repeat_last(out, width):
    """out with its last real column in the columns past `width`."""
    lanes = jnp.arange(out.shape[1], dtype=jnp.int32)
    if width == out.shape[1]:
        return out
    last = jnp.sum(jnp.where(lanes[None, :] == width - 1, out, 0.0), axis=1, keepdims=True)
    return jnp.where(lanes[None, :] < width, out, last)


def _merge_kernel(*refs, splits, width, block, piece, sinks):
    o_ref, m_ref, l_ref, *refs = refs
    out_ref = refs[-1]
    b, n = pl.program_id(0), pl.program_id(1)
    # Lanes past the end of the row repeat the last one: the same value to the same place.
    columns, _ = _columns(width, block, pl.program_id(2))

    def piece_of(i):
        s = i * piece + jnp.arange(piece, dtype=jnp.int32)
        return load(o_ref.at[b, n, s[:, None], columns[None, :]]), load(m_ref.at[b, n, s])

    def rescaled(part, m):
        return part * jnp.exp2(m - top)[:, None]

    first = piece_of(0)  # asked for before the program's threads wait for each other
    s = jnp.arange(splits, dtype=jnp.int32)
    m, total = load(m_ref.at[b, n, s]), load(l_ref.at[b, n, s])
    top = jnp.max(m)
    if sinks:
        sink = refs[0][n].astype(jnp.float32) * LOG2_E
        top = jnp.maximum(top, sink)
    # Split i * piece + j is added to row j: rows are added up once, after the loop.
    parts = jax.lax.fori_loop(1, splits // piece, lambda i, sums: sums + rescaled(*piece_of(i)), rescaled(*first))
    whole = jnp.sum(jnp.exp2(m - top) * total)
    if sinks:
        whole += jnp.exp2(sink - top)
    out = jnp.sum(parts, axis=0) / jnp.where(whole > 0, whole, 1.0)
    store(out_ref.at[b, n, columns], out.astype(out_ref.dtype))


def paged_decode_attention(
    queries, keys, values, page_table, lengths, sinks, *, scale, window, softcap, tiles=None,
    feeds_kernels=False, interpret=False
):  # fmt: skip
    """See `pallas_kernels.paged_attention.paged_decode_attention`.

    tiles: overrides of `partial_tiles` (for the benchmarks). Raises ValueError for an unknown one, and for one out of
    range.
    """
    B, N, _ = queries[0].shape
    _, page, G, value_width = values.shape
    group = N // G
    tiles = _tiles(tiles, queries, values, page_table)
    rows = tiles["heads"]
    blocks = G * cdiv(group, rows)
    splits = shares_of(tiles, queries, values, page_table, window)
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
            unroll=tiles["unroll"],
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
    block, piece = merge_tile(B * N, splits, value_width)
    return call(
        functools.partial(
            _merge_kernel, splits=splits, width=value_width, block=block, piece=piece, sinks=sinks is not None
        ),
        grid=(B, N, cdiv(value_width, block)),
        out_shape=jax.ShapeDtypeStruct((B, N, value_width), queries[0].dtype),
        num_warps=4,
        num_stages=1,
        name="paged_attention_merge",
        feeds_kernels=feeds_kernels,
        interpret=interpret,
    )(o, m, total, *extra)
