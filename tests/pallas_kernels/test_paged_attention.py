"""Paged decode attention against a float64 loop over heads and tokens, over ragged lengths, windows, sinks and MLA."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import kernel, paged_decode_attention
from pallas_kernels.paged_attention.kernel import splits_of
from tests.pallas_kernels.test_lowering import arrays, check_offsets, lower


def case(seed, lengths, N, G, widths, value_width, page, dtype=np.float32, latent=False):
    """Random queries, pools whose unused places hold NaN, and a shuffled page table."""
    rng = np.random.default_rng(seed)
    B, n = len(lengths), max(1, -(-max(lengths) // page))
    pages = 1 + B * n
    table = (1 + rng.permutation(B * n)).reshape(B, n).astype(np.int32)
    queries = [rng.standard_normal((B, N, w)).astype(dtype) for w in widths]
    keys = [np.full((pages, page, G, w), np.nan, dtype) for w in widths]
    values = keys[0] if latent else np.full((pages, page, G, value_width), np.nan, dtype)
    pools = keys if latent else [*keys, values]
    for b, length in enumerate(lengths):
        for s in range(length):
            for pool in pools:
                pool[table[b, s // page], s % page] = rng.standard_normal(pool.shape[2:])
    return queries, keys, values, table, np.array(lengths, np.int32)


def definition(queries, keys, values, table, lengths, *, scale, window=None, sinks=None, softcap=None):
    B, N, _ = queries[0].shape
    _, page, G, _ = values.shape
    out = np.zeros((B, N, values.shape[-1]))
    for b in range(B):
        last = int(lengths[b]) - 1
        seen = [s for s in range(last + 1) if window is None or last - s < window]
        for n in range(N if seen else 0):
            g = n // (N // G)
            z = np.array(
                [
                    scale
                    * sum(
                        q[b, n].astype(np.float64) @ k[table[b, s // page], s % page, g].astype(np.float64)
                        for q, k in zip(queries, keys, strict=True)
                    )
                    for s in seen
                ]
            )
            z = z if softcap is None else softcap * np.tanh(z / softcap)
            every = z if sinks is None else np.append(z, sinks[n])
            w = np.exp(z - every.max()) / np.exp(every - every.max()).sum()
            out[b, n] = sum(
                wi * values[table[b, s // page], s % page, g].astype(np.float64) for wi, s in zip(w, seen, strict=True)
            )
    return out


def run(implementation, queries, keys, values, table, lengths, **options):
    pools = [jnp.asarray(pool) for pool in keys]
    shared = next((pools[i] for i, pool in enumerate(keys) if pool is values), None)
    return np.asarray(
        paged_decode_attention(
            tuple(map(jnp.asarray, queries)),
            tuple(pools),
            jnp.asarray(values) if shared is None else shared,
            jnp.asarray(table),
            jnp.asarray(lengths),
            implementation=implementation,
            **options,
        ).astype(jnp.float32)
    )


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["interpret", "xla"])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_shape_equals_the_definition(implementation, data):
    G = data.draw(st.sampled_from([1, 2]), "G")
    N = G * data.draw(st.sampled_from([1, 3, 20]), "group")
    lengths = data.draw(st.lists(st.integers(0, 150), min_size=1, max_size=3), "lengths")
    inputs = case(
        data.draw(st.integers(0, 99), "seed"),
        lengths,
        N,
        G,
        (data.draw(st.sampled_from([16, 24]), "H"),),
        data.draw(st.sampled_from([16, 40]), "Hv"),
        data.draw(st.sampled_from([16, 32, 128]), "page"),
    )
    options = dict(
        scale=0.25,
        window=data.draw(st.sampled_from([None, 1, 7, 100]), "window"),
        softcap=data.draw(st.sampled_from([None, 2.0]), "softcap"),
    )
    sinks = np.linspace(-3, 3, N, dtype=np.float32) if data.draw(st.booleans(), "sinks") else None
    got = run(implementation, *inputs, **options, sinks=None if sinks is None else jnp.asarray(sinks))
    np.testing.assert_allclose(got, definition(*inputs, **options, sinks=sinks), atol=2e-5)


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_latents_are_keys_and_values(implementation):
    inputs = case(3, [97, 5], 20, 1, (32, 8), 32, 32, latent=True)
    got = run(implementation, *inputs, scale=0.3)
    np.testing.assert_allclose(got, definition(*inputs, scale=0.3), atol=2e-5)


def run_tiles(tiles, queries, keys, values, table, lengths, *, scale, window=None, sinks=None, softcap=None):
    pools = [jnp.asarray(pool) for pool in keys]
    shared = next((pools[i] for i, pool in enumerate(keys) if pool is values), None)
    operands = [jnp.asarray(q) for q in queries], pools, jnp.asarray(values) if shared is None else shared
    sinks = None if sinks is None else jnp.asarray(sinks)
    options = dict(scale=scale, window=window, softcap=softcap, tiles=tiles, interpret=True)
    return kernel.paged_decode_attention(*operands, jnp.asarray(table), jnp.asarray(lengths), sinks, **options)


RAGGED = [270, 5, 0, 127]


@pytest.mark.parametrize(
    ("tiles", "window", "sinks", "softcap", "latent"),
    [  # columns in two blocks, 128 splits at a time; of 128 splits some are without a token of the window
        ({"tokens": 1, "splits": 128}, 100, True, 2.0, False),
        ({"tokens": 1, "splits": 256}, None, True, None, True),
        ({"tokens": 2, "splits": 16, "unroll": 2}, None, False, None, False),
        ({"tokens": 1, "splits": 8, "unroll": 4}, 100, False, 2.0, True),
    ],
)
def test_any_tiles_equal_the_definition(tiles, window, sinks, softcap, latent):
    widths = (40, 8) if latent else (16,)
    inputs = case(3, RAGGED, 6, 1 if latent else 2, widths, 40, 16, latent=latent)
    options = dict(scale=0.3, window=window, softcap=softcap)
    options["sinks"] = np.linspace(-3, 3, 6, dtype=np.float32) if sinks else None
    np.testing.assert_allclose(run_tiles(tiles, *inputs, **options), definition(*inputs, **options), atol=2e-5)


def test_parts_are_merged_piece_by_piece(monkeypatch):
    monkeypatch.setattr(kernel, "MERGE_TILE", 1024)
    assert kernel.merge_tile(len(RAGGED) * 2, 256, 72) == (32, 32)  # three column blocks, the last half full
    inputs = case(4, RAGGED, 2, 1, (16,), 72, 16)
    got = run_tiles({"tokens": 1, "splits": 256}, *inputs, scale=0.3)
    np.testing.assert_allclose(got, definition(*inputs, scale=0.3), atol=2e-5)


def test_columns_never_leave_their_row():
    """The interpreter drops what is stored past the end; a GPU writes it to the next row."""
    blocks = [kernel._columns(72, 32, number) for number in range(3)]
    assert np.concatenate([columns for columns, _ in blocks]).tolist() == [*range(72), *[71] * 24]
    assert np.concatenate([real for _, real in blocks]).tolist() == [True] * 72 + [False] * 24
    columns, real = kernel._columns(40)
    assert columns.tolist() == [*range(40), *[39] * 24] and int(real.sum()) == 40
    assert kernel._columns(64, 32, 1)[0].tolist() == [*range(32, 64)]


@pytest.mark.parametrize(("heads", "group"), [(32, 40), (64, 40), (64, 128)])
def test_a_program_may_take_more_heads_than_the_fewest(heads, group):
    """Some past the end of the group, and of what one program takes."""
    G = 2 if group == 40 else 1
    inputs = case(3, [97, 5], G * group, G, (32, 8), 32, 32, latent=True)
    sinks = np.linspace(-3, 3, G * group, dtype=np.float32)
    got = run_tiles({"heads": heads, "tokens": 16, "splits": 1, "unroll": 2}, *inputs, scale=0.3, sinks=sinks)
    np.testing.assert_allclose(got, definition(*inputs, scale=0.3, sinks=sinks), atol=2e-5)


def test_bfloat16_stays_near_the_definition():
    inputs = case(5, [130, 64], 4, 2, (64,), 64, 16, dtype=jnp.bfloat16)
    got = run("interpret", *inputs, scale=0.125)
    wide = [[np.asarray(a, np.float32) for a in group] for group in inputs[:2]]
    exact = definition(*wide, np.asarray(inputs[2], np.float32), *inputs[3:], scale=0.125)
    np.testing.assert_allclose(got, exact, atol=2e-2)


def test_infinite_scores_and_nan_propagate():
    inputs = case(7, [40, 40], 2, 1, (16,), 16, 16)
    inputs[2][inputs[3][1, 0], 3] = np.nan  # a stored value of sequence 1 alone
    got = run("interpret", *inputs, scale=0.25)
    assert np.isfinite(got[0]).all() and np.isnan(got[1]).all()


REAL = {  # (N, G, key widths, value width, window, sinks)
    "qwen3-30b-a3b": (32, 4, (128,), 128, None, False),
    "olmoe": (16, 16, (128,), 128, None, False),
    "mixtral": (32, 8, (128,), 128, 4096, False),
    "gpt-oss": (64, 8, (64,), 64, 128, True),
    "qwen3.5-35b-a3b": (16, 2, (256,), 256, None, False),
    "deepseek-v2-lite": (16, 1, (512, 64), 512, None, False),
    "deepseek-v3": (128, 1, (512, 64), 512, None, False),
}


@pytest.mark.parametrize("B", [1, 32])
@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize("model", REAL)
def test_lowers_for_cuda_at_real_shapes(model, page, B):
    N, G, widths, value_width, window, sinks = REAL[model]
    pages = 2**20 // page
    keys = tuple(arrays(pages, page, G, w, dtype=jnp.bfloat16) for w in widths)
    latent = len(widths) > 1

    def attend(queries, keys, values, table, lengths, sinks):
        values = keys[0] if latent else values
        return paged_decode_attention(
            queries, keys, values, table, lengths, scale=0.1, window=window, sinks=sinks, implementation="pallas"
        )

    kernels = lower(
        functools.partial(attend),
        tuple(arrays(B, N, w, dtype=jnp.bfloat16) for w in widths),
        keys,
        None if latent else arrays(pages, page, G, value_width, dtype=jnp.bfloat16),
        arrays(B, 32768 // page),
        arrays(B),
        arrays(N, dtype=jnp.bfloat16) if sinks else None,
    )
    assert [name for name, _ in kernels] == ["paged_attention_partial", "paged_attention_merge"]
    check_offsets(kernels)


def shapes(model, B=1, tokens=32768, page=64, dtype=jnp.bfloat16):
    N, G, widths, value_width, _, _ = REAL[model]
    queries = tuple(arrays(B, N, w, dtype=dtype) for w in widths)
    return queries, arrays(999, page, G, value_width, dtype=dtype), arrays(B, tokens // page)


def test_splits_fill_the_card_and_no_more():
    assert splits_of(1, 4, 512, 264) == 64
    assert splits_of(1, 4, 8, 264) == 8
    assert splits_of(64, 8, 512, 264) == 1
    assert splits_of(1, 16, 1, 264) == 1
    assert splits_of(1, 1, 512, 132) == 128
    assert splits_of(1, 1, 4096, 1000) == 256


def test_programs_of_the_formula():
    """(heads, splits, stages) in bf16; two programs share a multiprocessor where values are narrow."""
    found = {}
    for model in REAL:
        tiles = kernel.partial_tiles(*shapes(model))
        found[model] = tiles["heads"], kernel.shares_of(tiles, *shapes(model)), tiles["num_stages"]
        together = 2 if REAL[model][3] <= 128 else 1
        assert together * (1024 + kernel.shared_bytes(tiles, *shapes(model)[:2])) <= 228 * 1024
    assert found == {
        "qwen3-30b-a3b": (16, 64, 3),
        "olmoe": (16, 16, 3),
        "mixtral": (16, 32, 3),
        "gpt-oss": (16, 32, 3),
        "qwen3.5-35b-a3b": (16, 64, 3),
        "deepseek-v2-lite": (16, 128, 3),
        "deepseek-v3": (64, 64, 2),
    }
    # As the compiler counts them; products of 64 rows need no more.
    four = kernel.partial_tiles(*shapes("olmoe")) | {"num_stages": 4}
    assert kernel.shared_bytes(four, *shapes("olmoe")[:2]) == 104448
    assert kernel.partial_tiles(*shapes("deepseek-v3", dtype=jnp.float32))["heads"] == 16
    assert kernel.partial_tiles(*shapes("deepseek-v3", tokens=2048))["heads"] == 16
    assert kernel.partial_tiles(*shapes("deepseek-v3", tokens=2048, B=2))["heads"] == 64


def test_a_window_has_no_more_splits_than_blocks():
    tiles = kernel.partial_tiles(*shapes("gpt-oss"))
    assert kernel.shares_of(tiles | {"splits": 64}, *shapes("gpt-oss"), 128) == 4  # it may begin within a block
    assert kernel.shares_of(tiles, *shapes("gpt-oss"), 1) == 1
    assert kernel.shares_of(tiles, *shapes("gpt-oss", tokens=128), 4096) == 2


def test_a_smaller_card_holds_fewer_tiles(monkeypatch):
    monkeypatch.setattr(kernel, "shared_memory", lambda: 99 << 10)
    for model in REAL:
        tiles = kernel.partial_tiles(*shapes(model))
        assert kernel.shared_bytes(tiles, *shapes(model)[:2]) <= 99 << 10, model


def test_bad_arguments_are_named():
    inputs = case(1, [3], 3, 2, (16,), 16, 16)
    with pytest.raises(ValueError, match="3 query heads: must be a multiple of the 2 key heads"):
        run("xla", *inputs, scale=1.0)
    with pytest.raises(ValueError, match="implementation = 'cuda'"):
        run("cuda", *inputs, scale=1.0)
