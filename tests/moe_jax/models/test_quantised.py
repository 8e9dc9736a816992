"""Quantised checkpoints: their values against the float model's, and whole models against transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models

from host_offload.store import ExpertStore
from moe_jax.checkpoint import Checkpoint
from moe_jax.config import OffloadConfig
from moe_jax.engine.loading import read_parts
from pallas_kernels.formats import FP8, INT4, MXFP4, Dense

# The format of the experts, and what was done to the dense weights.
FORMATS = {
    "deepseek_v3_fp8": (FP8(128), {"fp8 -> float32": 18}),
    "qwen3_moe_fp8": (FP8(128), {"fp8 -> float32": 4}),
    "mixtral_gptq": (INT4(32), {"int4 -> float32": 4}),
    "mixtral_awq": (INT4(32, zeros=True), {"int4 -> float32": 4}),
    "qwen3_moe_gptq": (INT4(32, zeros=True), {"int4 -> float32": 4}),
    "qwen3_moe_gptq_actorder": (INT4(32, order=True), {"int4 -> float32": 4}),
    "qwen3_moe_awq": (INT4(32, zeros=True), {"int4 -> float32": 4}),
    "qwen3_moe_ct": (INT4(32), {"int4 -> float32": 4}),
}
NAMES = tuple(FORMATS)
TOLERANCE = 1e-4  # logits have a standard deviation of about 2.5


def parts_of(directory, decoded):
    """(`Parts`, experts' weights in float32) of a checkpoint."""
    with Checkpoint.open(directory) as files:
        parts = read_parts(files, OffloadConfig.parse({"dtype": "float32"}), False)
        assert isinstance(parts.store, ExpertStore)
        return parts, decoded(parts.store, parts.experts, parts.cfg.hidden_size, parts.cfg.expert_width)


@pytest.mark.slow
@pytest.mark.parametrize("name", (*NAMES, "gpt_oss_mxfp4"))
def test_packed_tensors_hold_the_values_of_the_float_checkpoint(name, tiny, tmp_path, decoded_experts):
    form, conversions = FORMATS.get(name, (MXFP4(), {}))
    packed, experts = parts_of(tiny(name), decoded_experts)
    plain, values = parts_of(tiny_models.build(name, tmp_path, unpacked=True), decoded_experts)
    assert packed.experts.gate_up == packed.experts.down == form
    assert plain.experts.gate_up == plain.experts.down == Dense()
    assert packed.conversions == conversions and plain.conversions == {}
    assert packed.spec.row_bytes < 0.36 * plain.spec.row_bytes, "experts stay packed"
    assert experts.keys() == values.keys()
    for tensor, layers in experts.items():
        for mine, theirs in zip(layers, values[tensor], strict=True):
            np.testing.assert_array_equal(mine, theirs, err_msg=tensor)
    jax.tree.map(np.testing.assert_array_equal, packed.params, plain.params)


def test_scales_and_logs_at_another_compute_dtype(tiny, tmp_path, caplog):
    """Rows keep the float32 scales of FP8 in bfloat16, packed or in a directory of their own, and the log says what
    became of the dense weights."""
    settings = OffloadConfig.parse({"dtype": "bfloat16", "offload_path": str(tmp_path)})
    with Checkpoint.open(tiny("deepseek_v3_fp8")) as files, caplog.at_level("INFO", "moe_jax"):
        built, reopened = (read_parts(files, settings, False) for _ in range(2))
        straight = read_parts(files, settings.replace(offload_path=None), False)
        for name, (shape, dtype) in built.spec.tensors.items():
            assert dtype == (np.float32 if name.endswith("_scale") else np.uint32)
            rows = [np.zeros((built.spec.E, *shape), dtype) for _ in range(3)]
            for parts, out in zip((built, reopened, straight), rows, strict=True):
                parts.store.fill(1, name, out)
            assert rows[0].tobytes() == rows[1].tobytes() == rows[2].tobytes() and rows[0].any()
        for parts in (built, reopened):
            parts.store.close()
    assert {leaf.dtype for leaf in jax.tree.leaves(built.params)} == {np.dtype(jnp.bfloat16), np.dtype(np.float32)}
    assert built.conversions == {"fp8 -> bfloat16": 18}
    count = len(jax.tree.leaves(built.params))
    assert f"dense weights: fp8 -> bfloat16 (18 of {count} parameters)" in caplog.messages


@pytest.fixture(scope="module")
def models(load_tiny):
    """`models(name)`: that tiny model and one of the same shapes, whose compiled calls serve both."""
    first = {}

    def get(name):
        model = load_tiny(name)
        return model, first.setdefault(model.cfg, model)

    return get


def call(models, name, tokens, positions, live, kv, **static):
    model, compiled = models(name)
    arrays = (jnp.asarray(tokens, jnp.int32), jnp.asarray(positions, jnp.int32), jnp.asarray(live, bool))
    return compiled.jitted(model.params, model.slabs, *arrays, kv, **static)


def close(actual, wanted, what):
    difference = np.max(np.abs(np.asarray(actual, np.float64) - wanted))
    assert difference <= TOLERANCE, f"{what}: differs by {difference:.2e}"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_module_and_greedy_decode_equal_transformers(name, models, expected):
    (model, _), want = models(name), expected(name)
    ids, greedy = want["input_ids"], want["gen_ids"].ravel()
    T = ids.shape[1]
    kv = model.cache([T + len(greedy)])
    logits, kv, _, seen = call(models, name, ids, np.arange(T)[None], np.ones((1, T)), kv, capture=True)
    for i in range(model.cfg.num_hidden_layers + 1):
        close(seen[f"hidden/{i}"], want[f"hidden/{i}"], f"hidden/{i}")
    for i in range(model.cfg.num_hidden_layers):
        close(seen[f"attn/{i}"], want[f"attn/{i}"], f"attn/{i}")
        close(seen[f"mlp/{i}"], want[f"moe/{i}"], f"mlp/{i}")
    for i in model.cfg.moe_layers:
        np.testing.assert_array_equal(seen[f"router/{i}/ids"], want[f"router/{i}/indices"])
        close(seen[f"router/{i}/weights"], want[f"router/{i}/weights"], f"router/{i}/weights")
    close(logits, want["logits"], "logits")

    last = logits[0, -1]
    for step, token in enumerate(greedy):
        close(last, want["gen_logits"][step], f"step {step}")
        assert int(jnp.argmax(last)) == token
        logits, kv, _, _ = call(models, name, [[token]], [[T + step]], np.ones((1, 1)), kv)
        last = logits[0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_batch_of_unequal_prompts_equals_the_left_padded_batch(name, models, expected):
    (model, _), want = models(name), expected(name)
    mask = want["batch_attention_mask"].astype(bool)
    lengths = mask.sum(axis=1)
    T = mask.shape[1]
    live = np.arange(T)[None] < lengths[:, None]
    tokens = np.zeros_like(want["batch_input_ids"])
    for row in range(2):
        tokens[row, : lengths[row]] = want["batch_input_ids"][row, mask[row]]
    positions = np.broadcast_to(np.arange(T), live.shape)
    logits, _, _, _ = call(models, name, tokens, positions, live, model.cache([T, T]))
    for row in range(2):
        close(logits[row, : lengths[row]], want["batch_logits"][row, mask[row]], f"row {row}")
