"""experiments/random_checkpoint.py: real shapes map completely, values are sane, files are whole or not there."""

import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))
import random_checkpoint
from random_checkpoint import BFLOAT16, E8M0, FP8, MODELS, PIECE, QUIET, FileTensor, Fill, pieces, write_checkpoint

from host_offload.store import ExpertStore
from moe_jax.checkpoint import Checkpoint
from moe_jax.engine.loading import map_weights, read_model_config

# Layers that hold each kind of layer of the family.
LAYERS = {"deepseek-v2-lite": 2, "deepseek-v3": 4, "deepseek-v4-flash": 4, "jamba-v0.1": 5, "qwen3.5-35b-a3b": 4}
# Bytes of one expert in the released files, scales and biases included.
EXPERT_BYTES = {
    "qwen3-30b-a3b": 9_437_184,
    "olmoe-1b-7b": 12_582_912,
    "mixtral-8x7b": 352_321_536,
    "deepseek-v2-lite": 17_301_504,
    "deepseek-v3": 44_040_192 + 10_752,
    "deepseek-v4-flash": 12_582_912 + 786_432,
    "gpt-oss-20b": 13_236_480,
    "jamba-v0.1": 352_321_536,
    "qwen3.5-35b-a3b": 6_291_456,
}


def mapped(files: Checkpoint):
    """The weight map of a checkpoint, as loading makes it, and its config."""
    cfg = read_model_config(files)
    return map_weights(files, cfg), cfg


@pytest.mark.parametrize("name", MODELS)
def test_real_shapes_fill_the_model(name, tmp_path, monkeypatch):
    def write_scales_only(file, position, key, tensor, first):
        if isinstance(tensor.values, np.ndarray) or tensor.values.kind in ("scale", "exponent"):
            return write(file, position, key, tensor, first)
        return tensor.nbytes  # the rest of the file has no blocks on the disk

    write = random_checkpoint._write_tensor
    monkeypatch.setattr(random_checkpoint, "_write_tensor", write_scales_only)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 60))
    config = random_checkpoint.with_layers(random_checkpoint.CONFIGS[name], LAYERS.get(name, 2))
    text = config.get("text_config", config)
    experts = next(key for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in text)
    text[experts] = min(text[experts], 16)  # scales of all would take a while
    monkeypatch.setitem(random_checkpoint.CONFIGS, name, config)
    write_checkpoint(tmp_path / name, name, progress=False)
    with Checkpoint.open(tmp_path / name) as files:
        weights, cfg = mapped(files)
        assert set(cfg.moe_layers) and len(weights.expert_sources["gate_up"]) == len(cfg.moe_layers)
        routed = [key for key in files.names() if ".experts." in key and "mtp." not in key]
        nbytes = sum(files.info(key).nbytes for key in routed)
    assert nbytes == EXPERT_BYTES[name] * text[experts] * len(cfg.moe_layers)


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v4-flash", "gpt-oss-20b", "qwen3-30b-a3b"])
def test_experts_have_the_spread_they_should(name, tmp_path):
    write_checkpoint(tmp_path / "model", name, tiny=True, progress=False)
    with Checkpoint.open(tmp_path / "model") as files:
        weights, cfg = mapped(files)
        store = ExpertStore.from_checkpoint(files, weights, BFLOAT16)
        D, F = cfg.hidden_size, cfg.expert_width
        for part, outs, width, gain in (("gate_up", (F, F), D, 1.0), ("down", (D,), F, QUIET)):
            form, values = getattr(weights.experts, part), []
            for e in range(4):
                rows = {}
                for suffix in form.suffixes:
                    shape, dtype = store.spec.tensors[part + suffix]
                    rows[suffix] = np.empty(shape, dtype)
                    store.read(0, e, part + suffix, rows[suffix])
                values.append(np.asarray(form.decode(rows, outs, width, np.float32)))
            spread = np.std(values)
            assert np.isfinite(values).all() and not np.array_equal(values[0], values[1])
            # Powers of two as scales are the nearest below or above; tiny experts in floating point have gain 1.3.
            assert 0.6 < spread / (gain * width**-0.5) < 1.7, (part, spread)
        store.close()


def whole(name, tensor, dtype):
    return np.concatenate(list(pieces(name, tensor, 0, 1 << 20))).view(dtype)


