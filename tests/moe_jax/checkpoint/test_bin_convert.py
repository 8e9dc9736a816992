"""PyTorch checkpoints become safetensors: one file or shards, all or nothing; the loader names the command."""

import errno
import json
import os
import shutil
from collections import namedtuple

import numpy as np
import pytest
import safetensors.numpy
import torch_files

from moe_jax import MoE
from moe_jax.checkpoint import Checkpoint, TensorInfo, convert_bin, writer
from moe_jax.checkpoint.new_directory import new_directory
from moe_jax.checkpoint.writer import write_safetensors
from moe_jax.errors import CheckpointError


@pytest.fixture
def single(tmp_path):
    """A directory with pytorch_model.bin as torch wrote it, and files beside it."""
    source = tmp_path / "hub model"
    source.mkdir()
    shutil.copy(torch_files.REAL, source / "pytorch_model.bin")
    (source / "config.json").write_text('{"model_type": "nllb-moe"}')
    (source / "sentencepiece.bpe.model").write_bytes(b"\x00spm")
    (source / "README.md").write_text("not needed")
    return source


def shard(source, files, index=None):
    """Writes {file: {name: array}} and an index of them, or the given one, into the new directory `source`."""
    source.mkdir()
    (source / "config.json").write_text("{}")
    for file, tensors in files.items():
        torch_files.write_state(source / file, tensors)
    weight_map = {name: file for file, tensors in files.items() for name in tensors} if index is None else index
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return source


A = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones((3,), np.float16)}
B = {"c": np.arange(4, dtype=np.int64)}
SHARDS = {"pytorch_model-00001-of-00002.bin": A, "pytorch_model-00002-of-00002.bin": B}


def test_one_file(single, tmp_path):
    out = convert_bin(single, tmp_path / "new" / "model", progress=False)
    assert out == tmp_path / "new" / "model"
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors", "sentencepiece.bpe.model"]
    want = torch_files.real_values()
    with Checkpoint.open(out) as checkpoint:
        assert checkpoint.names() == sorted(want)
        for name, value in want.items():
            got = checkpoint.view(name)
            assert got.dtype == value.dtype and got.shape == value.shape and got.tobytes() == value.tobytes(), name
    narrow = {name: value for name, value in want.items() if name != "float8"}
    loaded = safetensors.numpy.load_file(_without(out / "model.safetensors", "float8", tmp_path))
    for name, value in narrow.items():
        np.testing.assert_array_equal(loaded[name], value)
    assert os.listdir(tmp_path / "new") == ["model"], "nothing else is left behind"


def _without(path, name, folder):
    """A copy of a safetensors file that this NumPy reader can load: without one tensor."""
    with Checkpoint.open(path.parent) as checkpoint:
        infos = {n: checkpoint.info(n) for n in checkpoint.names() if n != name}
        write_safetensors(folder / "copy.safetensors", infos, checkpoint.view)
    return folder / "copy.safetensors"


def test_shards_and_their_index(tmp_path):
    out = convert_bin(shard(tmp_path / "old", SHARDS), tmp_path / "new", progress=False)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00001-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }
    assert index["metadata"]["total_size"] == 24 + 6 + 32
    assert not (out / "pytorch_model.bin.index.json").exists()
    with Checkpoint.open(out) as checkpoint:
        for name, value in (A | B).items():
            np.testing.assert_array_equal(checkpoint.view(name), value)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"a": "pytorch_model-00003-of-00003.bin"}, "pytorch_model-00003-of-00003.bin is missing"),
        ({"a": "pytorch_model-00001-of-00002.bin", "z": "pytorch_model-00001-of-00002.bin"}, "does not hold: z"),
        ({"a": "../pytorch_model.bin"}, "files outside the directory"),
        ([], 'no "weight_map"'),
    ],
)
def test_an_index_that_does_not_fit(index, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        convert_bin(shard(tmp_path / "old", SHARDS, index), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_tensor_in_two_shards(tmp_path):
    one, two = SHARDS
    with pytest.raises(CheckpointError, match="a is in two shards, .*00001.* and .*00002"):
        convert_bin(shard(tmp_path / "old", {one: A, two: A}, {"a": one, "b": two}), tmp_path / "new")


def test_wrong_directories(single, tmp_path):
    with pytest.raises(CheckpointError, match="no such directory"):
        convert_bin(tmp_path / "absent", tmp_path / "new")
    with pytest.raises(CheckpointError, match="exists already"):
        convert_bin(single, single)
    (single / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="holds README.md, config.json.*neither pytorch_model.bin nor"):
        convert_bin(single, tmp_path / "new")


def test_too_little_space_is_found_before_anything_is_written(single, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 900, 100))
    with pytest.raises(CheckpointError, match="the disk has 100 bytes left: free space"):
        convert_bin(single, tmp_path / "new", progress=False)
    assert os.listdir(tmp_path) == ["hub model"]


def test_a_destination_that_came_meanwhile_is_kept(tmp_path):
    with pytest.raises(CheckpointError, match="new exists already"), new_directory(tmp_path / "new", 1):
        (tmp_path / "new").mkdir()
    assert os.listdir(tmp_path) == ["new"]


def test_a_disk_that_fills_up_leaves_nothing_behind(single, tmp_path, monkeypatch):
    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer.os, "fsync", full)
    with pytest.raises(CheckpointError, match="disk is full"):
        convert_bin(single, tmp_path / "new", progress=False)
    assert os.listdir(tmp_path) == ["hub model"]


def test_an_interrupt_leaves_nothing_behind(single, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("moe_jax.checkpoint.bin_convert.write_safetensors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert_bin(single, tmp_path / "new", progress=False)
    assert os.listdir(tmp_path) == ["hub model"]


def test_the_writer_checks_what_it_writes(tmp_path):
    path, info = tmp_path / "x.safetensors", TensorInfo(np.dtype(np.float32), (2,), 8)
    with pytest.raises(CheckpointError, match="w is complex64, which safetensors does not know"):
        write_safetensors(path, {"w": TensorInfo(np.dtype(np.complex64), (1,), 8)}, lambda name: None)
    with pytest.raises(ValueError, match="w: read float64"):
        write_safetensors(path, {"w": info}, lambda name: np.zeros(1))
    assert not list(tmp_path.iterdir())
    told = []
    write_safetensors(path, {"w": info}, lambda name: np.arange(4, dtype=np.float32)[::2], done=told.append)
    assert safetensors.numpy.load_file(path)["w"].tolist() == [0, 2] and told == [8]


def test_a_progress_bar(single, tmp_path, capsys):
    convert_bin(single, tmp_path / "new", progress=True)
    assert "safetensors" in capsys.readouterr().err


def test_loading_a_pytorch_directory_names_the_command(single):
    quoted = f"'{single}' '{single}-safetensors'"
    with pytest.raises(CheckpointError) as raised:
        MoE(single)
    assert f"convert it once with `python -m moe_jax.convert {quoted}`" in str(raised.value)
