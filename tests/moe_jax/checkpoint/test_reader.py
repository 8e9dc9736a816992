"""Opening checkpoint directories: layouts, dtypes, zero-copy views, fingerprints and every kind of damage."""

import json
import os
import shutil

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from moe_jax.checkpoint.reader import DTYPES, Checkpoint, raise_problems
from moe_jax.errors import CheckpointError

A = np.arange(12, dtype=np.float32).reshape(3, 4)
B = np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16)


def write(directory, files, config=None, index=None):
    """A checkpoint directory with these safetensors files: file name -> tensors by name."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config or {"model_type": "test"}))
    for name, tensors in files.items():
        save_file(tensors, directory / name)
    if index is not None:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return directory


def write_raw(path, header, data=b""):
    """A safetensors file with exactly this header (a dict, or bytes) and data."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def problems_of(directory):
    with pytest.raises(CheckpointError) as raised:
        Checkpoint.open(directory)
    return str(raised.value)


# bfloat16 and float8 are what real checkpoints hold and NumPy itself does not know.
@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d != ml_dtypes.float8_e8m0fnu], ids=str)
def test_views_hold_the_file_and_are_read_only(tmp_path, dtype):
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    checkpoint = Checkpoint.open(write(tmp_path, {"model.safetensors": {"w": array}}))
    view = checkpoint.view("w")
    assert view.dtype == dtype and view.shape == (2, 3, 4)
    assert checkpoint.info("w") == (dtype, (2, 3, 4), array.nbytes)
    assert view.tobytes() == array.tobytes()
    assert not view.flags.owndata and not view.flags.writeable
    assert view[1].tobytes() == array[1].tobytes()


def test_e8m0_scales_scalars_and_empty_tensors(tmp_path):
    header = {
        "scale": {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [0, 2]},
        "scalar": {"dtype": "F32", "shape": [], "data_offsets": [4, 8]},
        "none": {"dtype": "BF16", "shape": [0, 5], "data_offsets": [8, 8]},
    }
    write(tmp_path, {})
    write_raw(tmp_path / "model.safetensors", header, b"\x7f\x80\0\0" + np.float32(2.5).tobytes())
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.view("scale").astype(np.float32).tolist() == [1.0, 2.0]
    assert checkpoint.view("scalar").shape == () and checkpoint.view("scalar") == np.float32(2.5)
    assert checkpoint.view("none").shape == (0, 5)


def test_a_view_shares_the_mapping_with_every_other_view(tmp_path):
    checkpoint = Checkpoint.open(write(tmp_path, {"model.safetensors": {"w": A}}))
    assert np.shares_memory(checkpoint.view("w"), checkpoint.view("w")[1:2])


def test_header_of_odd_length_leaves_data_unaligned_but_right(tmp_path):
    write(tmp_path, {})
    header = json.dumps({"w": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}}).encode()
    write_raw(tmp_path / "model.safetensors", header + b" " * (1 - len(header) % 2), A.tobytes())
    np.testing.assert_array_equal(Checkpoint.open(tmp_path).view("w"), A)


def test_shards_with_index(tmp_path):
    files = {"x-00001-of-00002.safetensors": {"a": A}, "x-00002-of-00002.safetensors": {"b": B}}
    index = {"a": "x-00001-of-00002.safetensors", "b": "x-00002-of-00002.safetensors"}
    write(tmp_path, files | {"other.safetensors": {"a": A}}, index=index)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.names() == ["a", "b"]
        np.testing.assert_array_equal(checkpoint.view("a"), A)
        np.testing.assert_array_equal(checkpoint.view("b"), B)


def test_a_place_says_where_the_bytes_of_a_tensor_are(tmp_path):
    write(tmp_path, {"model-1-of-2.safetensors": {"a": A}, "model-2-of-2.safetensors": {"b": B}})
    with Checkpoint.open(tmp_path) as checkpoint:
        for name, file, array in (("a", "model-1-of-2.safetensors", A), ("b", "model-2-of-2.safetensors", B)):
            place = checkpoint.place(name)
            assert place.path == tmp_path / file and place.info == checkpoint.info(name)
            with open(place.path, "rb") as opened:
                opened.seek(place.offset)
                assert opened.read(place.info.nbytes) == array.tobytes()
                assert place.stat == os.fstat(opened.fileno())
        with pytest.raises(CheckpointError, match="no tensor named 'c'"):
            checkpoint.place("c")


