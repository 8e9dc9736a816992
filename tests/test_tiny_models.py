"""The tiny checkpoints are what the recorded outputs were computed from, and the outputs agree with themselves."""

from __future__ import annotations

import json
import sys

import ml_dtypes
import numpy as np
import pytest
import safetensors
import tiny_models
from tiny_models import RECIPES

NAMES = list(RECIPES)
ENCODER_DECODERS = [name for name in NAMES if RECIPES[name].config.get("is_encoder_decoder")]
DECODERS = [name for name in NAMES if name not in ENCODER_DECODERS]
WITH_MODULES = [name for name in DECODERS if RECIPES[name].modules]
FP8 = ml_dtypes.float8_e4m3fn
DTYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": FP8,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "U8": np.uint8,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
}
# What quantised checkpoints hold beside tensors of the recipe's dtype.
PACKED = {
    "gpt_oss_mxfp4": {np.uint8},
    "deepseek_v4": {np.int64},  # the table of hash routers
    "deepseek_v4_fp4": {FP8, ml_dtypes.float8_e8m0fnu, np.int8, np.int64},
    "deepseek_v3_fp8": {FP8},
    "qwen3_moe_fp8": {FP8, ml_dtypes.bfloat16},
    "qwen3_moe_ct": {np.int32, np.int64, ml_dtypes.bfloat16},
    **dict.fromkeys(("mixtral_gptq", "qwen3_moe_gptq", "qwen3_moe_gptq_actorder"), {np.int32, np.float16}),
    **dict.fromkeys(("mixtral_awq", "qwen3_moe_awq"), {np.int32, np.float16}),
}


