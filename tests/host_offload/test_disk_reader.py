"""How a disk tier reads: whole packed rows and shares of file tensors, and faults that name file, place and remedy."""

import itertools
import mmap
import os

import numpy as np
import pytest

from host_offload.disk_reader import PackedReader, StoredTensors, TensorReader
from host_offload.disk_tier import DiskTier
from host_offload.parts import Part
from host_offload.policy import LRU
from host_offload.store import PackedRows, StoreError, row_stride
from moe_jax.checkpoint.reader import Place, TensorInfo
from tests.host_offload.test_store import make_store


@pytest.fixture
def packed(tmp_path):
    """Packed rows of random experts, and what their rows hold: wanted[name][layer][e]."""
    store, wanted = make_store()
    return PackedRows.open_or_build(tmp_path / "rows", store), wanted


def read_all(tier, wanted):
    spec = tier.spec
    for layer in range(spec.L):
        tier.event(layer, range(spec.E))
        tier.ensure(layer, range(spec.E))
        for name in spec.tensors:
            for e in range(spec.E):
                np.testing.assert_array_equal(tier.row(layer, name, e), wanted[name][layer][e])


def reads_directly(path):
    """Whether this file system can."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        with mmap.mmap(-1, 4096) as page:
            return os.preadv(file, [page], 0) == 4096
    except OSError:
        return False


@pytest.mark.parametrize("refused", (None, "open", "read"))
def test_packed_rows_are_read_whole_and_directly_where_that_is_possible(refused, packed, monkeypatch, caplog):
    rows, wanted = packed
    calls, opened, preadv = [], os.open, os.preadv
    possible = refused is None and reads_directly(rows.row_file(0)[0])

    def open_(path, flags, *rest):
        if flags & os.O_DIRECT and refused == "open":
            raise OSError(22, "Invalid argument")
        return opened(path, flags, *rest)

    def preadv_(file, buffers, offset):
        calls.append((len(buffers), offset))
        if refused == "read" and opening:
            raise OSError(22, "Invalid argument")
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", preadv_)
    opening = True
    with caplog.at_level("INFO", logger="host_offload"):
        tier = DiskTier(rows.spec, rows, 4, LRU(), threads=2)
    try:
        opening = False
        assert tier.stats()["reads"] == ("direct" if possible else "buffered")
        assert caplog.text.count("no direct reads here") == (not possible)
        del calls[:]
        read_all(tier, wanted)
        assert calls == [(3, 0), (3, 0)], "neighbours in one call"
        assert all(file >= 0 for file in rows._files)
    finally:
        tier.close()
    assert rows._files == [] and not tier._reader._direct


def overwrite(path, offset, content):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


@pytest.mark.parametrize("direct", (True, False))
@pytest.mark.parametrize("fault", ("damaged", "cut off", "cut off inside a block", "unreadable"))
def test_a_fault_of_a_packed_file_names_file_place_and_remedy(fault, direct, packed, monkeypatch):
    rows, wanted = packed
    path = rows.row_file(1)[0]
    whole = path.read_bytes()
    tier = DiskTier(rows.spec, rows, 4, LRU(), threads=2)
    if not direct:
        tier._reader._close_direct()
    try:
        preadv = os.preadv
        if fault == "damaged":
            overwrite(path, 4096, b"?")
        elif fault == "unreadable":
            monkeypatch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        else:
            os.truncate(path, 4096 if fault == "cut off" else 4096 + 100)
        tier.event(1, [1])
        with pytest.raises(StoreError, match=f"{path.name}: .*byte 4096.*: .*(load the model again|call again)"):
            tier.ensure(1, [1])
        assert tier._slot_of[1, 1] < 0
        monkeypatch.setattr(os, "preadv", preadv)
        with open(path, "r+b") as file:  # put back as it was, in place
            file.write(whole)
        read_all(tier, wanted)
    finally:
        tier.close()


class FileCheckpoint:
    """Tensors in one file, with the methods that a store asks of a checkpoint."""

    def __init__(self, path, arrays):
        self.arrays, self.path, self.offsets = arrays, path, {}
        data = bytearray(7)  # tensors of real files are not aligned either
        for name, array in arrays.items():
            self.offsets[name] = len(data)
            data += array.tobytes()
        path.write_bytes(data)
        self.stat = os.stat(path)

    def place(self, name):
        array = self.arrays[name]
        return Place(self.path, self.offsets[name], TensorInfo(array.dtype, array.shape, array.nbytes), self.stat)


@pytest.fixture(params=(False, True), ids=("a tensor an expert", "stacked"))
def stored(request, tmp_path):
    """(a store over a file, what its rows hold, the file)."""
    store, wanted = make_store(stacked=request.param)
    files = FileCheckpoint(tmp_path / "weights", store._checkpoint.arrays)
    return store.over(files), wanted, files.path


def test_a_checkpoint_is_read_share_by_share(stored):
    store, wanted, _ = stored
    tier = DiskTier(store.spec, store, 4, LRU(), threads=2)
    try:
        assert isinstance(tier._reader, TensorReader)
        read_all(tier, wanted)
    finally:
        tier.close()


SHARES = (None, 0, 3, -1, slice(1, 4), slice(2, 2), slice(None))


@pytest.mark.parametrize(("shape", "index"), [((), None), *itertools.product(((5, 3, 2), (5,)), SHARES)])
def test_a_stored_tensor_reads_the_share_that_a_part_takes(shape, index, tmp_path):
    array = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    tensors = StoredTensors({"w": FileCheckpoint(tmp_path / "file", {"w": array}).place("w")})
    part = Part("w", index)
    np.testing.assert_array_equal(part.array(tensors), array if index is None else array[index])
    assert part.array(tensors).dtype == array.dtype
    if shape:
        with pytest.raises(ValueError, match="consecutive rows"):
            Part("w", slice(0, 4, 2)).array(tensors)
    tensors.close()
    tensors.close()


@pytest.mark.parametrize("fault", ("replaced", "cut off", "written to", "gone"))
def test_a_checkpoint_that_changed_is_refused_until_it_is_back(fault, stored):
    store, wanted, path = stored
    tier = DiskTier(store.spec, store, 4, LRU(), threads=2)
    kept = path.with_name("kept")
    stat, content = os.stat(path), path.read_bytes()
    try:
        if fault in ("replaced", "gone"):
            path.rename(kept)
        if fault == "replaced":
            path.write_bytes(content[:-8] + b"\0" * 8)
        elif fault == "cut off":
            os.truncate(path, 40)
        elif fault == "written to":
            overwrite(path, 8, b"????")
        tier.event(0, [1])
        with pytest.raises(StoreError, match=f"{path.name}: .*byte .*: put the file back as it was, or load the model"):
            tier.ensure(0, [1])
        if kept.exists():
            kept.rename(path)
        else:
            with open(path, "r+b") as file:
                file.write(content)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        read_all(tier, wanted)
    finally:
        tier.close()


def test_a_checkpoint_that_changed_while_it_was_loaded_is_refused(stored):
    store, _, path = stored
    places = store.places()
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(StoreError, match="the file's size was"):
        StoredTensors(places)
    path.unlink()
    with pytest.raises(StoreError, match="cannot be opened"):
        StoredTensors(places)


def test_packed_rows_that_were_replaced_while_they_were_opened_are_refused(packed):
    rows, _ = packed
    path = rows.row_file(1)[0]
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    with pytest.raises(StoreError, match=f"{path.name} was replaced while the model was loading"):
        PackedReader(rows, np.zeros(row_stride(rows.spec), np.uint8))
    rows.close()
