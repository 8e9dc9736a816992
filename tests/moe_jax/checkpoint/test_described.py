"""Rows from config.json alone are those of the files, in every format."""

import numpy as np
import pytest

from moe_jax.checkpoint import open_checkpoint
from moe_jax.checkpoint.described import described_experts, described_rows
from moe_jax.engine.loading import map_experts, read_model_config
from moe_jax.errors import CheckpointError

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


@pytest.mark.parametrize(
    "name",
    (
        "qwen3_moe",
        "nllb_moe",
        "gpt_oss_mxfp4",
        "deepseek_v4_fp4",
        "deepseek_v3_fp8",
        "mixtral_gptq",
        "qwen3_moe_gptq",
        "qwen3_moe_gptq_actorder",
        "mixtral_awq",
        "qwen3_moe_ct",
    ),
)
@pytest.mark.parametrize("compute", (F32, F16), ids=str)
def test_described_rows_are_those_of_the_files(name, compute, tiny):
    with open_checkpoint(tiny(name)) as files:
        cfg = read_model_config(files)
        experts, store, _ = map_experts(files, cfg, compute)
        found = described_rows(files.config, cfg, F32, compute)
        assert described_experts(files.config, cfg) == experts
    assert (found.L, found.E, found.row_bytes) == (store.spec.L, store.spec.E, store.spec.row_bytes)
    shapes, wanted = ({k: shape for k, (shape, _) in spec.tensors.items()} for spec in (found, store.spec))
    assert shapes == wanted


def test_one_group_a_row_and_a_width_that_does_not_fit(tiny):
    with open_checkpoint(tiny("qwen3_moe_gptq")) as files:
        cfg, config = read_model_config(files), files.config
    whole = config | {"quantization_config": config["quantization_config"] | {"group_size": -1}}
    spec = described_experts(whole, cfg)
    assert (spec.gate_up.group, spec.down.group) == (cfg.hidden_size, cfg.expert_width)
    odd = config | {"quantization_config": config["quantization_config"] | {"group_size": 48}}
    with pytest.raises(CheckpointError, match="quantization_config does not fit the experts: gate_up .* 48"):
        described_rows(odd, cfg, F32, F32)
