"""Prepared checkpoints: the same rows, parameters and tokens as the source's; experts in other formats; faults."""

import json
import os
import shutil
from collections import namedtuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moe_jax import MoE
from moe_jax.checkpoint import open_checkpoint, prepared
from moe_jax.conversion import Target, prepare, rows
from moe_jax.errors import CheckpointError
from pallas_kernels.formats import FP8, INT4, MXFP4, Dense

CONFIG = {"progress": False, "max_batch": 1, "max_sequence_length": 32, "page_size": 16, "decode_chunk": 4}
PROMPT = [[5, 9, 42, 17, 3]]
FORMATS = {"bf16": Dense(), "fp8": FP8(16), "int4": INT4(16), "mxfp4": MXFP4()}


def tokens(directory, **config):
    with MoE(directory, CONFIG | config) as moe:
        ids = moe.generate(PROMPT, max_new_tokens=6, eos_token_id=[], do_sample=False)
        if config["transport"] != "resident":
            moe.verify_slots()
        return ids.tolist(), moe.stats()["experts"]["format"]


LOSSLESS = ("mixtral_bf16_sharded", "deepseek_v3_fp8", "gpt_oss_mxfp4", "mixtral_awq", "dbrx", "nllb_moe")


@pytest.mark.parametrize("name", LOSSLESS)
def test_without_a_format_it_is_the_source(name, tiny, tmp_path, opened, assert_same):
    written, report = prepare(tiny(name), tmp_path / "new", progress=False)
    assert written == tmp_path / "new" and report is None
    assert_same(opened(written), opened(tiny(name)))
    assert json.loads((written / "config.json").read_text()) == json.loads((tiny(name) / "config.json").read_text())
    assert os.listdir(tmp_path) == ["new"]


def test_a_narrower_compute_dtype_rounds_as_it_rounds_the_source(tiny, tmp_path, opened, assert_same):
    written, _ = prepare(tiny("gpt_oss"), tmp_path / "new", progress=False)
    assert_same(opened(written, dtype="bfloat16"), opened(tiny("gpt_oss"), dtype="bfloat16"))


def test_bf16_of_bf16_changes_no_bit(tiny, tmp_path, opened, assert_same):
    written, report = prepare(tiny("mixtral_bf16_sharded"), tmp_path / "new", Target(Dense()), progress=False)
    assert_same(opened(written), opened(tiny("mixtral_bf16_sharded")))
    assert all(row["rms"] == row["max"] == 0 for row in report.rows())


TOKENS = (("qwen3_moe", "bf16"), ("qwen3_moe", "fp8"), ("gpt_oss", "int4"), ("deepseek_v3_fp8", "mxfp4"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), TOKENS)
def test_converted_experts_give_the_same_tokens_offloaded(name, form, tiny, tmp_path):
    written, report = prepare(tiny(name), tmp_path / "new", Target(FORMATS[form]), progress=False)
    ids, formats = tokens(written, transport="resident")
    assert set(formats.values()) == {FORMATS[form].name}
    assert tokens(written, transport="device", cache_rate=0.25)[0] == ids
    assert json.loads((written / "conversion_errors.json").read_text()) == {"format": form, "layers": report.rows()}


BOUND = {"bf16": 0.003, "fp8": 0.03, "int4": 0.12, "mxfp4": 0.14}  # rms, relative, of random weights


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ("gpt_oss", "deepseek_v3_fp8"))
def test_rows_are_the_formats_of_the_sources_values(name, form, tiny, tmp_path, opened):
    """Biases stay, and gate and up are converted each by itself; also of experts that were packed."""
    target = Target(FORMATS[form])
    written, report = prepare(tiny(name), tmp_path / "new", target, progress=False)
    (parts, ours), (source, theirs) = opened(written), opened(tiny(name))
    assert parts.experts.down == parts.experts.gate_up == target.format
    for place in ((0, 0), (parts.spec.L - 1, parts.spec.E - 1)):
        for weight in ("gate_up", "down"):
            given, found = (values(p, rows_[place], weight) for p, rows_ in ((source, theirs), (parts, ours)))
            halves = np.split(given, 2) if weight == "gate_up" else [given]
            wanted = [values_of(target, half) for half in halves]
            np.testing.assert_array_equal(found, np.concatenate(wanted))
            if source.experts.biases:
                np.testing.assert_array_equal(ours[place][f"{weight}_bias"], theirs[place][f"{weight}_bias"])
    lines = report.rows()
    assert [line["layer"] for line in lines] == list(source.cfg.moe_layers)
    assert all(0 < line["rms"] <= line["worst_expert_rms"] < BOUND[form] for line in lines)


