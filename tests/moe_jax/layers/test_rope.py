"""YaRN against the published values of released models, and the two layouts of rotary embedding."""

import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.layers.rope import Yarn, apply_rope, apply_rope_pairs, rope_frequencies, rope_tables


def ramp(dim, theta, yarn):
    """Share of the slow frequency in each component."""
    plain, slow = rope_frequencies(dim, theta), rope_frequencies(dim, theta, yarn)
    return (1 - slow / plain) / (1 - 1 / yarn.factor)


@pytest.mark.parametrize(
    ("dim", "theta", "yarn", "low", "high", "tolerance"),
    (
        (64, 1e4, Yarn(40.0, 4096, mscale=1.0, mscale_all_dim=1.0), 10, 23, 1e-5),  # DeepSeek-V2 and V3
        (64, 150000.0, Yarn(32.0, 4096, truncate=False), 8.0928, 17.3980, 1e-4),  # gpt-oss
    ),
)
def test_yarn_ramp(dim, theta, yarn, low, high, tolerance):
    want = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    np.testing.assert_allclose(ramp(dim, theta, yarn), want, atol=tolerance)


def test_yarn_factors():
    v3, lite = Yarn(40.0, 4096, mscale=1.0, mscale_all_dim=1.0), Yarn(40.0, 4096, mscale=0.707, mscale_all_dim=0.707)
    assert v3.score_factor == pytest.approx(1.8739, abs=1e-4) and v3.table_factor == 1
    assert lite.score_factor == pytest.approx(1.5896, abs=1e-4) and lite.table_factor == 1
    gpt_oss = Yarn(32.0, 4096)
    assert gpt_oss.table_factor == pytest.approx(1.34657, abs=1e-5) and gpt_oss.score_factor == 1
    assert Yarn(32.0, 4096, attention_factor=1.1).table_factor == 1.1
    assert Yarn(4.0, 32, mscale=1.0, mscale_all_dim=0.707).table_factor == pytest.approx(1.13863 / 1.09801, abs=1e-5)
    assert Yarn(4.0, 32, mscale=0.0, mscale_all_dim=1.0).table_factor == pytest.approx(1.13863, abs=1e-5)
    assert Yarn(0.5, 32, mscale=1.0, mscale_all_dim=1.0).score_factor == 1, "no extension"


def test_tables_carry_the_factor():
    yarn = Yarn(4.0, 32, attention_factor=2.0)
    cos, sin = rope_tables(jnp.array([[0, 3]]), 8, 1e4, jnp.float32, yarn)
    np.testing.assert_allclose(cos[0, 0], 2) and np.testing.assert_allclose(sin[0, 0], 0)
    np.testing.assert_allclose(cos**2 + sin**2, 4, rtol=1e-6)
    np.testing.assert_allclose(cos[0, 1], 2 * np.cos(3 * rope_frequencies(8, 1e4, yarn)), rtol=1e-6)


def test_pairs_turn_together_and_come_out_in_halves():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 2, 3, 8)), jnp.float32) for _ in range(2))
    positions = jnp.array([[0, 37]])
    cos, sin = rope_tables(positions, 8, 1e4, jnp.float32)
    turned = np.asarray(q)[..., 0::2] + 1j * np.asarray(q)[..., 1::2]
    turned = turned * np.exp(1j * np.asarray(positions)[0, :, None, None] * rope_frequencies(8, 1e4))
    out = apply_rope_pairs(q, cos, sin)
    np.testing.assert_allclose(out, np.concatenate([turned.real, turned.imag], axis=-1), atol=2e-6)
    other = np.asarray(k)[..., 0::2] + 1j * np.asarray(k)[..., 1::2]
    products = jnp.sum(out * apply_rope(jnp.concatenate([k[..., 0::2], k[..., 1::2]], -1), cos, sin), axis=-1)
    np.testing.assert_allclose(products[0, 0], (turned[0, 0] * other[0, 0].conj()).real.sum(-1), atol=1e-5)

    narrow = apply_rope_pairs(q.astype(jnp.bfloat16), cos, sin)
    assert narrow.dtype == jnp.bfloat16, "tables of float32 do not widen the heads"