def test_pieces_fill_a_tensor_and_do_not_repeat():
    tensor = FileTensor((3, PIECE // 2 + 5), BFLOAT16, Fill("normal", 0.25))
    values = whole("a", tensor, BFLOAT16).astype(np.float32)
    assert values.size == tensor.size > PIECE
    assert abs(values.std() - 0.25) < 0.002 and abs(values.mean()) < 0.002
    np.testing.assert_array_equal(values, whole("a", tensor, BFLOAT16).astype(np.float32))
    assert (values != whole("b", tensor, BFLOAT16).astype(np.float32)).mean() > 0.9
    assert np.corrcoef(values[: PIECE // 2], values[PIECE : PIECE + PIECE // 2])[0, 1] < 0.01
    parts = [piece for first in (0, 1) for piece in pieces("a", tensor, first, 1)]
    np.testing.assert_array_equal(np.concatenate(parts).view(BFLOAT16).astype(np.float32), values)


def test_codes_and_scales_are_valid():
    codes = whole("a", FileTensor((PIECE,), FP8, Fill("fp8")), FP8).astype(np.float32)
    assert np.isfinite(codes).all() and abs(codes.std() - random_checkpoint.FP8_SPREAD) < 1
    exponents = whole("a", FileTensor((1000,), E8M0, Fill("exponent", 0.01)), np.uint8)
    assert sorted(set(exponents.tolist())) == [127 - 7, 127 - 6]  # 2 ** -7 < 0.01 < 2 ** -6
    scales = whole("a", FileTensor((1000,), np.dtype(np.float32), Fill("scale", 0.01)), np.float32)
    assert 0.007 <= scales.min() < scales.max() <= 0.013


def test_a_hash_table_names_distinct_experts():
    table = random_checkpoint._hash_table("layers.0.mlp.gate.tid2eid", (5000, 6), 256)
    assert table.min() == 0 and table.max() == 255 and all(len(set(row)) == 6 for row in table.tolist())
    tight = random_checkpoint._hash_table("x", (100, 4), 4)
    assert all(sorted(row) == [0, 1, 2, 3] for row in tight.tolist())


def test_routing_is_not_biased_and_outputs_are_quiet():
    tensors = random_checkpoint.file_tensors("deepseek-v3", random_checkpoint.config_of("deepseek-v3", tiny=True))
    bias = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == np.float32 and 0 < np.abs(bias.values).max() < 0.02
    real = random_checkpoint.file_tensors("jamba-v0.1", random_checkpoint.config_of("jamba-v0.1", 5))
    D, inner = 4096, 14336
    assert real["model.layers.0.mamba.out_proj.weight"].values == Fill("normal", (2 * D) ** -0.5 * QUIET)
    assert real["model.layers.0.feed_forward.down_proj.weight"].values == Fill("normal", inner**-0.5 * QUIET)
    assert real["model.layers.0.feed_forward.up_proj.weight"].values == Fill("normal", D**-0.5)
    assert real["model.embed_tokens.weight"].values == Fill("normal", 1.0)
    decay = real["model.layers.0.mamba.A_log"].values.astype(np.float32)
    assert decay.shape == (2 * D, 16) and -1 < decay.min() and decay.max() < math.log(16) + 1


def test_shards_are_indexed(tmp_path):
    total = write_checkpoint(tmp_path / "model", "mixtral-8x7b", tiny=True, shard_bytes=200_000, progress=False)
    files = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 3
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total and set(index["weight_map"].values()) == set(files)
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        mapped(checkpoint)
    one = random_checkpoint.file_tensors("mixtral-8x7b", checkpoint.config)["model.norm.weight"]
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        assert checkpoint.view("model.norm.weight").tobytes() == one.values.tobytes()


def test_what_cannot_be_written_is_refused(tmp_path, monkeypatch):
    target = tmp_path / "model"
    for arguments, message in (
        (("gpt-oss",), "unknown model 'gpt-oss': choose one of qwen3-30b-a3b"),
        (("mixtral-8x7b", 33), "layers=33: this model has 32 layers"),
        (("mixtral-8x7b", 0), "layers=0: this model has 32 layers"),
    ):
        with pytest.raises(ValueError, match=message):
            write_checkpoint(target, *arguments)
    with pytest.raises(ValueError, match="layers=2: a tiny model"):
        write_checkpoint(target, "mixtral-8x7b", 2, tiny=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3_000_000))
    with pytest.raises(OSError, match=r"0.0 GB are free, the checkpoint takes 93.4 GB: free space"):
        write_checkpoint(target, "mixtral-8x7b")
    assert not target.exists()
    target.mkdir()
    (target / "mine").write_text("kept")
    with pytest.raises(FileExistsError, match="is not empty: name another directory, or remove it"):
        write_checkpoint(target, "mixtral-8x7b", tiny=True)
    assert (target / "mine").read_text() == "kept"


def test_nothing_is_left_when_writing_fails(tmp_path, monkeypatch):
    def full(file, rest, position):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(random_checkpoint.os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(tmp_path / "model", "mixtral-8x7b", tiny=True)
    assert not (tmp_path / "model").exists()


def test_short_writes_are_continued(tmp_path, monkeypatch):
    pwrite = random_checkpoint.os.pwrite
    monkeypatch.setattr(random_checkpoint.os, "pwrite", lambda file, rest, at: pwrite(file, rest[:1000], at))
    write_checkpoint(tmp_path / "short", "deepseek-v3", tiny=True, progress=False)
    monkeypatch.undo()
    write_checkpoint(tmp_path / "whole", "deepseek-v3", tiny=True, progress=False)
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "short" / path.name).read_bytes()
