"""Attention to a window and to compressed entries, the indexer, and blocks of queries, against their definitions."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.engine.kv_cache import PagedKV
from moe_jax.layers.attention import AttentionCall
from moe_jax.layers.compressed_attention import (
    CompressedAttention,
    Compression,
    compressed_cache,
    window_and_entries,
)
from moe_jax.layers.indexer import Indexer
from moe_jax.layers.query_blocks import MIN_BLOCK, by_blocks, fitting_block
from moe_jax.layers.rope import Rope

B, N, H = 2, 3, 8
SCALE = H**-0.5


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def definition(q, local, start, sinks, entries, sees, window):
    """float64 attention of one row: q [T, N, H], local [w - 1 + T, H], entries [S, H], sees [T] lists of entries."""
    q, local, entries = (np.asarray(a, np.float64) for a in (q, local, entries))
    out = np.zeros(q.shape)
    for t in range(len(q)):
        first = max(t, window - 1 - start)  # earlier places hold no token
        keys = np.concatenate([local[first : t + window], entries[sees[t]]])
        for n in range(N):
            scores = np.append(keys @ q[t, n] * SCALE, sinks[n])
            weights = np.exp(scores - scores.max())
            out[t, n] = weights[:-1] @ keys / weights.sum()
    return out


@pytest.mark.slow
@pytest.mark.parametrize("window", (1, 20))
@pytest.mark.parametrize("T", (1, 37))
@pytest.mark.parametrize("kind", ("none", "shared", "chosen"))
def test_it_is_softmax_over_window_entries_and_sink(kind, T, window):
    S, start = 9, np.array([0, 50])
    q, local, sinks, entries = (
        numbers(0, B, T, N, H),
        numbers(1, B, window - 1 + T, H),
        numbers(2, N),
        numbers(3, B, S, H),
    )
    rng = np.random.default_rng(4)
    sees = [[np.flatnonzero(rng.random(S) < 0.4).tolist() for _ in range(T)] for _ in range(B)]
    given, visible = jnp.asarray(entries), None
    if kind == "none":
        given, sees = None, [[[]] * T] * B
    elif kind == "shared":
        visible = jnp.asarray([[np.isin(np.arange(S), seen) for seen in row] for row in sees])
    else:
        k = max(len(seen) for row in sees for seen in row)
        visible = jnp.asarray([[seen + [-1] * (k - len(seen)) for seen in row] for row in sees])
        given = lambda ids: jax.vmap(lambda e, i: e[jnp.maximum(i, 0)])(jnp.asarray(entries), ids)  # noqa: E731
    # Places before the sequence may hold anything that is finite.
    for max_scores in (1 << 26, 1):
        run = partial(window_and_entries, entries=given, window=window, scale=SCALE, max_scores=max_scores)
        out = jax.jit(run)(*map(jnp.asarray, (q, local, start, sinks)), visible=visible)
        for row in range(B):
            want = definition(q[row], local[row], start[row], sinks, entries[row], sees[row], window)
            np.testing.assert_allclose(out[row], want, atol=3e-6)


@settings(max_examples=10)
@given(T=st.integers(1, 70), block=st.sampled_from((1, 7, 16)))
def test_blocks_join_to_the_whole(T, block):
    x = numbers(T, 2, T, 3)
    firsts = by_blocks(lambda first, a: a + first, block, jnp.asarray(x))
    np.testing.assert_allclose(firsts, x + (np.arange(T) // block * block if T > block else 0 * np.arange(T))[:, None])


def test_blocks_fit():
    assert fitting_block(10, 640) == 64 and fitting_block(10, 1279) == 64
    assert fitting_block(1 << 30, 1) == MIN_BLOCK


@pytest.mark.parametrize("max_scores", (1 << 26, 1))
def test_indexer_takes_the_best_of_what_is_visible(max_scores):
    D, q_rank, heads, width, top, S, T = 6, 5, 4, 4, 3, 11, 19
    rope = Rope(2, 100.0)
    indexer = Indexer(
        D, q_rank, heads, width, jnp.float32, top=top, every=4, rope=rope, eps=1e-6, std=1.0, rngs=nnx.Rngs(0)
    )
    x, low, keys = numbers(0, B, T, D), numbers(1, B, T, q_rank), numbers(2, B, S, width)
    positions = np.arange(T) + np.array([[0], [25]])
    seen = np.minimum((positions + 1) // 4, S)
    run = jax.jit(lambda *args: indexer(*args, max_scores=max_scores))
    ids = run(*map(jnp.asarray, (x, low, positions, keys, seen)))
    assert ids.shape == (B, T, top) and ids.dtype == jnp.int32

    q = rope.turn(jnp.asarray((low @ np.asarray(indexer.q_up.weight[...]).T).reshape(B, T, heads, width)), positions)
    factors = x @ np.asarray(indexer.weights.weight[...]).T * heads**-0.5
    scores = np.einsum("bth,bths->bts", factors, np.maximum(np.einsum("bthi,bsi->bths", q, keys), 0)) * width**-0.5
    for row in range(B):
        for t in range(T):
            visible = scores[row, t, : seen[row, t]]
            want = set(np.argsort(-visible)[:top].tolist())
            got = [i for i in np.asarray(ids[row, t]).tolist() if i >= 0]
            assert len(got) == len(want) and set(got) == want


def layer(compression, window=3):
    attention = CompressedAttention(
        6, N, H, jnp.float32, q_rank=5, groups=1, out_rank=4, window=window, compression=compression,
        rope=Rope(4, 100.0), eps=1e-6, layer=0, std=0.5, rngs=nnx.Rngs(0),
    )  # fmt: skip
    return attention, (compressed_cache(H, window, compression), compressed_cache(H, window, Compression(4)))


@pytest.mark.slow
@pytest.mark.parametrize("compression", (None, Compression(4), Compression(2, (2, 4, 3))))
def test_garbage_in_recycled_pages_and_dead_rows_change_nothing(compression):
    """NaN in every page, as another sequence may have left it, and a row without a live token beside the others."""
    attention, layout = layer(compression)
    T = 13

    @jax.jit
    def run(x, positions, live, kv):
        return attention(x, kv.extend(live), AttentionCall(positions, live, None, None, "xla"))

    x, positions = jnp.asarray(numbers(0, 1, T, 6)), jnp.arange(T)[None]
    clean = replace(PagedKV.create(layout, 4, 8, 1, 2, jnp.float32), page_table=jnp.array([[1, 2]]))
    live = jnp.ones((1, T), bool)
    want, after = run(x, positions, live, clean)

    dirty = PagedKV.create(layout, 6, 8, 2, 2, jnp.float32)
    pages = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), dirty.pages)
    dirty = replace(dirty, pages=pages, page_table=jnp.array([[3, 5], [4, 2]]))
    both = jnp.concatenate([positions, positions + 40]), jnp.concatenate([live, ~live])
    got, kv = run(jnp.concatenate([x, 7 * x]), *both, dirty)
    np.testing.assert_allclose(got[0], want[0], atol=1e-6)
    assert np.all(np.isfinite(got)), "outputs of dead rows are finite"
    for name, state in kv.states[0].items():
        np.testing.assert_allclose(state[0], after.states[0][name][0], atol=1e-6)
        assert not np.any(state[1])
    for name, pool in kv.pages[0].items():
        ended = T // compression.every
        stored = np.concatenate([pool[3], pool[5]])[:ended]
        np.testing.assert_allclose(stored, np.concatenate([after.pages[0][name][p] for p in (1, 2)])[:ended], atol=1e-6)
        assert np.all(np.isnan(pool[4])) and np.all(np.isnan(pool[2]))


def test_only_plain_attention_knows_entries():
    attention, layout = layer(Compression(4))
    kv = PagedKV.create(layout, 2, 8, 1, 1, jnp.float32)
    call = AttentionCall(jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool), None, None, "cudnn")
    with pytest.raises(ValueError, match="'cudnn': must be \"xla\""):
        attention(jnp.zeros((1, 1, 6)), kv, call)
