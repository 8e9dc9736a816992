"""Attention against a NumPy definition: windows, lengths, grouped heads, query blocks, stale pages, the fresh path."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.engine.kv_cache import PagedKV
from moe_jax.layers.attention import (
    AttentionCall,
    GroupedQueryAttention,
    choose_implementation,
    fresh_attention,
    paged_attention,
)

N, G, H, P = 4, 2, 8, 4
SCALE = H**-0.5


def reference(q, k, v, start, window):
    """One sequence, float64: queries q [T, N, H] at start.., keys k and values v [S, G, H]."""
    out = np.zeros(q.shape)
    for t in range(q.shape[0]):
        p = start + t
        first = 0 if window is None else max(0, p - window + 1)
        for n in range(q.shape[1]):
            g = n // (q.shape[1] // k.shape[1])
            scores = k[first : p + 1, g].astype(np.float64) @ q[t, n] * SCALE
            weights = np.exp(scores - scores.max())
            out[t, n] = weights / weights.sum() @ v[first : p + 1, g]
    return out


def with_sinks(q, k, v, start, window, sinks):
    """As `reference`, each head with a further key of score `sinks[n]` and no value."""
    out = reference(q, k, v, start, window)
    for t in range(q.shape[0]):
        p = start + t
        first = 0 if window is None else max(0, p - window + 1)
        for n in range(q.shape[1]):
            scores = k[first : p + 1, n // (q.shape[1] // k.shape[1])].astype(np.float64) @ q[t, n] * SCALE
            total = np.exp(scores).sum()
            out[t, n] *= total / (total + np.exp(float(sinks[n])))
    return out


def filled_cache(lengths, pages, seed=0, garbage=0.0):
    """(kv, keys [B, S, G, H], values): sequences of `lengths` tokens in shuffled pages, `garbage` everywhere else."""
    rng = np.random.default_rng(seed)
    B = len(lengths)
    table = 1 + rng.permutation(B * pages).reshape(B, pages)
    keys, values = rng.standard_normal((2, B, pages * P, G, H)).astype(np.float32)
    pools = np.full((2, 1 + B * pages, P, G, H), garbage, np.float32)
    for b, length in enumerate(lengths):
        for s in range(length):
            pools[0, table[b, s // P], s % P] = keys[b, s]
            pools[1, table[b, s // P], s % P] = values[b, s]
    kv = PagedKV(
        ({"k": jnp.asarray(pools[0]), "v": jnp.asarray(pools[1])},),
        ({},),
        jnp.asarray(table, jnp.int32),
        jnp.asarray(lengths, jnp.int32),
        P,
    )
    return kv, keys, values


@pytest.mark.parametrize("window", (None, 1, 3, 6, 50))
@pytest.mark.parametrize(("lengths", "T"), (([13, 24, 1], 1), ([24, 17], 9)), ids=("decode", "chunk"))
def test_paged_attention_equals_its_definition(lengths, T, window):
    kv, keys, values = filled_cache(lengths, pages=6, garbage=np.nan)
    q = np.random.default_rng(1).standard_normal((len(lengths), T, N, H)).astype(np.float32)
    starts = np.array(lengths) - T
    positions = jnp.asarray(starts[:, None] + np.arange(T), jnp.int32)
    out = paged_attention(jnp.asarray(q), kv, 0, positions, window=window, scale=SCALE)
    for b, start in enumerate(starts):
        np.testing.assert_allclose(out[b], reference(q[b], keys[b], values[b], start, window), atol=2e-6)


@pytest.mark.parametrize("window", (None, 7))
def test_query_blocks_do_not_change_the_result(window):
    T = 44  # not a multiple of the block of 16
    kv, _, _ = filled_cache([T], pages=11)
    q = jnp.asarray(np.random.default_rng(2).standard_normal((1, T, N, H)), jnp.float32)
    positions = jnp.arange(T, dtype=jnp.int32)[None]
    whole = paged_attention(q, kv, 0, positions, window=window, scale=SCALE)
    blocked = paged_attention(q, kv, 0, positions, window=window, scale=SCALE, max_scores=1)
    np.testing.assert_allclose(blocked, whole, atol=1e-6)


def test_query_blocks_bound_the_score_tensor():
    T, limit = 256, 1 << 16
    kv, _, _ = filled_cache([T], pages=T // P)

    def attend(q, kv):
        return paged_attention(q, kv, 0, jnp.arange(T)[None], window=None, scale=SCALE, max_scores=limit)

    jaxpr = jax.make_jaxpr(attend)(jnp.zeros((1, T, N, H)), kv)
    loops = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "scan"]
    assert len(loops) == 1 and loops[0].params["length"] == T // (limit // (N * T))


def test_a_window_reads_only_its_pages():
    kv, _, _ = filled_cache([400], pages=100)

    def attend(q, kv):
        return paged_attention(q, kv, 0, jnp.array([[399]]), window=6, scale=SCALE)

    text = str(jax.make_jaxpr(attend)(jnp.zeros((1, 1, N, H)), kv))
    assert "1,12,2,8" in text  # keys of 3 pages: six positions touch at most that many
    assert "1,400,2,8" not in text


def test_rows_without_any_token_stay_finite():
    kv, _, _ = filled_cache([0, 5], pages=2, garbage=np.nan)
    out = paged_attention(jnp.ones((2, 1, N, H)), kv, 0, jnp.array([[0], [4]]), window=None, scale=SCALE)
    assert np.all(np.isfinite(out))


@pytest.mark.parametrize("window", (None, 5))
def test_the_fresh_path_equals_the_paged_one(window):
    """cuDNN needs a GPU; the same call with XLA behind it shows that causality, window and lengths mean the same."""
    lengths, T = [12, 7], 12
    kv, keys, values = filled_cache(lengths, pages=3)
    q = jnp.asarray(np.random.default_rng(3).standard_normal((2, T, N, H)), jnp.float32)
    live = jnp.arange(T)[None] < jnp.array(lengths)[:, None]
    positions = jnp.broadcast_to(jnp.arange(T), (2, T))
    paged = paged_attention(q, kv, 0, positions, window=window, scale=SCALE)
    k, v = jnp.asarray(keys[:, :T]), jnp.asarray(values[:, :T])
    fresh = fresh_attention(q, k, v, live, window=window, scale=SCALE, implementation="xla")
    for b, length in enumerate(lengths):
        np.testing.assert_allclose(fresh[b, :length], paged[b, :length], atol=2e-6)
    assert np.all(np.isfinite(fresh))


def test_choose_implementation():
    fits = {"platform": "gpu", "dtype": jnp.bfloat16, "batch": 1, "tokens": 8, "from_zero": True}
    fits |= {"page_size": 16, "head_dim": 128}
    assert choose_implementation(**fits) == "cudnn"
    for change in (
        {"platform": "cpu"},
        {"dtype": jnp.float32},
        {"from_zero": False},
        {"head_dim": 256},
        {"head_dim": 12},
    ):
        assert choose_implementation(**{**fits, **change}) == "xla", change
    for change in ({}, {"dtype": jnp.float32}, {"from_zero": False}, {"head_dim": 256}, {"sinks": True}):
        assert choose_implementation(**{**fits, "tokens": 1, **change}) == "pallas", change
    for change in ({"platform": "cpu"}, {"kernel": False}, {"batch": 8}, {"page_size": 8}):
        assert choose_implementation(**{**fits, "tokens": 1, **change}) == "xla", change


@pytest.mark.slow
@pytest.mark.parametrize("sinks", (False, True))
@pytest.mark.parametrize("window", (None, 5))
def test_the_decode_kernel_in_a_layer_equals_xla(window, sinks):
    lengths = [12, 7]
    layer = GroupedQueryAttention(
        16, N, G, H, jnp.float32, layer=0, window=window, sinks=sinks, std=0.5, rngs=nnx.Rngs(0)
    )
    kv, _, _ = filled_cache(lengths, pages=4, garbage=np.nan)
    positions = jnp.array(lengths, jnp.int32)[:, None]
    live = jnp.array([[True], [False]])
    x = jnp.asarray(np.random.default_rng(4).standard_normal((2, 1, 16)), jnp.float32)
    results = {}
    for name in ("xla", "interpret"):
        call = AttentionCall(positions, live, None, None, name)
        results[name], _ = layer(x, kv.extend(live), call)
    np.testing.assert_allclose(results["interpret"][0], results["xla"][0], atol=2e-6)
    assert np.all(np.isfinite(results["interpret"]))
    with pytest.raises(ValueError, match="2 new tokens a sequence: the decode kernel takes one"):
        layer(
            jnp.ones((1, 2, 16)),
            kv,
            AttentionCall(jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool), None, None, name),
        )


def test_unknown_implementation_is_an_error():
    attention = GroupedQueryAttention(16, N, G, H, jnp.float32, layer=0, window=None, std=0.02, rngs=nnx.Rngs(0))
    kv, _, _ = filled_cache([1], pages=1)
    half = jnp.zeros((1, 1, H // 2))
    call = AttentionCall(jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool), half, half, "flash")
    with pytest.raises(ValueError, match="flash"):
        attention(jnp.zeros((1, 1, 16)), kv, call)
    out, after = attention(jnp.ones((1, 1, 16)), kv, replace(call, implementation="xla", cos=half + 1))
    assert out.shape == (1, 1, 16) and np.any(np.asarray(after.pages[0]["k"]) != np.asarray(kv.pages[0]["k"]))


@pytest.mark.parametrize("max_scores", (1 << 26, 1), ids=("whole", "blocks"))
@pytest.mark.parametrize("window", (None, 5))
def test_sinks_take_their_share_of_the_softmax(window, max_scores):
    lengths, T = [40, 33], 20
    kv, keys, values = filled_cache(lengths, pages=10, garbage=np.nan)
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, T, N, H)).astype(np.float32)
    sinks = np.array([-30.0, 0.0, 1.0, 50.0], np.float32)  # nothing, two shares, all of it
    positions = np.stack([np.arange(n - T, n) for n in lengths]).astype(np.int32)
    out = paged_attention(
        jnp.asarray(q),
        kv,
        0,
        jnp.asarray(positions),
        window=window,
        scale=SCALE,
        sinks=jnp.asarray(sinks),
        max_scores=max_scores,
    )
    for b, length in enumerate(lengths):
        wanted = with_sinks(q[b], keys[b, :length], values[b, :length], length - T, window, sinks)
        np.testing.assert_allclose(out[b], wanted, atol=1e-5)
    assert np.abs(out[:, :, 3]).max() < 1e-12


def test_fused_attention_is_not_chosen_for_sinks():
    choice = dict(platform="gpu", dtype="bfloat16", batch=1, tokens=16, from_zero=True, page_size=64, head_dim=64)
    assert choose_implementation(**choice) == "cudnn"
    assert choose_implementation(**choice, sinks=True) == "xla"
    layer = GroupedQueryAttention(
        16, N, G, H, jnp.float32, layer=0, window=None, bias=True, sinks=True, std=0.1, rngs=nnx.Rngs(0)
    )
    assert layer.sinks.shape == (N,) and layer.qkv.bias.shape == ((N + 2 * G) * H,) and layer.out.bias.shape == (16,)
    kv, _, _ = filled_cache([8], pages=2)
    positions = jnp.arange(4, dtype=jnp.int32)[None]
    call = AttentionCall(positions, jnp.ones((1, 4), bool), None, None, "cudnn")
    with pytest.raises(ValueError, match="knows no sinks"):
        layer(jnp.zeros((1, 4, 16)), kv, call)
