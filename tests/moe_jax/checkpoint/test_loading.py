"""Dense parameters from files to the device: values, dtypes, structure, errors and the progress bar."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from moe_jax.checkpoint import Checkpoint, LogicalTensor, WeightMap, load_params
from moe_jax.errors import CheckpointError

BF16 = ml_dtypes.bfloat16
Q = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
K = np.linspace(2, 3, 4, dtype=np.float32).reshape(1, 4)
NORM = np.linspace(0.1, 1.3, 4, dtype=np.float32).astype(BF16)
HASH = np.arange(4, dtype=np.int64)
SHAPES = {"q": (2, 4), "k": (1, 4), "norm": (4,), "hash": (4,)}


def weight_map(**names):
    """A map of parameters to these tensors of the file, all plain."""
    return WeightMap(
        {path: tuple(LogicalTensor.plain(n, SHAPES[n]) for n in found.split()) for path, found in names.items()}, {}, {}
    )


MAP = weight_map(**{"attn.qk": "q k", "attn.norm": "norm", "out": "q"})


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    save_file({"q": Q, "k": K, "norm": NORM, "hash": HASH}, tmp_path / "model.safetensors")
    return Checkpoint.open(tmp_path)


def abstract(qk="bfloat16", norm="bfloat16", out="float32"):
    leaf = jax.ShapeDtypeStruct
    return {"attn": {"qk": leaf((3, 4), qk), "norm": leaf((4,), norm)}, "out": leaf((2, 4), out)}


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16], ids=str)
def test_values_structure_and_dtypes(checkpoint, dtype):
    params = load_params(checkpoint, MAP, abstract(dtype, dtype, dtype), progress=False)
    assert jax.tree.structure(params) == jax.tree.structure(abstract())
    assert all(isinstance(leaf, jax.Array) and leaf.dtype == dtype for leaf in jax.tree.leaves(params))
    np.testing.assert_array_equal(params["attn"]["qk"], np.concatenate([Q, K]).astype(dtype))
    np.testing.assert_array_equal(params["attn"]["norm"], NORM.astype(dtype))
    np.testing.assert_array_equal(params["out"], Q.astype(dtype))


def test_each_leaf_has_its_own_dtype(checkpoint):
    params = load_params(checkpoint, MAP, abstract("float16", "float32", "bfloat16"), progress=False)
    assert [leaf.dtype for leaf in jax.tree.leaves(params)] == [np.float32, np.float16, BF16]


def test_parameters_do_not_alias_the_mapped_file(tmp_path):
    # 64-byte aligned data is what the CPU backend would alias; the file starts on a page.
    header = json.dumps({"q": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}}).encode().ljust(120)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + Q.tobytes())
    checkpoint = Checkpoint.open(tmp_path)
    address = checkpoint.view("q").ctypes.data
    assert address % 64 == 0
    tree = {"q": jax.ShapeDtypeStruct((2, 4), "float32")}
    out = load_params(checkpoint, weight_map(q="q"), tree, progress=False)["q"]
    assert out.unsafe_buffer_pointer() != address
    np.testing.assert_array_equal(out, Q)


def test_integer_tables_load_but_never_as_floats(checkpoint):
    found = load_params(checkpoint, weight_map(h="hash"), {"h": jax.ShapeDtypeStruct((4,), "int32")}, progress=False)
    np.testing.assert_array_equal(found["h"], HASH)
    with pytest.raises(CheckpointError, match="hash is int64 in the file, but h is float32: this is a quantised"):
        load_params(checkpoint, weight_map(h="hash"), {"h": jax.ShapeDtypeStruct((4,), "float32")})


def test_tree_and_map_must_agree(checkpoint):
    tree = abstract()
    tree["extra"] = tree["attn"].pop("norm")
    tree["out"] = jax.ShapeDtypeStruct((4, 2), "float32")
    with pytest.raises(CheckpointError) as raised:
        load_params(checkpoint, MAP, tree)
    assert "lacks these parameters of the model: extra" in str(raised.value)
    assert "does not have: attn.norm" in str(raised.value)
    assert "out has shape [4, 2] in the model, but [2, 4] in the file" in str(raised.value)


def test_progress_bar_only_when_asked_or_on_a_terminal(checkpoint, capsys):
    load_params(checkpoint, MAP, abstract())  # under pytest stderr is no terminal
    load_params(checkpoint, MAP, abstract(), progress=False)
    assert capsys.readouterr().err == ""
    load_params(checkpoint, MAP, abstract(), progress=True)
    captured = capsys.readouterr()
    assert "dense weights" in captured.err and captured.out == ""
