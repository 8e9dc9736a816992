"""The Mamba block: convolution and scan against loops in NumPy, chunks against tokens one by one, dead tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.engine.kv_cache import LayerCache, PagedKV
from moe_jax.layers.attention import AttentionCall
from moe_jax.layers.causal_conv import causal_conv
from moe_jax.layers.mamba import Mamba, mamba_cache, selective_scan

B, INNER, N, TAPS, D = 2, 5, 3, 4, 4


def numbers(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


@settings(max_examples=12)
@given(T=st.sampled_from((1, 2, 7)), lengths=st.lists(st.integers(0, 9), min_size=B, max_size=B))
def test_causal_conv(T, lengths):
    lengths = np.minimum(lengths, T)
    live = np.arange(T)[None] < lengths[:, None]
    u, past, weight, bias = numbers(B, T, INNER), numbers(B, TAPS - 1, INNER), numbers(INNER, TAPS), numbers(INNER)
    out, last = causal_conv(*map(jnp.asarray, (u, live, weight, bias, past)))
    every = np.concatenate([past, u], axis=1)
    for t in range(T):
        want = bias + np.einsum("bjd,dj->bd", every[:, t : t + TAPS], weight)
        np.testing.assert_allclose(out[:, t], want, atol=1e-5)
    for row, length in enumerate(lengths):
        np.testing.assert_array_equal(last[row], every[row, length : length + TAPS - 1])


@settings(max_examples=8)
@given(T=st.sampled_from((1, 6, 11)), chunk=st.sampled_from((1, 4, 16)))
def test_selective_scan(T, chunk):
    u, dt = numbers(B, T, INNER), np.abs(numbers(B, T, INNER, seed=1))
    A = -np.abs(numbers(INNER, N))
    into, out_of, start = numbers(B, T, N), numbers(B, T, N, seed=1), numbers(B, INNER, N)
    dt[1, T // 2 :] = 0  # as for dead tokens
    state, want = start.astype(np.float64), []
    for t in range(T):
        state = np.exp(dt[:, t, :, None] * A) * state + (dt[:, t] * u[:, t])[..., None] * into[:, t, None]
        want.append(np.einsum("bdn,bn->bd", state, out_of[:, t]))
        if t == T // 2 - 1:
            at_half = state[1]
    arrays = map(jnp.asarray, (u, dt, A, into, out_of, start))
    y, end = selective_scan(*arrays, max_scan=chunk * B * INNER * N)
    np.testing.assert_allclose(y, np.stack(want, axis=1), atol=1e-5)
    np.testing.assert_allclose(end, state, atol=1e-5)
    if T >= 2:
        np.testing.assert_allclose(end[1], at_half, atol=1e-5)


def test_a_long_scan_holds_one_chunk_of_states():
    T, limit = 64, 8 * B * INNER * N

    def scan(*arrays):
        return selective_scan(*arrays, max_scan=limit)

    shapes = ((B, T, INNER), (B, T, INNER), (INNER, N), (B, T, N), (B, T, N), (B, INNER, N))
    text = str(jax.make_jaxpr(scan)(*map(jnp.zeros, shapes)))
    assert f"f32[{B},8,{INNER},{N}]" in text and f"f32[{B},{T},{INNER},{N}]" not in text


def block():
    mamba = Mamba(
        D, INNER, jnp.float32, state_dim=N, dt_rank=2, taps=TAPS, eps=1e-6, layer=1, std=0.7, rngs=nnx.Rngs(0)
    )
    mamba.conv_bias[...], mamba.dt_bias[...] = jnp.asarray(numbers(INNER)), jnp.asarray(numbers(INNER, seed=1))
    return mamba


def cache():
    return PagedKV.create((LayerCache(paged={"k": (1,)}), mamba_cache(INNER, N, TAPS)), 2, 4, B, 1, jnp.float32)


def feed(mamba, x, kv, live):
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    return mamba(jnp.asarray(x), kv, AttentionCall(positions, jnp.asarray(live), None, None, "xla"))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ((7,), (3, 4), (1,) * 7, (2, 1, 4)))
def test_chunks_of_any_size_give_the_same(sizes):
    mamba, x = block(), numbers(B, 7, D)
    whole, end = feed(mamba, x, cache(), np.ones((B, 7), bool))
    kv, at = cache(), 0
    for size in sizes:
        out, kv = feed(mamba, x[:, at : at + size], kv, np.ones((B, size), bool))
        np.testing.assert_allclose(out, whole[:, at : at + size], atol=1e-5)
        at += size
    for name, state in end.states[1].items():
        np.testing.assert_allclose(kv.states[1][name], state, atol=1e-5)
        assert np.any(state)


def test_dead_tokens_do_not_advance_the_state():
    mamba, x = block(), numbers(B, 6, D)
    live = np.arange(6)[None] < np.array([[6], [2]])
    out, kv = feed(mamba, x, cache(), live)
    alone, short = feed(mamba, x[:, :2], cache(), np.ones((B, 2), bool))
    np.testing.assert_allclose(out[1, :2], alone[1], atol=1e-5)
    for name in ("conv", "ssm"):
        np.testing.assert_allclose(kv.states[1][name][1], short.states[1][name][1], atol=1e-5)
    _, after = feed(mamba, x[:, :1], kv, np.array([[True], [False]]))
    for name in ("conv", "ssm"):
        np.testing.assert_array_equal(after.states[1][name][1], kv.states[1][name][1])
        assert np.any(np.asarray(after.states[1][name][0]) != np.asarray(kv.states[1][name][0]))


def test_the_recurrence_is_float32_in_a_narrow_model():
    mamba = Mamba(
        D, INNER, jnp.bfloat16, state_dim=N, dt_rank=2, taps=TAPS, eps=1e-6, layer=1, std=0.7, rngs=nnx.Rngs(0)
    )
    assert mamba.A_log.dtype == mamba.D.dtype == mamba.dt_bias.dtype == jnp.float32
    layout = (LayerCache(paged={"k": (1,)}), mamba_cache(INNER, N, TAPS))
    kv = PagedKV.create(layout, 2, 4, B, 1, jnp.bfloat16)
    out, kv = feed(mamba, numbers(B, 3, D).astype(jnp.bfloat16), kv, np.ones((B, 3), bool))
    assert out.dtype == kv.states[1]["conv"].dtype == jnp.bfloat16 and kv.states[1]["ssm"].dtype == jnp.float32