def test_shards_without_index(tmp_path):
    write(tmp_path, {"model-1-of-2.safetensors": {"a": A}, "model-2-of-2.safetensors": {"b": B}})
    assert Checkpoint.open(tmp_path).names() == ["a", "b"]


def test_single_file_wins_over_a_left_over_index(tmp_path):
    write(tmp_path, {"model.safetensors": {"a": A}}, index={"b": "gone.safetensors"})
    assert Checkpoint.open(tmp_path).names() == ["a"]


def test_configs_are_read(tmp_path):
    write(tmp_path, {"model.safetensors": {"a": A}}, config={"hidden_size": 4})
    assert Checkpoint.open(tmp_path).config == {"hidden_size": 4}
    assert Checkpoint.open(tmp_path).generation_config == {}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    assert Checkpoint.open(str(tmp_path)).generation_config == {"temperature": 0.6}


def test_unknown_name_and_closed_checkpoint_are_clear_errors(tmp_path):
    checkpoint = Checkpoint.open(write(tmp_path, {"model.safetensors": {"a": A}}))
    with pytest.raises(CheckpointError, match="no tensor named 'nope'"):
        checkpoint.view("nope")
    view = checkpoint.view("a")
    checkpoint.close()
    np.testing.assert_array_equal(view, A)  # a view outlives its checkpoint
    for use in (lambda: checkpoint.view("a"), lambda: checkpoint.info("a"), checkpoint.fingerprint):
        with pytest.raises(CheckpointError, match="was closed"):
            use()


def test_fingerprint_knows_contents_but_not_places_or_times(tmp_path):
    source = write(tmp_path / "one", {"model.safetensors": {"a": A, "b": B}}, config={"x": 1, "y": 2})
    original = Checkpoint.open(source).fingerprint()
    shutil.copytree(source, tmp_path / "copy")
    os.utime(tmp_path / "copy" / "model.safetensors", (1, 1))
    (tmp_path / "copy" / "config.json").write_text('{"y": 2, "x": 1}')
    assert Checkpoint.open(tmp_path / "copy").fingerprint() == original
    changed = [
        write(tmp_path / "config", {"model.safetensors": {"a": A, "b": B}}, config={"x": 1, "y": 3}),
        write(tmp_path / "data", {"model.safetensors": {"a": A, "b": -B}}, config={"x": 1, "y": 2}),
        write(tmp_path / "name", {"model.safetensors": {"a": A, "c": B}}, config={"x": 1, "y": 2}),
        write(tmp_path / "type", {"model.safetensors": {"a": A.view(np.int32), "b": B}}, config={"x": 1, "y": 2}),
        write(tmp_path / "file", {"other.safetensors": {"a": A, "b": B}}, config={"x": 1, "y": 2}),
    ]
    prints = [Checkpoint.open(directory).fingerprint() for directory in changed]
    assert len({original, *prints}) == 1 + len(changed)


def test_missing_folder_and_file_instead_of_folder(tmp_path):
    assert "does not exist" in problems_of(tmp_path / "nowhere")
    write(tmp_path, {"model.safetensors": {"a": A}})
    assert "is a file, not a directory" in problems_of(tmp_path / "model.safetensors")


def test_no_weights_at_all_and_only_pickles(tmp_path):
    write(tmp_path, {})
    assert "no *.safetensors file here: download" in problems_of(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    message = problems_of(tmp_path)
    assert "only pytorch_model.bin" in message and "python -m moe_jax.convert" in message


@pytest.mark.parametrize(
    "content, expected",
    [
        (None, "config.json is missing"),
        (b"{", "config.json is not readable JSON"),
        (b"\xff\xfe\xfa", "config.json is not readable JSON"),
        (b"[1]", "holds a list"),
    ],
)
def test_config_faults(tmp_path, content, expected):
    write(tmp_path, {"model.safetensors": {"a": A}})
    (tmp_path / "config.json").unlink()
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    assert expected in problems_of(tmp_path)


GOOD = {"w": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}}


def bad_entry(**fields):
    return {"w": GOOD["w"] | fields}


