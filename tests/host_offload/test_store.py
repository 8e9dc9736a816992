"""Expert rows from a checkpoint's tensors and from packed files: the same bytes, and every way they can go wrong."""

import errno
import json
import logging
import os
import threading
import zlib
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload import store as store_module
from host_offload.parts import Part
from host_offload.store import ALIGNMENT, HEADER, ExpertStore, PackedRows, RowSpec, StoreError, row_stride

BF16 = np.dtype(ml_dtypes.bfloat16)
L, E, D, F = 2, 3, 4, 5
Info = namedtuple("Info", "dtype shape nbytes")


class FakeCheckpoint:
    """Arrays by name, with the three methods that a store asks of a checkpoint. Counts the views it gives."""

    def __init__(self, arrays, fingerprint="f" * 64):
        self.arrays, self.print, self.views, self.closed = arrays, fingerprint, 0, False

    def info(self, name):
        array = self.arrays[name]
        return Info(array.dtype, array.shape, array.nbytes)

    def view(self, name):
        self.views += 1
        view = self.arrays[name].view()
        view.flags.writeable = False
        return view

    def fingerprint(self):
        return self.print

    def close(self):
        self.closed = True


def make_store(dtype=np.float32, compute=np.float32, *, stacked=False, seed=0, fingerprint="f" * 64, packed=()):
    """(store, wanted) over random experts in the files' layout; wanted[name][layer][e] is the row tensor."""
    rng = np.random.default_rng(seed)
    gate, up, down = (rng.normal(size=(L, E, *shape)).astype(dtype) for shape in ((F, D), (F, D), (D, F)))
    arrays, sources = {}, {"gate_up": [], "down": []}
    for layer in range(L):
        if stacked:
            arrays |= {f"{layer}.gu": np.concatenate([gate[layer], up[layer]], axis=1), f"{layer}.d": down[layer]}
            sources["gate_up"].append([(Part(f"{layer}.gu", e),) for e in range(E)])
            sources["down"].append([(Part(f"{layer}.d", e),) for e in range(E)])
            continue
        for e in range(E):
            arrays |= {
                f"{layer}.{e}.g": gate[layer, e],
                f"{layer}.{e}.u": up[layer, e],
                f"{layer}.{e}.d": down[layer, e],
            }
        sources["gate_up"].append([(Part(f"{layer}.{e}.g"), Part(f"{layer}.{e}.u")) for e in range(E)])
        sources["down"].append([(Part(f"{layer}.{e}.d"),) for e in range(E)])
    shapes = {"gate_up": (2 * F, D), "down": (D, F)}
    weight_map = SimpleNamespace(expert_sources=sources, expert_shapes=shapes, packed=packed)
    store = ExpertStore.from_checkpoint(FakeCheckpoint(arrays, fingerprint), weight_map, compute)
    return store, {"gate_up": np.concatenate([gate, up], axis=2), "down": down}


def rows_of(source, name):
    """All rows of a tensor by `fill`, after checking that `read` gives the same."""
    shape, dtype = source.spec.tensors[name]
    layers = np.zeros((source.spec.L, source.spec.E, *shape), dtype)
    for layer in range(source.spec.L):
        source.fill(layer, name, layers[layer])
        for e in range(source.spec.E):
            one = np.zeros(shape, dtype)
            source.read(layer, e, name, one)
            assert one.tobytes() == layers[layer, e].tobytes()
    return layers


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    "file, compute, row",
    [
        (np.float32, np.float32, np.float32),
        (np.float32, BF16, BF16),
        (np.float32, np.float16, np.float16),
        (BF16, BF16, BF16),
        (BF16, np.float32, BF16),  # never inflated
        (np.float16, BF16, np.float16),  # no narrower: kept
        (ml_dtypes.float8_e4m3fn, BF16, ml_dtypes.float8_e4m3fn),
    ],
    ids=str,
)
def test_rows_keep_the_files_dtype_unless_compute_is_narrower(file, compute, row, stacked):
    store, wanted = make_store(file, compute, stacked=stacked)
    assert store.spec == RowSpec({"gate_up": ((2 * F, D), row), "down": ((D, F), row)}, L, E)
    assert store.spec.row_bytes == 3 * D * F * np.dtype(row).itemsize
    for name in wanted:
        assert rows_of(store, name).tobytes() == wanted[name].astype(row).tobytes()