def read_tensors(directory) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint directory, read without the code under test."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        for name, entry in safetensors.deserialize(path.read_bytes()):
            assert name not in tensors, f"{name} is in two files"
            tensors[name] = np.frombuffer(entry["data"], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def fp32(tensors, name):
    return tensors[name].astype(np.float32)


def layers_of(config) -> int:
    return config.get("num_hidden_layers") or config["n_layers"]


@pytest.mark.parametrize("name", NAMES)
def test_built_files_hold_the_weights_the_outputs_were_computed_from(name, tiny, expected):
    tensors = read_tensors(tiny(name))
    # If this fails while --check passes, NumPy draws other random numbers: run `tests/tiny_models.py --write`.
    assert tiny_models.fingerprint(tensors) == expected(name)["weights_crc32"]
    packed = set(map(np.dtype, PACKED.get(name, ())))
    assert {array.dtype for array in tensors.values()} == {np.dtype(RECIPES[name].dtype)} | packed


@pytest.mark.parametrize("name", WITH_MODULES)
def test_embedding_and_head_of_the_file_give_first_and_last_recorded_array(name, tiny, expected):
    tensors, outputs = read_tensors(tiny(name)), expected(name)
    embeddings = [key for key in tensors if key.endswith(("embed_tokens.weight", "wte.weight"))]
    (embedding_name,) = (key for key in embeddings if ".layers." not in key)  # V3's further layer has its own
    embedding = fp32(tensors, embedding_name)
    heads = [key for key in tensors if key in ("lm_head.weight", "head.weight")]
    assert RECIPES[name].text_config["tie_word_embeddings"] == (not heads)
    head = fp32(tensors, heads[0]) if heads else embedding
    last = max(int(key.split("/")[1]) for key in outputs if key.startswith("hidden/"))
    assert last == layers_of(RECIPES[name].text_config)
    first = outputs["hidden/0"]
    streams = [first] if first.ndim == 3 else np.moveaxis(first, 2, 0)
    for stream in streams:
        np.testing.assert_array_equal(stream, embedding[outputs["input_ids"]])
    np.testing.assert_allclose(outputs[f"hidden/{last}"] @ head.T, outputs["logits"], atol=2e-5)


@pytest.mark.parametrize("name", DECODERS)
def test_recorded_arrays_agree_with_each_other(name, expected):
    config, length, outputs = RECIPES[name].text_config, RECIPES[name].prompt_length, expected(name)
    layers = layers_of(config)
    chosen = config.get("num_experts_per_tok") or config["ffn_config"]["moe_top_k"]
    assert outputs["logits"].shape == (1, length, config["vocab_size"])
    assert outputs["batch_logits"].shape == (2, length, config["vocab_size"])
    assert outputs["gen_ids"].shape == (1, tiny_models.NEW_TOKENS)
    np.testing.assert_array_equal(outputs["gen_logits"].argmax(-1), outputs["gen_ids"][0])
    np.testing.assert_allclose(outputs["gen_logits"][0], outputs["logits"][0, -1], atol=1e-4)
    assert tiny_models.greedy_margin(outputs) >= tiny_models.MIN_MARGIN
    one_stream = RECIPES[name].modules and outputs["hidden/0"].ndim == 3
    for i in range(layers - 1 if one_stream else 0):  # the last hidden state has been through the final norm
        after = outputs[f"hidden/{i}"] + outputs[f"attn/{i}"] + outputs[f"moe/{i}"]
        np.testing.assert_allclose(after, outputs[f"hidden/{i + 1}"], atol=1e-5)
    for i in range(layers):
        if f"router/{i}/weights" in outputs:
            indices, weights = outputs[f"router/{i}/indices"], outputs[f"router/{i}/weights"]
            assert indices.shape == weights.shape == (length, chosen)
            assert (np.diff(weights) <= 0).all()
            assert all(len(set(row)) == chosen for row in indices.tolist())
            if config.get("norm_topk_prob", config["model_type"] in ("mixtral", "qwen3_5_moe_text")):
                np.testing.assert_allclose(weights.sum(-1), config.get("routed_scaling_factor", 1), atol=1e-6)


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_recorded_arrays_of_an_encoder_decoder_agree_with_file_and_each_other(name, tiny, expected):
    tensors, config, outputs = read_tensors(tiny(name)), RECIPES[name].config, expected(name)
    shared = tensors["model.shared.weight"]
    assert not [key for key in tensors if "embed" in key or "lm_head" in key], "all three are the shared tensor"
    last = outputs[f"hidden/decoder/{config['decoder_layers']}"]
    np.testing.assert_allclose(last @ shared.T, outputs["logits"], atol=2e-5)
    # Positions begin at 2, past that of the padding token: frequency 1 gives sine and cosine of 2, 3, ...
    positional = outputs["hidden/encoder/0"] - shared[outputs["input_ids"]] * config["d_model"] ** 0.5
    np.testing.assert_allclose(positional[0, :, 0], np.sin(2 + np.arange(positional.shape[1])), atol=1e-5)
    assert outputs["gen_ids"].shape == (1, tiny_models.NEW_TOKENS)
    np.testing.assert_array_equal(outputs["gen_logits"].argmax(-1), outputs["gen_ids"][0, 1:])
    assert tiny_models.greedy_margin(outputs) >= tiny_models.MIN_MARGIN
    rows, width = outputs["input_ids"].size, outputs["decoder_input_ids"].size
    for stack, count in (("encoder", rows), ("decoder", width)):
        for layer in (1, 3):
            combine = outputs[f"router/{stack}/{layer}/combine"]
            assert combine.shape == (count, config["num_experts"])
            uses, fraction = (combine > 0).sum(0), config["moe_eval_capacity_token_fraction"]
            assert uses.max() <= np.ceil(fraction * count) and uses.sum() <= 2 * count
            assert (uses.sum() < 2 * count) == (fraction < 1), "tokens are dropped where the capacity is small"
            assert combine.sum(-1).max() <= 0.8 + 1e-6


def test_qwen3_layers_are_sparse_by_step_and_not_by_list(expected):
    sparse = {key.split("/")[1] for key in expected("qwen3_moe") if key.startswith("router/")}
    assert sparse == {"1", "5"}


def test_in_memory_names_hold_the_same_weights_stacked(tiny):
    released, stacked = read_tensors(tiny("mixtral")), read_tensors(tiny("mixtral_v5keys"))
    for layer in range(3):
        block = f"model.layers.{layer}.block_sparse_moe.experts"
        for e in range(8):
            gate_up = np.concatenate([released[f"{block}.{e}.w1.weight"], released[f"{block}.{e}.w3.weight"]])
            np.testing.assert_array_equal(stacked[f"model.layers.{layer}.mlp.experts.gate_up_proj"][e], gate_up)
            np.testing.assert_array_equal(
                stacked[f"model.layers.{layer}.mlp.experts.down_proj"][e], released[f"{block}.{e}.w2.weight"]
            )


def test_packed_weights_are_the_float_weights_that_the_oracle_loads(tiny, tmp_path):
    name = "gpt_oss_mxfp4"
    packed, plain = read_tensors(tiny(name)), read_tensors(tiny_models.build(name, tmp_path, unpacked=True))
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    blocks = [key.removesuffix("_blocks") for key in packed if key.endswith("_blocks")]
    assert len(blocks) == 8 and set(packed) - set(plain) == {
        f"{b}_{part}" for b in blocks for part in ("blocks", "scales")
    }
    for base in blocks:
        codes = np.stack([packed[f"{base}_blocks"] & 15, packed[f"{base}_blocks"] >> 4], axis=-1)
        signed = np.where(codes > 7, -1, 1) * magnitudes[codes & 7]  # [E, out, in / 32, 16, 2]
        scale = 2.0 ** (packed[f"{base}_scales"].astype(np.float64) - 127)
        values = (signed * scale[..., None, None]).reshape(*scale.shape[:2], -1)
        np.testing.assert_array_equal(values.swapaxes(1, 2), plain[base])
    for key in set(packed) & set(plain):
        np.testing.assert_array_equal(packed[key], plain[key])


def test_shards_are_listed_by_the_index_and_stay_under_the_limit(tiny):
    directory = tiny("mixtral_bf16_sharded")
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) > 2 and {f.name for f in files} == set(index["weight_map"].values())
    assert set(index["weight_map"]) == set(read_tensors(directory))
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in read_tensors(directory).values())
    header_allowance = 10_000
    assert all(f.stat().st_size < RECIPES["mixtral_bf16_sharded"].shard_bytes + header_allowance for f in files)