@pytest.mark.parametrize(
    "header, expected",
    [
        (b"not json", "header is not JSON"),
        (b"[" * 100_000, "header is not JSON"),
        (b"[1]", "a list instead of an object"),
        (bad_entry(data_offsets=[0, 52], shape=[13]), "ends at byte"),
        (bad_entry(data_offsets=[0, 44]), "do not hold F32 [3, 4] (48 bytes)"),
        (bad_entry(data_offsets=[-48, 0]), "whole numbers >= 0"),
        (bad_entry(shape=[3.0, 4]), "whole numbers >= 0"),
        (bad_entry(dtype="F4"), "dtype 'F4' is not supported"),
        ({"w": {"dtype": "F32", "shape": [3, 4]}}, "header entry of w: lacks data_offsets"),
        ({"w": 3}, "header entry of w"),
    ],
)
def test_header_faults(tmp_path, header, expected):
    write(tmp_path, {})
    write_raw(tmp_path / "model.safetensors", header, A.tobytes())
    message = problems_of(tmp_path)
    assert expected in message and "model.safetensors" in message


def test_lfs_pointer_is_named_as_such(tmp_path):
    write(tmp_path, {})
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert "git lfs pull" in problems_of(tmp_path)


def test_all_problems_are_reported_at_once(tmp_path):
    first, second, third = (f"m-{i}-of-4.safetensors" for i in (1, 2, 3))
    write(tmp_path, {first: {"a": A, "b": B}, second: {"b": B}, third: {"c": A}})
    (tmp_path / "config.json").unlink()
    with open(tmp_path / third, "r+b") as file:
        file.truncate(os.path.getsize(tmp_path / third) - 1)
    message = problems_of(tmp_path)
    for part in (
        "4 problems",
        "config.json is missing",
        f"b is in two shards, {first} and {second}",
        f"{third} ends at byte",
        "m-4-of-4.safetensors is missing",
    ):
        assert part in message


def test_index_faults(tmp_path):
    write(tmp_path, {"one.safetensors": {"a": A}, "two.safetensors": {"b": B}})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "c": "one.safetensors"}}))
    assert "names tensors that one.safetensors does not hold: c" in problems_of(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "two.safetensors", "b": "one.safetensors"}}))
    assert "gives the wrong file for a, b" in problems_of(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "three.safetensors"}}))
    assert "three.safetensors is missing" in problems_of(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../one.safetensors"}}))
    assert "outside the directory" in problems_of(tmp_path)
    index.write_text(json.dumps({"weights": {}}))
    assert 'no "weight_map"' in problems_of(tmp_path)
    index.write_text("{")
    assert "index.json is not readable JSON" in problems_of(tmp_path)


def test_long_lists_are_shortened_with_a_count(tmp_path):
    write(tmp_path, {"one.safetensors": {"a": A}}, index={f"t{i:03d}": "one.safetensors" for i in range(100)})
    message = problems_of(tmp_path)
    assert "t007 and 92 more" in message and "t008" not in message


def test_raise_problems_without_problems_does_nothing():
    raise_problems("here", [])


@given(st.data())
@settings(max_examples=30)
def test_a_file_cut_anywhere_is_refused(tmp_path_factory, data):
    directory = write(tmp_path_factory.mktemp("cut"), {"model.safetensors": {"a": A, "b": B}})
    file = directory / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert "model.safetensors" in problems_of(directory)


@given(st.data())
@settings(max_examples=60)
def test_damaged_headers_never_escape_as_another_error(tmp_path_factory, data):
    directory = write(tmp_path_factory.mktemp("bits"), {"model.safetensors": {"a": A, "b": B}})
    file = directory / "model.safetensors"
    content = bytearray(file.read_bytes())
    end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    try:
        checkpoint = Checkpoint.open(directory)
    except CheckpointError:
        return
    for name in checkpoint.names():  # what was accepted must be readable
        assert checkpoint.view(name).nbytes == checkpoint.info(name).nbytes


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8).filter(
            lambda name: name != "__metadata__"
        ),
        st.tuples(
            st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16, np.int8]),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_round_trip_of_random_files(tmp_path_factory, tensors):
    arrays = {
        name: np.arange(int(np.prod(shape)), dtype=np.float32).astype(dtype).reshape(shape)
        for name, (dtype, shape) in tensors.items()
    }
    checkpoint = Checkpoint.open(write(tmp_path_factory.mktemp("any"), {"model.safetensors": arrays}))
    assert checkpoint.names() == sorted(arrays)
    for name, array in arrays.items():
        view = checkpoint.view(name)
        assert view.dtype == array.dtype and view.shape == array.shape and view.tobytes() == array.tobytes()
