"""Gated DeltaNet: chunks and single steps against a float64 loop over tokens, dead tokens, and what is materialised."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.engine.kv_cache import LayerCache, PagedKV
from moe_jax.layers.attention import AttentionCall
from moe_jax.layers.gated_delta_net import GatedDeltaNet, delta_net_cache, gated_delta_rule

B, G, R, K, V = 2, 2, 3, 4, 5
HEADS = G * R
D, TAPS = 6, 4
CHANNELS = 2 * G * K + HEADS * V
rule = jax.jit(gated_delta_rule, static_argnames=("chunk", "max_elements"))


def inputs(T, seed=0, decay=1.0, keys=None):
    """q, k, v, log_decay, beta, state; keys of unit length, as the block makes them."""
    rng = np.random.default_rng((seed, T))
    q, k = (rng.standard_normal((B, T, G, K)) for _ in range(2))
    k = k if keys is None else np.broadcast_to(keys, k.shape)
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    v, state = rng.standard_normal((B, T, HEADS, V)), rng.standard_normal((B, HEADS, K, V))
    log_decay = -decay * rng.uniform(0, 1, (B, T, HEADS))
    beta = rng.uniform(0, 1, (B, T, HEADS))
    return tuple(a.astype(np.float32) for a in (q, k, v, log_decay, beta, state))


def token_by_token(q, k, v, log_decay, beta, state):
    """The recurrence as the paper writes it, in float64: (o, the states after every token [T + 1, B, G R, K, V])."""
    q, k = (np.repeat(a.astype(np.float64), R, axis=2) for a in (q, k))
    states, outputs = [state.astype(np.float64)], []
    for t in range(v.shape[1]):
        S = np.exp(log_decay[:, t], dtype=np.float64)[..., None, None] * states[-1]
        delta = beta[:, t, :, None] * (v[:, t] - np.einsum("bhkv,bhk->bhv", S, k[:, t]))
        states.append(S + k[:, t, :, :, None] * delta[:, :, None, :])
        outputs.append(np.einsum("bhkv,bhk->bhv", states[-1], q[:, t]))
    return np.stack(outputs, axis=1), np.stack(states)


@settings(max_examples=8)
@given(
    T=st.sampled_from((1, 2, 7, 11)),
    chunk=st.sampled_from((1, 3, 4, 64)),
    pieces=st.sampled_from((1, 2, 100)),
    decay=st.sampled_from((0.0, 1.0, 60.0)),
)
def test_any_chunking_equals_the_recurrence(T, chunk, pieces, decay):
    arrays = inputs(T, decay=decay)
    want, states = token_by_token(*arrays)
    limit = pieces * B * min(chunk, T) * HEADS * (K + V)
    o, end = rule(*map(jnp.asarray, arrays), chunk=chunk, max_elements=limit)
    np.testing.assert_allclose(o, want, atol=2e-5)
    np.testing.assert_allclose(end, states[-1], atol=2e-5)


def test_chunks_of_64_with_equal_keys():
    """The worst system: all keys are one, beta is 1. Inverting it by powers of the matrix would lose all digits."""
    q, k, v, log_decay, beta, state = inputs(130, decay=0.0, keys=np.ones(K))
    arrays = q, k, v, log_decay, np.ones_like(beta), state
    want, states = token_by_token(*arrays)
    o, end = rule(*map(jnp.asarray, arrays))
    np.testing.assert_allclose(o, want, atol=1e-4)
    np.testing.assert_allclose(end, states[-1], atol=1e-4)


@pytest.mark.parametrize("T", (1, 9))
def test_tokens_without_decay_and_beta_leave_the_state(T):
    q, k, v, log_decay, beta, state = inputs(T)
    count = np.array([T, T // 2])
    live = (np.arange(T)[None] < count[:, None])[..., None]
    arrays = q, k, v, log_decay * live, beta * live, state
    _, states = token_by_token(q, k, v, log_decay, beta, state)
    _, end = rule(*map(jnp.asarray, arrays), chunk=4)
    for row in range(B):
        np.testing.assert_allclose(end[row], states[count[row]][row], atol=1e-5)


def test_a_long_prefill_is_no_scan_over_tokens_and_works_in_pieces():
    T, chunk = 64, 8
    shapes = [a.shape for a in inputs(T)]

    def in_pieces(*arrays):
        return gated_delta_rule(*arrays, chunk=chunk, max_elements=2 * B * chunk * HEADS * (K + V))

    text = str(jax.make_jaxpr(in_pieces)(*map(jnp.zeros, shapes)))
    assert "length=4" in text and "length=2" in text, "four pieces of two chunks"
    assert "length=64" not in text and f"f32[{B},8,{G},{R},{chunk},{K + V}]" not in text
    assert f"f32[{B},2,{G},{R},{chunk},{K + V}]" in text


@functools.cache
def block(dtype=jnp.float32):
    """(the block, its jitted call on x [B, T, D], a cache and live [B, T])."""
    net = GatedDeltaNet(
        D,
        dtype,
        key_heads=G,
        value_heads=HEADS,
        key_dim=K,
        value_dim=V,
        taps=TAPS,
        eps=1e-6,
        layer=1,
        std=0.7,
        rngs=nnx.Rngs(0),
    )

    @jax.jit
    def feed(x, kv, live):
        positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        return net(x, kv, AttentionCall(positions, live, None, None, "xla"))

    return net, feed


def cache(dtype=jnp.float32):
    layout = (LayerCache(paged={"k": (1,)}), delta_net_cache(CHANNELS, TAPS, HEADS, K, V))
    return PagedKV.create(layout, 2, 4, B, 1, dtype)


def numbers(*shape):
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("sizes", ((3, 4), (1,) * 7, (2, 1, 4)))
def test_calls_of_any_size_give_the_same(sizes):
    (_, feed), x = block(), numbers(B, 7, D)
    whole, end = feed(x, cache(), np.ones((B, 7), bool))
    kv, at = cache(), 0
    for size in sizes:
        out, kv = feed(x[:, at : at + size], kv, np.ones((B, size), bool))
        np.testing.assert_allclose(out, whole[:, at : at + size], atol=2e-5)
        at += size
    for name, state in end.states[1].items():
        np.testing.assert_allclose(kv.states[1][name], state, atol=2e-5)
        assert np.any(state)


def test_dead_tokens_do_not_advance_the_states():
    (_, feed), x = block(), numbers(B, 6, D)
    live = np.arange(6)[None] < np.array([[6], [2]])
    out, kv = feed(x, cache(), live)
    alone, short = feed(x[:, :2], cache(), np.ones((B, 2), bool))
    np.testing.assert_allclose(out[1, :2], alone[1], atol=1e-5)
    for name in ("conv", "delta"):
        np.testing.assert_allclose(kv.states[1][name][1], short.states[1][name][1], atol=1e-5)
    _, after = feed(x[:, :1], kv, np.array([[True], [False]]))
    for name in ("conv", "delta"):
        np.testing.assert_array_equal(after.states[1][name][1], kv.states[1][name][1])
        assert np.any(np.asarray(after.states[1][name][0]) != np.asarray(kv.states[1][name][0]))


def test_the_state_is_float32_in_a_narrow_model():
    net, feed = block(jnp.bfloat16)
    assert net.A_log.dtype == net.dt_bias.dtype == jnp.float32
    out, kv = feed(numbers(B, 3, D).astype(jnp.bfloat16), cache(jnp.bfloat16), np.ones((B, 3), bool))
    assert out.dtype == kv.states[1]["conv"].dtype == jnp.bfloat16 and kv.states[1]["delta"].dtype == jnp.float32