def test_tensors_of_packed_formats_are_never_rounded():
    store, wanted = make_store(np.float32, BF16, packed=("down",))
    assert [dtype for _, dtype in store.spec.tensors.values()] == [BF16, np.float32]
    assert rows_of(store, "down").tobytes() == wanted["down"].tobytes()


def test_mixed_dtypes_take_the_common_one_or_are_refused():
    store, _ = make_store(BF16)
    store._checkpoint.arrays["0.0.g"] = store._checkpoint.arrays["0.0.g"].astype(np.float32)
    shapes = {"gate_up": (2 * F, D), "down": (D, F)}
    weight_map = SimpleNamespace(expert_sources=store._sources, expert_shapes=shapes, packed=frozenset())
    mixed = ExpertStore.from_checkpoint(store._checkpoint, weight_map, np.float32)
    assert [dtype for _, dtype in mixed.spec.tensors.values()] == [np.float32, BF16]
    for dtype in ("float8_e4m3fn", "float8_e5m2", "int4", "int32", "uint8"):
        store._checkpoint.arrays["0.0.g"] = np.zeros((F, D), np.dtype(dtype))
        with pytest.raises(StoreError, match=f"'gate_up' is stored as bfloat16, {dtype}"):
            ExpertStore.from_checkpoint(store._checkpoint, weight_map, np.float32)


def test_spec_goes_to_plain_json():
    spec = RowSpec({"w": ((2, 3), BF16)}, L=4, E=5)
    assert json.loads(json.dumps(spec.to_dict())) == {
        "tensors": {"w": {"shape": [2, 3], "dtype": "bfloat16"}},
        "L": 4,
        "E": 5,
    }
    assert spec.nbytes("w") == spec.row_bytes == 12


@pytest.fixture(params=["store", "packed"])
def source(request, tmp_path):
    store, _ = make_store()
    return store if request.param == "store" else PackedRows.open_or_build(tmp_path, store)


def test_bad_arguments_are_refused_before_anything_is_written(source):
    good = np.zeros((D, F), np.float32)
    frozen = good.copy()
    frozen.flags.writeable = False
    for arguments, match in [
        ((0, 0, "up", good), "no row tensor named 'up'; there are gate_up, down"),
        ((L, 0, "down", good), f"MoE layer {L}, expert 0 is outside the {L} MoE layers of {E} experts"),
        ((0, -1, "down", good), "expert -1 is outside"),
        ((0, 0, "down", good.T), "must be a writable C-contiguous float32 array"),
        ((0, 0, "down", good.astype(np.float64)), "not float64"),
        ((0, 0, "down", frozen), "read-only"),
        ((0, 0, "down", np.zeros((F, D), np.float32).T), "C-contiguous"),
    ]:
        with pytest.raises(ValueError, match=match):
            source.read(*arguments)
    with pytest.raises(ValueError, match="shape"):
        source.fill(0, "down", np.zeros((E + 1, D, F), np.float32))
    assert not good.any()


def test_reading_from_many_threads(source):
    out = np.zeros((L, E, 2 * F, D), np.float32)
    jobs = [(layer, e) for layer in range(L) for e in range(E)] * 20
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda job: source.read(*job, "gate_up", out[job]), jobs))
    np.testing.assert_array_equal(out, make_store()[1]["gate_up"])


def test_closing_a_store_closes_the_checkpoint():
    store, _ = make_store()
    store.close()
    assert store._checkpoint.closed


# Packed rows.


def header_of(directory):
    return json.loads((directory / HEADER).read_text())


