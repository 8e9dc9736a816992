"""docs/families.md against the code: names, formats, the sizes that the real shapes give, and what is tested."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
import tiny_models

from moe_jax.checkpoint import Checkpoint, Quantization
from moe_jax.checkpoint.quantization import METHODS
from moe_jax.engine.loading import map_weights, read_model_config
from moe_jax.models.config import text_settings
from moe_jax.models.registry import FAMILIES, family_for
from pallas_kernels.formats import FP8, INT4, MXFP4, Dense

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "families.md").read_text()
FORMATS = {
    "bfloat16": Dense(),
    "float32": Dense(),
    "FP8": FP8(128),
    "MXFP4": MXFP4(),
    "AWQ, groups of 128": INT4(128, zeros=True),
    "GPTQ, groups of 128": INT4(128),
}


def table(heading: str) -> list[list[str]]:
    """Cells of the table under a heading, without its header."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip().strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.fixture(scope="module")
def released():
    """config.json of releases by name."""
    sys.path.insert(0, str(ROOT / "experiments"))
    try:
        from _released import CONFIGS
    finally:
        sys.path.pop(0)
    return CONFIGS


def row_bytes(cfg, form, dtype) -> int:
    """Bytes of an expert's row whose matrices are in the format `form`; `dtype` is that of what is not packed."""
    spec = dataclasses.replace(cfg.expert_spec(), gate_up=form, down=form)
    tensors = spec.row_tensors(cfg.expert_width, cfg.hidden_size).values()
    return sum(math.prod(shape) * (fixed or dtype).itemsize for shape, fixed in tensors)


def size_row(name: str, form: str, config: dict) -> list[str]:
    """The row of the table of sizes that the code gives."""
    cfg = family_for(config).config_cls.from_hf(config)
    dtype = jnp.dtype("float32" if form == "float32" else "bfloat16")
    row, count = row_bytes(cfg, FORMATS[form], dtype), len(cfg.moe_layers) * cfg.num_experts
    kv = f"{cfg.kv_bytes_per_token(dtype):,}"
    if source := cfg.source_bytes_per_token(dtype):
        kv += f"; of the source {source:,}"
    return [
        name,
        f"{len(cfg.moe_layers)} x {cfg.num_experts}, {cfg.num_experts_per_tok}",
        form,
        f"{row:,}",
        f"{row * count / 1e9:.1f} GB",
        kv,
        f"{cfg.state_bytes(dtype):,}",
    ]


def test_every_family_is_listed_with_all_its_names():
    listed = [set(names(row[1])) for row in table("Architectures")]
    assert listed == [{family.architecture, family.name, *family.aliases} for family in FAMILIES]


def test_every_quantisation_method_is_listed():
    methods = [method for row in table("Formats") for method in names(row[1])]
    assert sorted(methods) == sorted(METHODS)


def test_sizes_are_those_of_the_real_shapes(released):
    rows = table("Sizes")
    for row in rows:
        name, _, form, *_ = row
        assert row == size_row(name, form, released[name.lower()])
    assert {row[0].lower() for row in rows} == set(released)
    assert {family_for(released[row[0].lower()]) for row in rows} == set(FAMILIES)


def test_each_release_is_listed_in_its_own_format(released):
    """What its config.json says; other formats of the same model may follow."""
    first = {}
    for name, _, form, *_ in table("Sizes"):
        first.setdefault(name.lower(), form)
    for name, config in released.items():
        text, quantization = text_settings(config), Quantization.from_hf(config)
        if quantization is None:
            own = text.get("dtype") or text["torch_dtype"]
        else:
            own = "MXFP4" if "fp4" in (config.get("expert_dtype"), quantization.method[2:]) else "FP8"
        assert first[name] == own, name


# Computed apart from this code: bytes of all three (NLLB: two) matrices of an expert with their scales, and of keys and
# values, or latent and rotary key, over all layers.
@pytest.mark.parametrize(
    ("name", "expert", "kv"),
    (
        ("Mixtral-8x7B", 3 * 4096 * 14336 * 2, 32 * 2 * 8 * 128 * 2),
        ("Qwen3-30B-A3B", 3 * 2048 * 768 * 2, 48 * 2 * 4 * 128 * 2),
        ("DeepSeek-V3", 3 * 7168 * 2048 + 3 * 56 * 16 * 4, 61 * (512 + 64) * 2),
        ("DeepSeek-V4-Flash", 3 * 4096 * 2048 // 2 + 3 * 4096 * 2048 // 32, 21 * 320 + 20 * 8),
        ("Jamba-v0.1", 3 * 4096 * 14336 * 2, 4 * 2 * 8 * 128 * 2),
        ("Qwen3.5-35B-A3B", 3 * 2048 * 512 * 2, 10 * 2 * 2 * 256 * 2),
        ("NLLB-MoE-54B", (2 * 2048 * 8192 + 8192 + 2048) * 4, 24 * 2 * 16 * 128 * 4),
    ),
)
def test_sizes_by_hand(name, expert, kv):
    row = next(row for row in table("Sizes") if row[0] == name)
    assert (row[3], row[5].split(";")[0]) == (f"{expert:,}", f"{kv:,}")


@pytest.mark.parametrize(
    ("name", "form"),
    (
        ("qwen3_moe", Dense()),
        ("nllb_moe", Dense()),
        ("deepseek_v3_fp8", FP8(128)),
        ("deepseek_v4_fp4", MXFP4()),
        ("gpt_oss_mxfp4", MXFP4()),
        ("mixtral_awq", INT4(32, zeros=True)),
        ("mixtral_gptq", INT4(32)),
    ),
)
def test_formats_of_the_table_are_those_that_files_load_in(name, form, tiny):
    with Checkpoint.open(tiny(name)) as files:
        weights = map_weights(files, read_model_config(files))
    assert (weights.experts.gate_up, weights.experts.down) == (form, form)


def test_every_tiny_checkpoint_is_listed_with_its_family():
    family_names = {row[0]: set(names(row[1])) for row in table("Architectures")}
    rows = table("Tests")
    assert [row[0] for row in rows] == [row[0] for row in table("Architectures")]
    listed = [(name, row[0]) for row in rows for name in names(row[1])]
    assert sorted(name for name, _ in listed) == sorted(tiny_models.RECIPES)
    for name, family in listed:
        assert family_for(tiny_models.RECIPES[name].config).name in family_names[family], name
