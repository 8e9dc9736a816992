"""Each packing of quantised files against its definition, one value at a time."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_jax.checkpoint import packing

SIZES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32 - 1))  # N / 8, K / 8 and a seed


def nibble(words, index, position):
    """Value at this position, the lowest four bits first, of a word of 32 bits."""
    return int(words[index]) >> (4 * position) & 15


def draw(seed, *shape):
    """int32 words of random bits, read-only as those of a file."""
    words = np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint32).view(np.int32)
    words.flags.writeable = False
    return words


def unpacked(words):
    """Values [R, 8 C] of words [R, C]."""
    return np.array([[nibble(words, (r, c // 8), c % 8) for c in range(8 * words.shape[1])] for r in range(len(words))])


@given(SIZES)
def test_gptq(sizes):
    n, k, seed = sizes
    N, K = 8 * n, 8 * k
    q = draw(seed, k, N)
    w = [[nibble(q, (c // 8, r), c % 8) for c in range(K)] for r in range(N)]
    assert packing.gptq_words(q).dtype == np.uint32 and np.shares_memory(packing.gptq_words(q), q)
    np.testing.assert_array_equal(unpacked(packing.gptq_words(q)), w)
    np.testing.assert_array_equal(packing.gptq_natural_order(q), [np.arange(K)])

    groups = np.random.default_rng(seed).permutation(np.arange(K) // 4).astype(np.int32)
    order = packing.group_order(groups)
    assert order.dtype == np.int32 and order.shape == (1, K)
    assert groups[order[0]].tolist() == sorted(groups)
    sorted_words = packing.gptq_sorted_words(q, groups)
    np.testing.assert_array_equal(unpacked(sorted_words), np.array(w)[:, order[0]])

    zeros = draw(seed + 1, 3, n)  # three groups
    stored = [[nibble(zeros, (g, r // 8), r % 8) for g in range(3)] for r in range(N)]
    np.testing.assert_array_equal(unpacked(packing.gptq_v2_zeros(zeros))[:, :3], stored)
    np.testing.assert_array_equal(unpacked(packing.gptq_zeros(zeros))[:, :3], (np.array(stored) + 1) % 16)


@given(SIZES)
def test_awq(sizes):
    n, K, seed = sizes
    K *= 8
    q = draw(seed, K, n)
    position = {0: 0, 1: 4, 2: 1, 3: 5, 4: 2, 5: 6, 6: 3, 7: 7}  # of an output within its word
    w = [[nibble(q, (c, r // 8), position[r % 8]) for c in range(K)] for r in range(8 * n)]
    np.testing.assert_array_equal(unpacked(packing.awq_words(q)), w)
    np.testing.assert_array_equal(unpacked(packing.awq_zeros(q[:3]))[:, :3], np.array(w)[:, :3])


@given(SIZES)
def test_compressed_tensors(sizes):
    n, k, seed = sizes
    K = 8 * k
    q = draw(seed, n, k)
    assert packing.int4_words(q).dtype == np.uint32 and np.shares_memory(packing.int4_words(q), q)
    groups = np.random.default_rng(seed).permutation(np.arange(K) // 2)
    order = packing.group_order(groups)[0]
    np.testing.assert_array_equal(unpacked(packing.int4_sorted_words(q, groups)), unpacked(q)[:, order])
    np.testing.assert_array_equal(packing.int4_natural_order(q), [np.arange(K)])
    N, G = 8 * n - 3, 5  # outputs that do not fill the last word
    zeros = draw(seed, n, G)
    got = unpacked(packing.int4_zeros(zeros, np.zeros((N, G))))[:, :G]
    np.testing.assert_array_equal(got, [[nibble(zeros, (r // 8, g), r % 8) for g in range(G)] for r in range(N)])


@pytest.mark.parametrize("width", [4, 5, 8, 130])
def test_fp8_bytes_stay_in_order(width):
    q = np.arange(3 * width, dtype=np.uint32).astype(np.uint8).reshape(3, width).view(ml_dtypes.float8_e4m3fn)
    got = packing.fp8_words(q)
    assert got.dtype == np.uint32 and got.shape == (3, -(-width // 4))
    assert np.shares_memory(got, q) == (width % 4 == 0)
    np.testing.assert_array_equal(got.view(np.uint8)[:, :width], q.view(np.uint8))
    assert not got.view(np.uint8)[:, width:].any()


def test_fp8_scales_are_exact_in_float32():
    powers = np.arange(256, dtype=np.uint8).reshape(2, 128).view(ml_dtypes.float8_e8m0fnu)
    got = packing.fp8_scales(powers)
    assert got.dtype == np.float32 and np.isnan(got[1, 127]) and got[0, 0] == 2.0**-127
    np.testing.assert_array_equal(got, powers.astype(np.float32))
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32):
        scales = np.array([[0.1, 3.0]], dtype)
        np.testing.assert_array_equal(packing.fp8_scales(scales), scales.astype(np.float32))


def test_fp4_bytes_stay_in_order():
    q = np.random.default_rng(0).integers(-128, 128, (3, 32), dtype=np.int8)
    np.testing.assert_array_equal(packing.fp4_words(q).view(np.int8), q)
    scales = np.random.default_rng(1).integers(0, 255, (3, 2), dtype=np.uint8)
    for stored in (scales, scales.view(ml_dtypes.float8_e8m0fnu)):
        got = packing.fp4_scales(stored)
        assert got.dtype == np.uint32 and got.shape == (3, 1)
        np.testing.assert_array_equal(got.view(np.uint8)[:, :2], scales)