def layer_file(directory, layer=0):
    return directory / header_of(directory)["files"][layer]


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
def test_packed_rows_hold_the_same_bytes(tmp_path, dtype):
    store, wanted = make_store(dtype)
    packed = PackedRows.open_or_build(tmp_path / "new" / "folder", store, threads=3)
    assert packed.spec == store.spec
    for name in wanted:
        assert rows_of(packed, name).tobytes() == wanted[name].tobytes()
    packed.verify()


def test_layout_on_disk(tmp_path):
    store, wanted = make_store()
    PackedRows.open_or_build(tmp_path, store).close()
    assert row_stride(store.spec) == ALIGNMENT == 4096
    header = header_of(tmp_path)
    for layer in range(L):
        content = layer_file(tmp_path, layer).read_bytes()
        assert len(content) == E * ALIGNMENT
        for e in range(E):
            row = content[e * ALIGNMENT : (e + 1) * ALIGNMENT]
            data = wanted["gate_up"][layer, e].tobytes() + wanted["down"][layer, e].tobytes()
            assert row == data.ljust(ALIGNMENT, b"\0") and header["crc32"][layer][e] == zlib.crc32(data)
    assert header["fingerprint"] == "f" * 64 and header["version"] == 1


def test_second_open_does_not_read_the_checkpoint(tmp_path, caplog):
    store, wanted = make_store()
    PackedRows.open_or_build(tmp_path, store).close()
    before, views = layer_file(tmp_path).stat().st_mtime_ns, store._checkpoint.views
    packed = PackedRows.open_or_build(tmp_path, store)
    assert store._checkpoint.views == views and layer_file(tmp_path).stat().st_mtime_ns == before
    assert rows_of(packed, "down").tobytes() == wanted["down"].tobytes() and not caplog.records


def test_progress_counts_every_byte(tmp_path):
    store, _ = make_store()
    written = []
    PackedRows.open_or_build(tmp_path, store, progress=written.append)
    assert sum(written) == L * E * row_stride(store.spec)


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def change_header(directory, **fields):
    (directory / HEADER).write_text(json.dumps(header_of(directory) | fields))


@pytest.mark.parametrize(
    "damage, reason",
    [
        (lambda d: flip(layer_file(d, 1), ALIGNMENT + 7), "expert 1 of MoE layer 1 is damaged"),
        (lambda d: os.truncate(layer_file(d), ALIGNMENT), "has 4096 bytes instead of 12288"),
        (lambda d: layer_file(d).unlink(), "cannot be opened (No such file or directory)"),
        (lambda d: (d / HEADER).write_text("{"), "rows.json cannot be read"),
        (lambda d: (d / HEADER).write_text("[]"), "is not version 1 of the format"),
        (lambda d: change_header(d, version=0), "is not version 1 of the format"),
        (lambda d: change_header(d, fingerprint="0" * 64), "rows of another checkpoint (fingerprint 000000000000)"),
        (lambda d: change_header(d, spec={"tensors": {}}), "rows of another shape or dtype"),
        (lambda d: (d / HEADER).write_text('{"format": "moe_jax packed rows", "version": 1}'), "lacks fingerprint"),
        (lambda d: change_header(d, files=[]), "names 0 files for 2 MoE layers"),
        (lambda d: change_header(d, files=3), "is damaged"),
        (lambda d: change_header(d, crc32=[[1], [2]]), "checksums"),
        (lambda d: change_header(d, fingerprint=7), "rows of another checkpoint"),
    ],
)
def test_damaged_or_stale_rows_are_rebuilt_with_the_reason_logged(tmp_path, caplog, damage, reason):
    store, wanted = make_store()
    PackedRows.open_or_build(tmp_path, store).close()
    damage(tmp_path)
    with pytest.raises(StoreError):
        PackedRows.open(tmp_path, store.spec, store.fingerprint())
    with caplog.at_level(logging.WARNING):
        packed = PackedRows.open_or_build(tmp_path, store)
    assert "rebuilding the packed rows" in caplog.text and reason in caplog.text
    for name in wanted:
        assert rows_of(packed, name).tobytes() == wanted[name].tobytes()
    assert len(list(tmp_path.glob("*.rows"))) == L  # the old files are gone


