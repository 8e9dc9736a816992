"""Latent attention: decode over latents equals attention over expanded keys and values, whatever the path."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.engine.kv_cache import PagedKV
from moe_jax.layers import mla
from moe_jax.layers.attention import AttentionCall, fresh_attention
from moe_jax.layers.mla import LatentAttention, latent_attention, mla_cache
from moe_jax.layers.rope import rope_tables

D, N, R, H, HR, HV, P = 12, 3, 8, 6, 4, 5, 4


def layer(q_rank=None, v_dim=HV, pairs=True):
    return LatentAttention(
        D,
        N,
        jnp.float32,
        q_rank=q_rank,
        latent_dim=R,
        nope_dim=H,
        rope_dim=HR,
        v_dim=v_dim,
        pairs=pairs,
        score_factor=1.7,
        layer=0,
        std=0.6,
        rngs=nnx.Rngs(1),
    )


def cache(lengths, pages, garbage=0.0):
    """Empty cache with `garbage` in every page, as if other sequences had used them."""
    B = len(lengths)
    kv = PagedKV.create((mla_cache(R, HR),), 1 + B * pages, P, B, pages, jnp.float32)
    table = 1 + np.random.default_rng(0).permutation(B * pages).reshape(B, pages)
    return replace(
        kv,
        pages=jax.tree.map(lambda pool: jnp.full_like(pool, garbage), kv.pages),
        page_table=jnp.asarray(table, jnp.int32),
    )


def call(positions, live, implementation="xla"):
    positions = jnp.asarray(positions, jnp.int32)
    cos, sin = rope_tables(positions, HR, 1e4, jnp.float32)
    return AttentionCall(positions, jnp.asarray(live, bool), cos, sin, implementation)


def feed(attention, x, kv, start, live=None):
    """Output of the tokens x [B, T, D] from position `start` on, and the cache."""
    B, T, _ = x.shape
    live = np.ones((B, T), bool) if live is None else live
    positions = jnp.asarray(np.full((B, 1), start) + np.arange(T))
    return _run(nnx.split(attention), x, kv, positions, jnp.asarray(live))


@jax.jit
def _run(attention, x, kv, positions, live):
    return nnx.merge(*attention)(x, kv.extend(live), call(positions, live))


@pytest.mark.parametrize("q_rank", (None, 7))
def test_decode_over_latents_equals_prefill_over_expanded_heads(q_rank):
    attention = layer(q_rank)
    B, T = 2, 6
    x = jnp.asarray(np.random.default_rng(0).standard_normal((B, T, D)), jnp.float32)
    whole, kv = feed(attention, x, cache([T, T], 2, np.nan), 0)
    steps = cache([T, T], 2, np.nan)
    for t in range(T):
        out, steps = feed(attention, x[:, t : t + 1], steps, t)
        np.testing.assert_allclose(out[:, 0], whole[:, t], atol=1e-5, rtol=1e-5)
    for name in ("latent", "k_rope"):
        np.testing.assert_allclose(kv.gather(0, name)[:, :T], steps.gather(0, name)[:, :T], atol=1e-5)


@pytest.mark.slow
def test_the_decode_kernel_equals_xla():
    attention = layer(7)
    x = jnp.asarray(np.random.default_rng(8).standard_normal((2, 6, D)), jnp.float32)
    _, kv = feed(attention, x, cache([7, 7], 2, np.nan), 0)
    positions, live = jnp.full((2, 1), 6), jnp.ones((2, 1), bool)
    kv = kv.extend(live)
    wanted, _ = attention(x[:, :1], kv, call(positions, live))
    out, _ = attention(x[:, :1], kv, call(positions, live, "interpret"))
    np.testing.assert_allclose(out, wanted, atol=2e-6)
    with pytest.raises(ValueError, match="6 new tokens a sequence: the decode kernel takes one"):
        attention(x, kv, call(jnp.zeros((2, 6), jnp.int32), jnp.ones((2, 6), bool), "interpret"))


def test_latent_attention_is_attention_with_the_up_projections_moved():
    """k_n = [U_n c, k_rope] and v_n = V_n c, spelt out in float64."""
    rng = np.random.default_rng(3)
    S, length = 6, 5
    up, down = rng.standard_normal((2, N, 4, R))
    q, q_rope = rng.standard_normal((N, 4)), rng.standard_normal((N, HR))
    latent, k_rope = rng.standard_normal((S, R)), rng.standard_normal((S, HR))
    latent[length:] = k_rope[length:] = np.nan
    out = latent_attention(
        *(jnp.asarray(a, jnp.float32)[None, None] for a in (np.einsum("nh,nhr->nr", q, up), q_rope)),
        *(jnp.asarray(a, jnp.float32)[None] for a in (latent, k_rope)),
        jnp.array([[length - 1]]),
        jnp.array([length]),
        scale=0.3,
    )
    for n in range(N):
        keys, values = latent[:length] @ up[n].T, latent[:length] @ down[n].T
        scores = 0.3 * (keys @ q[n] + k_rope[:length] @ q_rope[n])
        weights = np.exp(scores - scores.max())
        np.testing.assert_allclose(down[n] @ np.asarray(out[0, 0, n]), weights / weights.sum() @ values, atol=1e-5)


def test_the_cache_holds_one_latent_and_one_rotary_key_a_token():
    _, kv = feed(layer(), jnp.ones((1, 3, D)), cache([3], 1), 0)
    assert {name: pool.shape for name, pool in kv.pages[0].items()} == {"latent": (2, P, R), "k_rope": (2, P, HR)}
    norm = jnp.sqrt(jnp.mean(kv.gather(0, "latent")[0, :3] ** 2, axis=-1))
    np.testing.assert_allclose(norm, 1, atol=1e-4)  # stored after its norm


def test_dead_tokens_leave_no_trace():
    attention = layer()
    x = jnp.asarray(np.random.default_rng(5).standard_normal((2, 6, D)), jnp.float32)
    live = np.arange(6)[None] < np.array([[6], [3]])
    both, kv = feed(attention, x, cache([6, 6], 2, np.nan), 0, live)
    alone, _ = feed(attention, x[1:, :3], cache([3], 2), 0)
    np.testing.assert_allclose(both[1, :3], alone[0], atol=1e-5, rtol=1e-5)
    assert np.all(np.isfinite(both)) and kv.lengths.tolist() == [6, 3]
    # A row that is dead in a decode step.
    out, after = feed(attention, x[:, :1], kv, 6, np.array([[True], [False]]))
    assert np.all(np.isfinite(out))
    for name in ("latent", "k_rope"):
        np.testing.assert_array_equal(after.gather(0, name)[1], kv.gather(0, name)[1])


@pytest.mark.slow
@pytest.mark.parametrize("v_dim", (HV, H + HR + 3), ids=("narrow values", "wide values"))
def test_the_fresh_path_pads_to_one_width(v_dim, monkeypatch):
    """cuDNN needs a GPU; the same call with XLA behind it shows that the padding changes nothing."""
    seen = []

    def fused(q, k, v, live, *, implementation, **options):
        seen.append((implementation, {q.shape[-1], k.shape[-1], v.shape[-1]}))
        return fresh_attention(q, k, v, live, implementation="xla", **options)

    monkeypatch.setattr(mla, "fresh_attention", fused)
    attention = layer(v_dim=v_dim)
    x = jnp.asarray(np.random.default_rng(2).standard_normal((2, 8, D)), jnp.float32)
    live = np.arange(8)[None] < np.array([[8], [5]])
    kv = cache([8, 8], 2).extend(jnp.asarray(live))
    positions = np.broadcast_to(np.arange(8), (2, 8))
    fresh, _ = attention(x, kv, call(positions, live, "cudnn"))
    paged, _ = attention(x, kv, call(positions, live))
    assert seen == [("cudnn", {max(H + HR, v_dim)})]
    for row, length in enumerate((8, 5)):
        np.testing.assert_allclose(fresh[row, :length], paged[row, :length], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="flash"):
        attention(x, kv, call(positions, live, "flash"))
