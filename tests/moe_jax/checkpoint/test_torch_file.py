"""Reading `torch.save` files without torch: every dtype and view, damaged files, pickles that want to run something."""

import pickle
import sys
import zipfile

import numpy as np
import pytest
import torch_files
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.checkpoint.torch_file import TorchFile
from moe_jax.errors import CheckpointError


def test_a_file_written_by_torch():
    want = torch_files.real_values()
    with TorchFile(torch_files.REAL) as file:
        assert file.names() == list(want)
        for name, value in want.items():
            info, got = file.info(name), file.read(name)
            assert info == (value.dtype, value.shape, value.nbytes)
            assert got.dtype == value.dtype and got.shape == value.shape and got.tobytes() == value.tobytes(), name
            assert not got.flags.writeable
    assert "torch" not in sys.modules


@settings(max_examples=15)
@given(shape=st.lists(st.integers(0, 4), max_size=4), offset=st.integers(0, 5), spread=st.integers(1, 3))
def test_any_view_of_a_storage(shape, offset, spread, tmp_path_factory):
    stride, step = [], spread
    for n in reversed(shape):
        stride.insert(0, step)
        step *= max(1, n)
    needed = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
    values = np.arange(max(needed, 1), dtype=np.float32)
    opcodes = torch_files.tensor("0", shape, stride, count=values.size, offset=offset)
    path = tmp_path_factory.mktemp("view") / "pytorch_model.bin"
    torch_files.write_archive(path, torch_files.state_pickle({"w": opcodes}), {"0": values.tobytes()})
    index = np.full(shape, offset)
    for axis, (n, s) in enumerate(zip(shape, stride, strict=True)):
        index = index + (np.arange(n) * s).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    with TorchFile(path) as file:
        np.testing.assert_array_equal(file.read("w"), values[index])


class Malice:
    """Unpickling this would create the file named in `arguments`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def write(tmp_path, pickled, storages=None, **options):
    storages = {"0": np.zeros(4, np.float32).tobytes()} if storages is None else storages
    return torch_files.write_archive(tmp_path / "pytorch_model.bin", pickled, storages, **options)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda mark: pickle.dumps({"w": Malice(eval, f"open({mark!r}, 'w')")}, protocol=2), "builtin.*eval"),
        (lambda mark: pickle.dumps({"w": Malice(open, mark, "w")}, protocol=4), "open"),
        (lambda mark: b"\x80\x02cos\nsystem\n" + b"(" + torch_files.text(f"touch {mark}") + b"tR.", "os.system"),
        (lambda mark: b"\x80\x02cnumpy\nload\n(X\x01\x00\x00\x00xtR.", "numpy.load"),
        # By a path through something harmless, and the old opcode that builds an instance.
        (lambda mark: b"\x80\x04\x8c\x0bcollections\x8c\x10OrderedDict.copy\x93.", "collections.OrderedDict.copy"),
        (lambda mark: b"(S'touch'\nios\nsystem\n.", "os.system"),
        (lambda mark: b"\x80\x02ctorch.jit\nload\n.", "torch.jit.load"),
    ],
)
def test_a_malicious_pickle_is_refused_and_not_run(make, named, tmp_path):
    mark = str(tmp_path / "ran")
    path = write(tmp_path, make(mark))
    with pytest.raises(CheckpointError, match=rf"asks to call .*{named}.*malicious and was not run"):
        TorchFile(path)
    assert not (tmp_path / "ran").exists()


def test_what_a_pickle_does_to_our_functions_ends_with_its_file(tmp_path):
    defaults = b"}(" + torch_files.text("__defaults__") + b"(K\x07tu"
    attack = b"ctorch._utils\n_rebuild_tensor_v2\nN" + defaults + b"\x86b0"  # sets an attribute and forgets it
    pickled = torch_files.state_pickle({"w": VALUE})
    with TorchFile(write(tmp_path, b"\x80\x02" + attack + pickled[2:])) as file:
        assert file.names() == ["w"]
    missing = torch_files.call("torch._utils._rebuild_tensor_v2", b"N")  # defaults that stayed would fill these in
    with pytest.raises(CheckpointError, match="missing 5 required positional arguments"):
        TorchFile(write(tmp_path, torch_files.state_pickle({"w": missing})))


def test_what_a_pickle_gets_cannot_be_changed(tmp_path):
    attack = b"ctorch\nFloatStorage\nN}(" + torch_files.text("dtype") + b"Nu\x86b0"
    pickled = torch_files.state_pickle({"w": VALUE})
    with pytest.raises(CheckpointError, match="damaged.*can't set attribute"):
        TorchFile(write(tmp_path, b"\x80\x02" + attack + pickled[2:]))


VALUE = torch_files.tensor("0", (2, 2), (2, 1), count=4)


@pytest.mark.parametrize(
    ("opcodes", "message"),
    [
        (torch_files.tensor("0", (2, 3), (3, 1), count=4), "reaches past its storage"),
        (torch_files.tensor("0", (2, 2), (2, 1), count=4, offset=1), "reaches past its storage"),
        (torch_files.tensor("0", (2,), (2, 1), count=4), "impossible storage, shape or stride"),
        (torch_files.tensor("0", (-2,), (1,), count=4), "impossible storage, shape or stride"),
        (torch_files.tensor("1", (2, 2), (2, 1), count=4), "values of w are missing or cut"),
        (torch_files.tensor("0", (2, 2), (2, 1), count=5), "values of w are missing or cut"),
        (torch_files.text("text"), "'w' is no tensor"),
        (b"}" + b"(" + torch_files.text("w") + VALUE + b"u", "'w' is no tensor"),
        (b"(K\x01Q", "data.pkl is damaged"),
        (b"", "data.pkl is damaged"),
    ],
)
def test_an_impossible_state_dict_is_refused(opcodes, message, tmp_path):
    path = write(tmp_path, torch_files.state_pickle({"w": opcodes}))
    with pytest.raises(CheckpointError, match=f"pytorch_model.bin.*{message}"):
        TorchFile(path)


def test_other_files_are_told_apart(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    for content, message in (
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02", "saved by a PyTorch before 1.6: load and save it"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"nothing", "cut off or no PyTorch checkpoint"),
        (b"", "cut off or no PyTorch checkpoint"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            TorchFile(path)
    with pytest.raises(CheckpointError, match="absent.bin cannot be read"):
        TorchFile(tmp_path / "absent.bin")
    pickled = torch_files.state_pickle({"w": VALUE})
    with pytest.raises(CheckpointError, match="compressed, which torch.save never does"):
        TorchFile(write(tmp_path, pickled, compression=zipfile.ZIP_DEFLATED))
    with pytest.raises(CheckpointError, match="holds a list"):
        TorchFile(write(tmp_path, b"\x80\x02]."))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("something", "else")
    with pytest.raises(CheckpointError, match="0 data.pkl"):
        TorchFile(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/byteorder", "big")
    with pytest.raises(CheckpointError, match="big-endian"):
        TorchFile(path)


def test_a_flipped_bit_is_found(tmp_path):
    values = np.arange(4, dtype=np.float32)
    path = write(tmp_path, torch_files.state_pickle({"w": VALUE}), {"0": values.tobytes()})
    raw = bytearray(path.read_bytes())
    raw[raw.index(values.tobytes()) + 5] ^= 1
    path.write_bytes(raw)
    with TorchFile(path) as file, pytest.raises(CheckpointError, match="w cannot be read.*fetch the file again"):
        file.read("w")