def values(parts, row, weight):
    """The values of a row's weight in float32."""
    form = getattr(parts.experts, weight)
    D, F = parts.cfg.expert_row_shapes()["down"][0], parts.cfg.expert_width
    size, width = (2 * F, D) if weight == "gate_up" else (D, F)
    named = {suffix: row[weight + suffix] for suffix in form.suffixes}
    return np.asarray(form.decode(named, parts.experts.outs(weight, size), width, np.float32))


def values_of(target, w):
    return np.asarray(target.format.decode(target.encode(w), w.shape[:1], w.shape[1], np.float32))


# --------------------------------------------------------------------------------------------------------------- faults


@pytest.fixture(scope="module")
def written(tiny, tmp_path_factory):
    return prepare(tiny("mixtral"), tmp_path_factory.mktemp("prepared") / "model", progress=False)[0]


@pytest.fixture
def copy(written, tmp_path):
    return shutil.copytree(written, tmp_path / "copy")


def test_what_is_refused_before_anything_is_written(written, tiny, tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="exists already: name a directory that does not"):
        prepare(tiny("mixtral"), written)
    with pytest.raises(CheckpointError, match="is a prepared checkpoint already: convert the one that it was made of"):
        prepare(written, tmp_path / "new")
    with pytest.raises(CheckpointError, match="no form in int4: gate_up .* must be a multiple of 8 and of the group"):
        prepare(tiny("mixtral"), tmp_path / "new", Target(INT4(48)))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 900, 100))
    with pytest.raises(CheckpointError, match="the disk has 100 bytes left: free space"):
        prepare(tiny("mixtral"), tmp_path / "new", progress=False)
    assert os.listdir(tmp_path) == []


def test_weights_that_are_not_finite_leave_nothing_behind(tiny, tmp_path):
    source = shutil.copytree(tiny("mixtral"), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    name = next(name for name in tensors if "layers.1" in name and "experts.2.w2" in name)
    tensors[name] = tensors[name].copy()
    tensors[name][0, 0] = np.nan
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match="down of expert 2 in decoder layer 1: 1 of .* NaN or infinite"):
        prepare(source, tmp_path / "new", Target(MXFP4()), progress=False)
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize(
    "fault", (KeyboardInterrupt(), OSError(28, "No space left on device")), ids=("interrupt", "full")
)
def test_a_fault_leaves_nothing_behind(fault, tiny, tmp_path, monkeypatch):
    def stop(*args):
        raise fault

    monkeypatch.setattr(rows, "_params", stop)  # the layers are written by then
    with pytest.raises((KeyboardInterrupt, CheckpointError), match="free space and start again|^$"):
        prepare(tiny("mixtral"), tmp_path / "new", progress=False)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_recognised_through_orbax(tmp_path, monkeypatch):
    from orbax.checkpoint import v1 as ocp

    def full(*args):
        raise ValueError("RESOURCE_EXHAUSTED: Failed to write 7 bytes: No space left on device [os_error_code='28']")

    monkeypatch.setattr(ocp, "save", full)
    with pytest.raises(OSError, match="No space left"):
        prepared.save_arrays(tmp_path / "rows" / "0", {"down": np.zeros(3, np.float32)})


def test_values_that_were_changed_are_found(copy):
    header = json.loads((copy / "prepared.json").read_text())
    header["rows"][1]["gate_up"][1][3] += 1
    (copy / "prepared.json").write_text(json.dumps(header))
    changed = r"rows/1/.*gate_up.*: the values of expert 3, at byte \d+, are not .*convert"
    with pytest.raises(CheckpointError, match=changed):
        MoE(copy, CONFIG)


