"""Parts of row tensors: each view against plain indexing, and tensors that do not fit."""

from collections import namedtuple

import ml_dtypes
import numpy as np
import pytest

from host_offload import parts
from host_offload.parts import Part, ViewError
from host_offload.store import ExpertStore, RowSpec

Info = namedtuple("Info", "dtype shape nbytes")
E, D, F = 3, 64, 32
BF16 = np.dtype(ml_dtypes.bfloat16)


class Arrays:
    """A checkpoint of arrays by name."""

    def __init__(self, **arrays):
        self.arrays = arrays

    def info(self, name):
        array = self.arrays[name]
        return Info(array.dtype, array.shape, array.nbytes)

    def view(self, name):
        view = self.arrays[name].view()
        view.flags.writeable = False
        return view


def read(checkpoint, *row_parts):
    """One row of these parts, through a store."""
    forms = [part.form(checkpoint) for part in row_parts]
    shape = (sum(shape[0] for shape, _ in forms), *forms[0][0][1:])
    store = ExpertStore(checkpoint, {"t": [[row_parts]]}, RowSpec({"t": (shape, forms[0][1])}, L=1, E=1))
    out = np.zeros(shape, forms[0][1])
    store.read(0, 0, "t", out)
    return out


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_transposed_matrices_with_gate_and_up_in_alternate_columns(dtype):
    w = np.random.default_rng(0).normal(size=(E, D, 2 * F)).astype(dtype)
    row = read(Arrays(w=w), Part("w", 1, parts.even_columns), Part("w", 1, parts.odd_columns))
    for f in range(F):
        np.testing.assert_array_equal(row[f], w[1, :, 2 * f])
        np.testing.assert_array_equal(row[F + f], w[1, :, 2 * f + 1])
    np.testing.assert_array_equal(read(Arrays(w=w), Part("w", 2, parts.transposed)), w[2].T)


def test_alternate_entries_of_a_bias():
    b = np.arange(E * 2 * F, dtype=np.float32).reshape(E, 2 * F)
    row = read(Arrays(b=b), Part("b", 2, parts.even), Part("b", 2, parts.odd))
    assert row.tolist() == [*b[2, ::2], *b[2, 1::2]]


def test_rows_of_a_tensor_of_all_experts():
    w = np.random.default_rng(1).normal(size=(E * F, D)).astype(np.float32)
    part = Part("w", slice(F, 2 * F))
    assert part.form(Arrays(w=w)) == ((F, D), np.float32)
    np.testing.assert_array_equal(read(Arrays(w=w), part), w[F : 2 * F])
    np.testing.assert_array_equal(read(Arrays(w=w), Part("w", slice(F, 2 * F), parts.transposed)), w[F : 2 * F].T)


def test_mxfp4_keeps_every_byte_and_brings_the_gate_first():
    rng = np.random.default_rng(2)
    blocks = rng.integers(0, 256, (E, 2 * F, D // 32, 16), dtype=np.uint8)
    row = read(Arrays(b=blocks), Part("b", 0, parts.even_words), Part("b", 0, parts.odd_words))
    assert row.dtype == np.uint32 and row.shape == (2 * F, D // 8)
    packed = row.view(np.uint8).reshape(2 * F, D // 32, 16)
    np.testing.assert_array_equal(packed[:F], blocks[0, ::2])
    np.testing.assert_array_equal(packed[F:], blocks[0, 1::2])
    np.testing.assert_array_equal(
        read(Arrays(b=blocks), Part("b", 2, parts.mxfp4_words)).view(np.uint8), blocks[2].reshape(2 * F, -1)
    )


@pytest.mark.parametrize("count", [1, 4, 90])
def test_mxfp4_scales_fill_whole_words(count):
    scales = np.random.default_rng(3).integers(0, 256, (E, 2 * F, count), dtype=np.uint8)
    row = read(Arrays(s=scales), Part("s", 1, parts.even_scales), Part("s", 1, parts.odd_scales))
    assert row.dtype == np.uint32 and row.shape == (2 * F, -(-count // 4))
    got = row.view(np.uint8)
    np.testing.assert_array_equal(got[:F, :count], scales[1, ::2])
    np.testing.assert_array_equal(got[F:, :count], scales[1, 1::2])
    assert (got[:, count:] == 127).all()
    np.testing.assert_array_equal(
        read(Arrays(s=scales), Part("s", 0, parts.mxfp4_scales)).view(np.uint8)[:, :count], scales[0]
    )


def test_packed_rows_are_not_rounded_to_the_compute_dtype():
    blocks = np.zeros((1, 2, 1, 16), np.uint8)
    bias = np.zeros((1, 2), np.float32)
    Map = namedtuple("Map", "expert_sources expert_shapes packed")
    sources = {"w": [[(Part("w", 0, parts.mxfp4_words),)]], "b": [[(Part("b", 0),)]]}
    store = ExpertStore.from_checkpoint(Arrays(w=blocks, b=bias), Map(sources, {"w": (2, 4), "b": (2,)}, ()), BF16)
    assert {name: dtype for name, (_, dtype) in store.spec.tensors.items()} == {"w": np.dtype(np.uint32), "b": BF16}


def test_a_view_of_several_tensors_takes_the_share_of_each():
    w, order = np.arange(24.0).reshape(2, 3, 4), np.array([[0, 1, 2, 3], [3, 1, 0, 2]])
    part = Part("w", 1, lambda w, order: w[:, order], ("order",))
    checkpoint = Arrays(w=w, order=order)
    assert part.form(checkpoint) == ((3, 4), np.float64)
    np.testing.assert_array_equal(part.array(checkpoint), w[1][:, [3, 1, 0, 2]])


@pytest.mark.parametrize(
    ("view", "shape", "dtype", "message"),
    [
        (parts.transposed, (2, 2, 2), np.float32, "must have 2 axes"),
        (parts.even, (3, 2), np.float32, "gate and up in turn"),
        (parts.odd_columns, (2, 3), np.float32, "gate and up in turn"),
        (parts.mxfp4_words, (2, 2, 16), np.float32, "must be uint8"),
        (parts.mxfp4_words, (2, 2, 8), np.uint8, "must be 16 bytes"),
        (parts.mxfp4_scales, (2,), np.uint8, "must have 2 axes"),
    ],
)
def test_tensors_that_do_not_fit_are_named(view, shape, dtype, message):
    checkpoint = Arrays(odd_one=np.zeros((1, *shape), dtype))
    with pytest.raises(ViewError, match=f"odd_one is {np.dtype(dtype)} .*{message}"):
        Part("odd_one", 0, view).form(checkpoint)