def test_another_checkpoint_or_dtype_replaces_the_rows(tmp_path):
    PackedRows.open_or_build(tmp_path, make_store()[0]).close()
    other, wanted = make_store(seed=1, fingerprint="e" * 64)
    assert rows_of(PackedRows.open_or_build(tmp_path, other), "down").tobytes() == wanted["down"].tobytes()
    narrow, wanted = make_store(compute=BF16, seed=1, fingerprint="e" * 64)
    packed = PackedRows.open_or_build(tmp_path, narrow)
    assert rows_of(packed, "down").tobytes() == wanted["down"].astype(BF16).tobytes()


def test_what_an_older_reader_opened_stays_readable_during_a_rebuild(tmp_path):
    store, wanted = make_store()
    old = PackedRows.open_or_build(tmp_path, store)
    PackedRows.open_or_build(tmp_path, make_store(seed=1, fingerprint="e" * 64)[0])
    assert rows_of(old, "down").tobytes() == wanted["down"].tobytes()


def test_foreign_files_are_left_alone(tmp_path):
    for name in ("notes.txt", "model.safetensors", "layer-0.bin"):
        (tmp_path / name).write_text("mine")
    PackedRows.open_or_build(tmp_path, make_store()[0]).close()
    PackedRows.open_or_build(tmp_path, make_store(seed=1, fingerprint="e" * 64)[0]).close()
    assert all((tmp_path / name).read_text() == "mine" for name in ("notes.txt", "model.safetensors", "layer-0.bin"))


def test_file_in_place_of_the_directory(tmp_path):
    (tmp_path / "rows").write_text("")
    with pytest.raises(StoreError, match="offload_path .* is a file: give a directory"):
        PackedRows.open_or_build(tmp_path / "rows", make_store()[0])


def test_too_little_space_is_known_before_the_old_rows_go(tmp_path, monkeypatch):
    store, wanted = make_store()
    PackedRows.open_or_build(tmp_path, store).close()
    usage = namedtuple("usage", "total used free")
    bigger, _ = make_store(seed=1, fingerprint="e" * 64)
    bigger.spec = RowSpec(bigger.spec.tensors, L, 2 * E)  # twice the rows: the old ones' space does not do
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda _: usage(0, 0, 4096))
    with pytest.raises(
        StoreError, match="packed rows need 0.00 GB, but .* has room for 0.00 GB: free space, set offload"
    ):
        PackedRows.open_or_build(tmp_path, bigger)
    packed = PackedRows.open(tmp_path, store.spec, store.fingerprint())
    assert rows_of(packed, "down").tobytes() == wanted["down"].tobytes()
    # The space of stale rows counts, for they are removed first.
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda _: usage(0, 0, 0))
    PackedRows.open_or_build(tmp_path, make_store(seed=1, fingerprint="e" * 64)[0])


@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace"])
def test_disk_full_while_writing_leaves_nothing_behind(tmp_path, monkeypatch, call):
    store, _ = make_store()
    real, calls = getattr(os, call), []

    def full(*args):
        calls.append(args)
        if len(calls) >= (4 if call == "pwrite" else 1):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    monkeypatch.setattr(store_module.os, call, full)
    with pytest.raises(StoreError, match="writing packed rows .* failed .No space left on device"):
        PackedRows.open_or_build(tmp_path, store)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.lock"]
    monkeypatch.undo()
    PackedRows.open_or_build(tmp_path, store).verify()


def test_short_writes_are_completed(tmp_path, monkeypatch):
    store, wanted = make_store()
    real = os.pwrite
    monkeypatch.setattr(store_module.os, "pwrite", lambda fd, data, at: real(fd, data[:1000], at))
    packed = PackedRows.open_or_build(tmp_path, store)
    assert rows_of(packed, "gate_up").tobytes() == wanted["gate_up"].tobytes()


