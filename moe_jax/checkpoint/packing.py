"""How quantised files pack a matrix, brought into the row layouts of `pallas_kernels.formats`.

Each function is a view in the sense of `host_offload.parts.Part`: it takes the file tensors of one matrix [N, K] (N
outputs, K inputs, G = K / group) and gives one part of the format. The packings are those of the quantisers: DeepSeek's
FP8 and FP4, GPTQ (AutoGPTQ's "gptq" and "gptq_v2"), AWQ ("gemm") and compressed-tensors ("pack-quantized").
"""

from collections.abc import Sequence

import numpy as np

from host_offload.parts import byte_words, mxfp4_scales
from pallas_kernels.formats.words import pack

# Nibble i of an AWQ word belongs to column 8 c + AWQ_COLUMNS[i].
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)

_BYTE = np.arange(256, dtype=np.float64)
_POWERS = np.where(_BYTE == 255, np.nan, 2.0 ** (_BYTE - 127)).astype(np.float32)  # of an e8m0 byte


def fp8_words(q: np.ndarray) -> np.ndarray:
    """e4m3 values [N, K] -> words [N, ceil(K / 4)] uint32, a view if K is a multiple of 4."""
    values = q.view(np.uint8)
    padding = -values.shape[1] % 4
    return byte_words(np.pad(values, ((0, 0), (0, padding))) if padding else values)


def fp8_scales(scales: np.ndarray) -> np.ndarray:
    """Scales of blocks, of a floating dtype or e8m0, as float32 (exact)."""
    return _POWERS[scales.view(np.uint8)] if scales.dtype.itemsize == 1 else scales.astype(np.float32)


def fp4_words(q: np.ndarray) -> np.ndarray:
    """Two e2m1 values a byte, the lower first, [N, K / 2] -> words [N, K / 8] uint32."""
    return byte_words(q.view(np.uint8))


def fp4_scales(scales: np.ndarray) -> np.ndarray:
    """e8m0 exponents [N, K / 32] -> words [N, ceil(K / 128)] uint32."""
    return mxfp4_scales(scales.view(np.uint8))


def int4_words(q: np.ndarray) -> np.ndarray:
    """compressed-tensors: words [N, K / 8], nibble i of column 8 c + i, as they are."""
    return q.view(np.uint32)


def int4_sorted_words(q: np.ndarray, g_idx: np.ndarray) -> np.ndarray:
    """The same with the columns sorted by their group g_idx [K]."""
    return pack(_rows(q.T)[_by_group(g_idx)].T, 4)


def int4_zeros(zeros: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """compressed-tensors: zero points packed along N, words [ceil(N / 8), G] -> words [N, ceil(G / 8)]."""
    return pack(_rows(zeros)[: scales.shape[0]], 4)


def int4_natural_order(q: np.ndarray) -> np.ndarray:
    """The order [1, K] of columns that are sorted already, of words [N, K / 8]."""
    return _natural(8 * q.shape[1])


def gptq_words(q: np.ndarray) -> np.ndarray:
    """GPTQ: words [K / 8, N], nibble i of input 8 r + i -> [N, K / 8], a view."""
    return q.view(np.uint32).T


def gptq_sorted_words(q: np.ndarray, g_idx: np.ndarray) -> np.ndarray:
    """The same with the columns sorted by their group g_idx [K]."""
    return pack(_rows(q)[_by_group(g_idx)].T, 4)


def gptq_zeros(zeros: np.ndarray) -> np.ndarray:
    """GPTQ v1: zero points less one, words [G, N / 8], -> words [N, ceil(G / 8)]; a stored 15 stands for 0.

    AutoGPTQ adds the one after unpacking and keeps four bits of the sum.
    """
    return pack((_rows(zeros.T) + 1) & 15, 4)


def gptq_v2_zeros(zeros: np.ndarray) -> np.ndarray:
    """GPTQ v2: the zero points themselves, words [G, N / 8], -> words [N, ceil(G / 8)]."""
    return pack(_rows(zeros.T), 4)


def gptq_natural_order(q: np.ndarray) -> np.ndarray:
    """The order [1, K] of columns that are sorted already, of words [K / 8, N]."""
    return _natural(8 * q.shape[0])


def awq_words(q: np.ndarray) -> np.ndarray:
    """AWQ: words [K, N / 8], nibble i of output 8 c + AWQ_COLUMNS[i] -> words [N, K / 8]."""
    return pack(_rows(q.T, AWQ_COLUMNS), 4)


def awq_zeros(zeros: np.ndarray) -> np.ndarray:
    """AWQ: zero points, packed alike, words [G, N / 8] -> words [N, ceil(G / 8)]."""
    return pack(_rows(zeros.T, AWQ_COLUMNS), 4)


def transposed_scales(scales: np.ndarray) -> np.ndarray:
    """GPTQ and AWQ: scales [G, N] -> [N, G], a view."""
    return scales.T


def group_order(g_idx: np.ndarray) -> np.ndarray:
    """The order [1, K] of columns sorted by their group: stored column j is column order[j] of the matrix."""
    return _by_group(g_idx)[None].astype(np.int32)


def _by_group(g_idx: np.ndarray) -> np.ndarray:
    return np.argsort(g_idx, kind="stable")


def _natural(columns: int) -> np.ndarray:
    return np.arange(columns, dtype=np.int32)[None]


def _rows(words: np.ndarray, places: Sequence[int] = range(8)) -> np.ndarray:
    """Values [8 R, C] uint8 of words [R, C]: nibble i of a word, counted from the lowest bits, goes to row places[i].

    Whole words are shifted, which NumPy does at memory speed; AWQ's weights all pass through here.
    """
    words = np.ascontiguousarray(words).view(np.uint32)
    rows = np.empty((len(words), 8, *words.shape[1:]), np.uint8)
    for i, place in enumerate(places):
        rows[:, place] = words >> np.uint32(4 * i) & np.uint32(15)
    return rows.reshape(-1, *words.shape[1:])
