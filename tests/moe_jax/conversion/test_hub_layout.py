"""Hugging Face layout: what is written loads as the prepared rows of the same format do."""

import errno
import json
import os
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from moe_jax.checkpoint import Checkpoint
from moe_jax.conversion import Target, hub_layout, prepare, write_hub_layout
from moe_jax.errors import CheckpointError
from pallas_kernels.formats import FP8, INT4, MXFP4, Dense

# (source, format): packed of files with one tensor an expert; bf16 of any layout, also of what is packed.
CASES = (
    ("qwen3_moe", FP8(16)),
    ("mixtral_bf16_sharded", INT4(16)),
    ("mixtral_bf16_sharded", Dense()),
    ("qwen3_moe_gptq_actorder", Dense()),
    ("deepseek_v4_fp4", Dense()),
    ("dbrx", Dense()),
)


@pytest.mark.parametrize(("name", "form"), CASES, ids=lambda value: getattr(value, "name", value))
def test_it_loads_as_the_prepared_rows_do(name, form, tiny, tmp_path, opened, assert_same):
    written, report = write_hub_layout(tiny(name), tmp_path / "hub", Target(form), progress=False)
    rows, same_report = prepare(tiny(name), tmp_path / "rows", Target(form), progress=False)
    # Dense weights that were packed are bfloat16 in the files, which prepared ones keep in the compute dtype.
    config = {"dtype": "bfloat16"} if name == "qwen3_moe_gptq_actorder" else {}
    assert_same(opened(written, **config), opened(rows, **config))
    for ours, theirs in zip(report.rows(), same_report.rows(), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert json.loads((written / "conversion_errors.json").read_text())["layers"] == report.rows()


def test_values_are_rounded_once(tiny, tmp_path, opened, assert_same):
    """Not to the compute dtype before they are packed, where the files are wider."""
    source = shutil.copytree(tiny("qwen3_moe"), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    written, report = write_hub_layout(source, tmp_path / "hub", Target(FP8(16)), progress=False)
    rows, same_report = prepare(source, tmp_path / "rows", Target(FP8(16)), progress=False)
    assert_same(opened(written), opened(rows))
    assert report.rows()[0] == pytest.approx(same_report.rows()[0], rel=1e-5)


def test_other_tensors_stay_and_the_config_says_what_is_packed(tiny, tmp_path):
    written, _ = write_hub_layout(tiny("qwen3_moe"), tmp_path / "hub", Target(FP8(16)), progress=False)
    with Checkpoint.open(tiny("qwen3_moe")) as source, safe_open(written / "model.safetensors", "numpy") as files:
        names = set(files.keys())
        experts = {name for name in source.names() if ".experts." in name}
        assert names == set(source.names()) | {f"{name}_scale_inv" for name in experts}
        for name in set(source.names()) - experts:
            np.testing.assert_array_equal(files.get_tensor(name), source.view(name))
    with Checkpoint.open(written) as checkpoint:
        assert checkpoint.info(min(experts)).dtype == ml_dtypes.float8_e4m3fn
        settings = checkpoint.config["quantization_config"]
    assert settings["weight_block_size"] == [16, 16]
    kept = settings["modules_to_not_convert"]
    assert "lm_head" in kept and "model.layers.1.mlp.gate" in kept and not any(".experts." in name for name in kept)


def test_biases_of_zeros_beside_packed_weights_are_left_out(tiny, tmp_path, opened, assert_same):
    """Older AutoGPTQ versions write them; beside bfloat16 weights they would have no place in the model."""
    source = shutil.copytree(tiny("mixtral_gptq"), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    packed = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    biases = {f"{name}.bias": np.zeros(tensors[f"{name}.qweight"].shape[1], np.float16) for name in packed}
    save_file(tensors | biases, source / "model.safetensors")
    written, _ = write_hub_layout(source, tmp_path / "hub", Target(Dense()), progress=False)
    plain, _ = write_hub_layout(tiny("mixtral_gptq"), tmp_path / "plain", Target(Dense()), progress=False)
    assert_same(opened(written), opened(plain))


def test_shards_have_an_index(tiny, tmp_path, monkeypatch, opened, assert_same):
    monkeypatch.setattr(hub_layout, "_SHARD_BYTES", 100_000)
    written, _ = write_hub_layout(tiny("qwen3_moe"), tmp_path / "hub", Target(INT4(16)), progress=False)
    index = json.loads((written / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in written.glob("*.safetensors"))
    assert len(files) > 2 and sorted(set(index["weight_map"].values())) == files
    monkeypatch.undo()
    alone, _ = write_hub_layout(tiny("qwen3_moe"), tmp_path / "alone", Target(INT4(16)), progress=False)
    assert_same(opened(written), opened(alone))


@pytest.mark.parametrize(
    ("name", "form", "reason"),
    (
        ("qwen3_moe", MXFP4(), "mxfp4 has no Hugging Face layout for experts of any family"),
        ("mixtral_v5keys", FP8(16), r"stacked, transposed or padded \(such as .*experts.gate_up_proj\)"),
        ("deepseek_v3_fp8", INT4(16), r"quantised already \(fp8\).*convert it to bf16 first"),
        ("gpt_oss_mxfp4", Dense(), "packed together .*no layout in bf16"),
    ),
)
def test_what_has_no_such_files_names_what_does_it(name, form, reason, tiny, tmp_path):
    with pytest.raises(CheckpointError, match=f"{reason}.*--layout rows"):
        write_hub_layout(tiny(name), tmp_path / "hub", Target(form), progress=False)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_leaves_nothing_behind(tiny, tmp_path, monkeypatch):
    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="disk is full"):
        write_hub_layout(tiny("qwen3_moe"), tmp_path / "hub", Target(Dense()), progress=False)
    assert os.listdir(tmp_path) == []


def test_what_the_disk_gives_back_is_compared(tiny, tmp_path, monkeypatch):
    write = hub_layout._write
    monkeypatch.setattr(hub_layout, "_write", lambda *args: write(*args) | {"lm_head.weight": 0})
    with pytest.raises(CheckpointError, match="not read as written, so the disk is faulty: lm_head.weight"):
        write_hub_layout(tiny("qwen3_moe"), tmp_path / "hub", Target(Dense()), progress=False)
    assert os.listdir(tmp_path) == []
