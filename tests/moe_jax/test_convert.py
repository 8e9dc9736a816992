"""`python -m moe_jax.convert`: what its options mean, and errors of one line."""

import json
import re
import shutil

import pytest
import torch_files
from typer.testing import CliRunner

from moe_jax import convert
from moe_jax.checkpoint import Checkpoint, PreparedCheckpoint
from pallas_kernels.formats import FP8, INT4, MXFP4


def run(*args):
    return CliRunner().invoke(convert.app, [str(arg) for arg in args])


@pytest.mark.parametrize(
    ("options", "form"),
    (
        (("--format", "fp8", "--group-size", "16"), FP8(16)),
        (("--format", "int4", "--group-size", "16"), INT4(16)),
        (("--format", "mxfp4"), MXFP4()),
    ),
)
def test_rows_with_their_errors(options, form, tiny, tmp_path):
    result = run(tiny("qwen3_moe"), tmp_path / "new", *options)
    assert result.exit_code == 0, result.output
    with PreparedCheckpoint.open(tmp_path / "new") as written:
        assert written.gate_up == written.down == form
    lines = json.loads((tmp_path / "new" / "conversion_errors.json").read_text())["layers"]
    for line in lines:
        assert f"{100 * line['rms']:.3f} %" in result.output
    assert f"wrote {tmp_path / 'new'}" in result.output.replace("\n", "")


def test_without_a_format_rows_stay_as_they_are(tiny, tmp_path):
    result = run(tiny("qwen3_moe_ct"), tmp_path / "new")
    assert result.exit_code == 0 and "relative errors" not in result.output
    with PreparedCheckpoint.open(tmp_path / "new") as written:
        assert written.down.name == "int4"


def test_hugging_face_layout(tiny, tmp_path):
    options = ("--format", "int4", "--group-size", "16", "--layout", "safetensors")
    assert run(tiny("qwen3_moe"), tmp_path / "new", *options).exit_code == 0
    with Checkpoint.open(tmp_path / "new") as written:
        assert written.config["quantization_config"]["quant_method"] == "compressed-tensors"


@pytest.mark.parametrize(
    ("options", "reason"),
    (
        (("--group-size", "64"), "--group-size 64: only --format fp8 and int4 have one"),
        (("--format", "mxfp4", "--group-size", "64"), "only --format fp8 and int4 have one"),
        (("--layout", "safetensors"), "is in safetensors already: name a --format, or take --layout rows"),
        (("--format", "int4"), "must be a multiple of 8 and of the group, 128; name another --group-size"),
    ),
)
def test_options_that_do_not_fit(options, reason, tiny, tmp_path):
    result = run(tiny("qwen3_moe"), tmp_path / "new", *options)
    assert result.exit_code == 1 and not (tmp_path / "new").exists()
    assert result.stderr.startswith("error: ") and reason in result.stderr and "Traceback" not in result.output


def test_a_source_that_is_not_there(tmp_path):
    result = run(tmp_path / "nothing", tmp_path / "new")
    assert result.exit_code == 1 and "no such directory" in result.stderr


def test_pickled_weights_become_safetensors_first(tmp_path):
    source = tmp_path / "old"
    source.mkdir()
    shutil.copy(torch_files.REAL, source / "pytorch_model.bin")
    (source / "config.json").write_text("{}")
    for options in (("--format", "int4"), ("--layout", "rows")):
        result = run(source, tmp_path / "new", *options)
        assert result.exit_code == 1 and "convert it to safetensors first, without --format" in result.stderr
    assert run(source, tmp_path / "new").exit_code == 0
    assert (tmp_path / "new" / "model.safetensors").is_file()


def test_an_interrupt_says_what_there_is(tiny, tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "prepare", interrupted)
    result = run(tiny("qwen3_moe"), tmp_path / "new")
    assert result.exit_code == 130 and result.stderr == f"interrupted: {tmp_path / 'new'} was not written\n"


def test_help_teaches():
    text = re.sub(r"\x1b\[[0-9;]*m", "", run("--help").output)
    for word in ("Examples:", "--format", "--layout", "--group-size", "bf16", "fp8", "int4", "mxfp4"):
        assert word in text
