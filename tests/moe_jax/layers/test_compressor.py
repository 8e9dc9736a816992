"""Compressed entries against their definition, over windows that begin and end in different calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.layers.compressor import Compressor, pending
from moe_jax.layers.rope import Rope, Yarn

D, W, ROPE = 6, 8, Rope(4, 50.0)


def make(every, overlap):
    compressor = Compressor(
        D, W, jnp.float32, every=every, overlap=overlap, rope=ROPE, eps=1e-6, std=1.0, rngs=nnx.Rngs(0)
    )
    rng = np.random.default_rng(0)
    for parameter in (compressor.position_bias, compressor.norm.weight):
        parameter[...] = jnp.asarray(rng.standard_normal(parameter.shape), jnp.float32)
    return compressor


def turned(x, position):
    """The last four components of x, in pairs, as complex numbers times e^(i angle)."""
    angles = position * np.array([1.0, 50.0**-0.5])
    z = (x[-4::2] + 1j * x[-3::2]) * np.exp(1j * angles)
    return np.concatenate([x[:-4], np.stack([z.real, z.imag], -1).ravel()])


def definition(compressor, x):
    """All entries of a sequence x [S, D], float64."""
    m, overlap = compressor.every, compressor.overlap
    weight = np.asarray(compressor.kv_gate.weight[...], np.float64)
    kv, gate = np.split(x.astype(np.float64) @ weight.T, 2, axis=-1)
    bias = np.asarray(compressor.position_bias[...], np.float64)
    entries = []
    for w in range(len(x) // m):
        here = slice(w * m, (w + 1) * m)
        values, scores = kv[here], gate[here] + bias
        if overlap:
            values, scores = values[:, W:], scores[:, W:]
            if w:
                before = slice((w - 1) * m, w * m)
                values = np.concatenate([kv[before][:, :W], values])
                scores = np.concatenate([(gate[before] + bias)[:, :W], scores])
        mix = np.exp(scores) / np.exp(scores).sum(0)
        entry = (mix * values).sum(0)
        entry *= np.asarray(compressor.norm.weight[...]) / np.sqrt(np.mean(entry**2) + 1e-6)
        entries.append(turned(entry, w * m))
    return np.array(entries).reshape(-1, W)


@pytest.mark.parametrize(("every", "overlap"), ((4, True), (4, False), (1, False)))
@pytest.mark.parametrize("chunks", ((13,), (5, 3, 5), (1,) * 13), ids=("whole", "chunks", "tokens"))
def test_entries_are_their_definition(every, overlap, chunks):
    """Row 0 has 13 tokens, row 1 seven, the others of its places are dead."""
    compressor = make(every, overlap)
    feed = jax.jit(lambda *args: compressor(*args))
    x = np.random.default_rng(1).standard_normal((2, 13, D)).astype(np.float32)
    lengths, total = np.array([13, 7]), 0
    kind = pending(W, every, overlap)
    state = jnp.zeros((2, *kind.shape))
    seen = [{}, {}]
    for size in chunks:
        start, count = np.minimum(lengths, total), np.clip(lengths - total, 0, size)
        part = np.where(np.arange(size)[:, None] < count[:, None, None], x[:, total : total + size], 9.0)
        old = np.asarray(state)
        entries, first, ended, state = feed(jnp.asarray(part), state, jnp.asarray(start), jnp.asarray(count))
        assert state.shape == (2, *kind.shape)
        for row in range(2):
            if not count[row]:
                np.testing.assert_array_equal(state[row], old[row])
                assert not np.any(ended[row])
            for entry, at, there in zip(*map(np.asarray, (entries[row], first[row], ended[row])), strict=True):
                if there:
                    assert at not in seen[row], "an entry comes once"
                    seen[row][int(at)] = entry
        total += size
    for row, length in enumerate(lengths):
        want = definition(compressor, x[row, :length])
        assert sorted(seen[row]) == [w * every for w in range(len(want))]
        got = np.array([seen[row][at] for at in sorted(seen[row])]).reshape(-1, W)
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_rope_turns_the_last_components_and_back():
    x = np.random.default_rng(0).standard_normal((2, 3, 2, 6)).astype(np.float32)
    positions = np.array([[0, 1, 7], [3, 4, 5]])
    y = np.asarray(ROPE.turn(jnp.asarray(x), positions))
    for row in range(2):
        for t in range(3):
            for head in range(2):
                want = turned(x[row, t, head].astype(np.float64), positions[row, t])
                np.testing.assert_allclose(y[row, t, head], want, atol=1e-5)
    np.testing.assert_allclose(ROPE.turn(jnp.asarray(y), positions, back=True), x, atol=1e-5)
    assert ROPE.turn(jnp.asarray(x, jnp.bfloat16), positions).dtype == jnp.bfloat16
    slow = Rope(4, 50.0, Yarn(4.0, 8, attention_factor=1.0)).turn(jnp.asarray(x), positions)
    assert np.max(np.abs(slow - y)) > 0.1