def test_error_while_reading_the_checkpoint_passes_through_and_cleans_up(tmp_path):
    store, _ = make_store()
    del store._checkpoint.arrays["1.2.u"]
    with pytest.raises(KeyError, match="1.2.u"):
        PackedRows.open_or_build(tmp_path, store)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.lock"]


def test_left_overs_of_a_killed_build_are_replaced(tmp_path):
    store, _ = make_store()
    PackedRows.open_or_build(tmp_path, store).close()
    layer_file(tmp_path).rename(tmp_path / "layer-0000-deadbeef.rows")
    (tmp_path / HEADER).rename(tmp_path / f"{HEADER}.deadbeef.tmp")
    PackedRows.open_or_build(tmp_path, store).close()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([HEADER, "rows.lock", *header_of(tmp_path)["files"]])


def test_one_builds_while_the_others_wait(tmp_path, monkeypatch):
    builds, real = [], store_module._build
    monkeypatch.setattr(store_module, "_build", lambda *args: (builds.append(1), real(*args)))
    barrier = threading.Barrier(4)

    def open_it(_):
        barrier.wait()
        return PackedRows.open_or_build(tmp_path, make_store()[0])

    with ThreadPoolExecutor(4) as pool:
        packed = list(pool.map(open_it, range(4)))
    assert len(builds) == 1
    assert len({rows_of(source, "down").tobytes() for source in packed}) == 1


@pytest.mark.parametrize("width, rows", [(8, 32), (16 << 20, 16), (1 << 30, 4)])
def test_rows_verified_on_open_are_bounded_in_bytes(width, rows):
    picked = store_module._sample(RowSpec({"w": ((width,), np.uint8)}, L=48, E=128))
    assert len(picked) == rows and picked[0] == (0, 0) and picked[-1] == (47, 127)


def test_file_cut_while_open_is_an_error_not_garbage(tmp_path):
    packed = PackedRows.open_or_build(tmp_path, make_store()[0])
    os.truncate(layer_file(tmp_path), ALIGNMENT)
    with pytest.raises(StoreError, match="MoE layer 0 ends early"):
        packed.read(0, 2, "down", np.zeros((D, F), np.float32))


def test_closed_rows_say_so_and_give_their_descriptors_back(tmp_path):
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    packed = PackedRows.open_or_build(tmp_path, make_store()[0])
    packed.close()
    packed.close()
    with pytest.raises(StoreError, match="were closed"):
        packed.read(0, 0, "down", np.zeros((D, F), np.float32))
    flip(layer_file(tmp_path), 0)
    with pytest.raises(StoreError):
        PackedRows.open(tmp_path, packed.spec, "f" * 64)
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before


@given(
    shapes=st.lists(st.lists(st.integers(1, 40), max_size=3), min_size=1, max_size=3),
    dtypes=st.lists(st.sampled_from([np.float32, BF16, np.uint8]), min_size=3, max_size=3),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 4)),
)
@settings(max_examples=20)
def test_random_rows_survive_packing(tmp_path_factory, shapes, dtypes, sizes):
    layers, experts = sizes
    rng = np.random.default_rng(0)
    arrays, sources = {}, {}
    for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False)):
        for layer in range(layers):
            arrays[f"{i}.{layer}"] = (rng.random((experts, *shape)) * 200).astype(dtype)
        sources[f"t{i}"] = [[(Part(f"{i}.{layer}", e),) for e in range(experts)] for layer in range(layers)]
    expert_shapes = {f"t{i}": tuple(shape) for i, shape in enumerate(shapes)}
    weight_map = SimpleNamespace(expert_sources=sources, expert_shapes=expert_shapes, packed=frozenset())
    store = ExpertStore.from_checkpoint(FakeCheckpoint(arrays), weight_map, np.float32)
    packed = PackedRows.open_or_build(tmp_path_factory.mktemp("packed"), store)
    packed.verify()
    for i in range(len(shapes)):
        whole = np.stack([arrays[f"{i}.{layer}"] for layer in range(layers)])
        assert rows_of(store, f"t{i}").tobytes() == rows_of(packed, f"t{i}").tobytes() == whole.tobytes()
    packed.close()
