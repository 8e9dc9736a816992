"""Packing into words and out of them again."""

import numpy as np
import pytest

from pallas_kernels.formats.words import pack, unpack


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("count", [1, 7, 8, 13])
def test_unpacking_gives_back_what_was_packed(bits, count):
    values = np.random.default_rng(count).integers(0, 2**bits, (2, 3, count))
    words = pack(values, bits)
    each = 32 // bits
    assert words.shape == (2, 3, -(-count // each)) and words.dtype == np.uint32
    all_values = np.asarray(unpack(words, bits))
    np.testing.assert_array_equal(all_values[..., :count], values)
    assert not all_values[..., count:].any()


def test_the_lowest_bits_come_first():
    assert pack(np.arange(1, 9)[None], 4).tolist() == [[0x87654321]]
    assert pack(np.array([0x12, 0x34, 0x56, 0x78, 0x9A]), 8).tolist() == [0x78563412, 0x9A]