def test_rows_that_are_missing_are_named(copy):
    shutil.rmtree(copy / "rows" / "0")
    with pytest.raises(CheckpointError, match="rows/0.* cannot be read .*convert the checkpoint again"):
        MoE(copy, CONFIG)


def test_another_models_config_is_one_error(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_local_experts": 16, "vocab_size": 300}))
    with pytest.raises(CheckpointError) as error:
        MoE(copy, CONFIG)
    for text in ("8 experts", "of 16", "lm_head.weight", "config.json was changed after the conversion"):
        assert text in str(error.value)


@pytest.mark.parametrize("key", ("rows", "params_crc32", "params", "formats"))
def test_a_header_that_lost_something(key, copy):
    header = json.loads((copy / "prepared.json").read_text())
    header[key] = header[key][:-1] if isinstance(header[key], list) else {}
    (copy / "prepared.json").write_text(json.dumps(header))
    with pytest.raises(CheckpointError, match=r"prepared.json is damaged \(.*convert the checkpoint again"):
        MoE(copy, CONFIG)


@pytest.mark.parametrize("file", ("/etc/hostname", "rows/../../other"))
def test_a_header_that_names_files_elsewhere(file, copy):
    header = json.loads((copy / "prepared.json").read_text())
    header["rows"][0]["down"][0] = file
    (copy / "prepared.json").write_text(json.dumps(header))
    with pytest.raises(CheckpointError, match="prepared.json is damaged .*is outside the directory"):
        MoE(copy, CONFIG)


@pytest.mark.parametrize("content", ("", "{}", '{"format": "moe_jax prepared checkpoint", "version": 1}'))
def test_a_damaged_header(content, copy):
    (copy / "prepared.json").write_text(content)
    with pytest.raises(CheckpointError, match="prepared.json .*convert the checkpoint again"):
        MoE(copy, CONFIG)


def test_fingerprints_tell_conversions_apart(written, copy, tiny):
    def fingerprint(directory):
        with open_checkpoint(directory) as checkpoint:
            return checkpoint.fingerprint()

    assert fingerprint(written) == fingerprint(copy) != fingerprint(tiny("mixtral"))
    header = json.loads((copy / "prepared.json").read_text())
    header["rows"][0]["down"][1][0] += 1
    (copy / "prepared.json").write_text(json.dumps(header))
    assert fingerprint(written) != fingerprint(copy)


def test_rows_go_through_offload_path_too(written, tmp_path, opened, assert_same):
    packed, plain = (opened(written, **config) for config in ({"offload_path": str(tmp_path / "rows")}, {}))
    assert_same(packed, plain)


def test_other_programs_open_it_through_orbax(written, opened):
    from orbax.checkpoint import v1 as ocp

    parts, rows_ = opened(written)
    layer = ocp.load(written / "rows" / "1")
    for name, array in layer.items():
        for e in range(parts.spec.E):
            np.testing.assert_array_equal(array[e], rows_[1, e][name])
    norm = ocp.load(written / "params" / "0")["norm.weight"]
    np.testing.assert_array_equal(norm, parts.params["norm"]["weight"])


def test_parameters_that_were_changed_are_found(copy):
    header = json.loads((copy / "prepared.json").read_text())
    header["params_crc32"][0][0] += 1
    (copy / "prepared.json").write_text(json.dumps(header))
    with pytest.raises(CheckpointError, match=r"params/0: the values of .* are not those of prepared.json.*convert"):
        MoE(copy, CONFIG)


def test_a_file_that_was_cut_off(copy):
    file = json.loads((copy / "prepared.json").read_text())["rows"][0]["down"][0]
    with open(copy / file, "r+b") as rows_file:
        rows_file.truncate(100)
    with pytest.raises(CheckpointError, match="down.* cannot be read .*bytes early.*convert the checkpoint again"):
        MoE(copy, CONFIG)


def test_orbax_must_write_plain_files(tmp_path):
    (tmp_path / "down").mkdir()
    (tmp_path / "down" / "0.0").write_bytes(b"packed")
    with pytest.raises(CheckpointError, match="orbax-checkpoint .* does not write down as one plain file"):
        prepared._data_file(tmp_path, "down", 12)