@pytest.mark.parametrize("name", NAMES)
def test_transformers_reads_the_config(name, tiny):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(tiny(name))
    assert config.model_type == RECIPES[name].config["model_type"]
    config, written = config.get_text_config(decoder=True), RECIPES[name].text_config
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    counts = {getattr(config, key, None) or written[key] for key in names if key in written}
    assert counts == {written[key] for key in names if key in written}
    if "rope_theta" in written or "rope_parameters" in written:  # Jamba has no positions
        theta = written["rope_theta"] if "rope_theta" in written else written["rope_parameters"]["rope_theta"]
        read = config.rope_parameters.get("main", config.rope_parameters)  # DeepSeek-V4 has two
        assert read["rope_theta"] == theta


def test_build_is_repeatable_and_needs_no_torch(tmp_path):
    first, second = (tiny_models.build("mixtral_swa_tied", tmp_path / side) for side in "ab")
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()
    assert "torch" not in sys.modules


def test_unknown_name_says_which_names_exist(tmp_path, capsys):
    with pytest.raises(ValueError, match="mixtrl.*choose one of.*mixtral, "):
        tiny_models.build("mixtrl", tmp_path)
    with pytest.raises(SystemExit):
        tiny_models.main(["--check", "mixtrl"])
    assert "mixtrl" in capsys.readouterr().err


def test_list_names_every_recipe(capsys):
    assert tiny_models.main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in NAMES)


def _shifted(outputs):
    return outputs | {"logits": outputs["logits"] + np.float32(1e-3)}


def _not_a_number(outputs):
    return outputs | {"logits": np.full_like(outputs["logits"], np.nan)}


def _other_token(outputs):
    return outputs | {"gen_ids": outputs["gen_ids"] + 1}


def _array_missing(outputs):
    return {key: value for key, value in outputs.items() if key != "attn/0"}


def _other_shape(outputs):
    return outputs | {"logits": outputs["logits"][:, :-1]}


@pytest.mark.parametrize("change", [_shifted, _not_a_number, _other_token, _array_missing, _other_shape])
def test_check_fails_on_any_difference(change, expected, monkeypatch, capsys):
    monkeypatch.setattr(tiny_models, "reference_outputs", lambda name, directory: change(expected(name)))
    assert tiny_models.main(["--check", "mixtral_swa_tied"]) == 1
    assert "DIFFERS" in capsys.readouterr().out


def test_check_passes_on_equal_outputs(expected, monkeypatch, capsys):
    monkeypatch.setattr(tiny_models, "reference_outputs", lambda name, directory: expected(name))
    assert tiny_models.main(["--check", "mixtral_swa_tied"]) == 0
    assert "equal" in capsys.readouterr().out
