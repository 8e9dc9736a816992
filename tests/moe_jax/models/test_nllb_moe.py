"""NLLB-MoE module by module against transformers (mended, see tiny_recipes_nllb), its config and its weight table."""

from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import transformers
from flax import nnx

from moe_jax.checkpoint import Checkpoint
from moe_jax.config import OffloadConfig
from moe_jax.engine.kv_cache import PagedKV
from moe_jax.engine.loading import read_parts
from moe_jax.errors import CheckpointError
from moe_jax.models.nllb_moe.config import NllbMoeConfig
from moe_jax.models.nllb_moe.modeling import NllbMoeForConditionalGeneration
from moe_jax.models.registry import family_for

NAMES = ("nllb_moe", "nllb_moe_capacity")
TOLERANCE = 1e-4  # logits have a standard deviation of about 2.2


def close(actual, wanted, what):
    difference = np.max(np.abs(np.asarray(actual, np.float64) - wanted))
    assert difference <= TOLERANCE, f"{what}: differs by {difference:.2e}"


def rows_of(store):
    """name -> [L, E, *shape] of the row tensors."""
    rows = {}
    for name, (shape, dtype) in store.spec.tensors.items():
        rows[name] = np.empty((store.spec.L, store.spec.E, *shape), dtype)
        for layer in range(store.spec.L):
            store.fill(layer, name, rows[name][layer])
    return rows


def load(directory):
    """(config, graphdef, parameters, rows of all experts)."""
    with Checkpoint.open(directory) as checkpoint:
        parts = read_parts(checkpoint, OffloadConfig(dtype="float32"), False)
        return parts.cfg, parts.graphdef, parts.params, rows_of(parts.store)


def every_expert(rows):
    """The `experts` callable that runs every expert on every row; its state counts the calls."""

    def experts(layer, x, ids, weights, scores, live, token_ids, state):
        hidden = jnp.einsum("td,efd->tef", x, rows["gate_up"][layer]) + rows["gate_up_bias"][layer]
        outputs = jnp.einsum("tef,edf->ted", jax.nn.relu(hidden), rows["down"][layer]) + rows["down_bias"][layer]
        chosen = jnp.take_along_axis(outputs, ids[:, :, None], axis=1)
        return jnp.where(live[:, None], jnp.sum(chosen * weights[:, :, None], axis=1), 0), state + 1

    return experts


@pytest.mark.parametrize("name", NAMES)
def test_every_module_equals_transformers(name, tiny, expected):
    want = expected(name)
    cfg, graphdef, params, rows = load(tiny(name))
    S, T = want["input_ids"].shape[1], want["decoder_input_ids"].shape[1]

    @jax.jit
    def run(params, source, target):
        model, seen, experts = nnx.merge(graphdef, params), {}, every_expert(rows)
        live = jnp.arange(source.shape[1]) < S
        kept, calls = model.encode(source, live[None], jnp.int32(S), experts, jnp.int32(0), capture=seen)
        kv = PagedKV.create(cfg.cache_layout(), 5, 8, 1, 4, jnp.float32)
        kv = replace(kv, page_table=jnp.asarray([[3, 1, 4, 2]])).with_source(kept, jnp.asarray([S]))
        positions = jnp.arange(T)[None]
        hidden, kv, calls = model(target, positions, jnp.ones((1, T), bool), kv, experts, calls, capture=seen)
        return model.logits(hidden), kv.lengths, calls, seen

    source = np.pad(want["input_ids"], ((0, 0), (0, 2)), constant_values=9)  # two dead tokens
    logits, lengths, calls, seen = run(params, jnp.asarray(source), jnp.asarray(want["decoder_input_ids"]))
    for stack, count in (("encoder", S), ("decoder", T)):
        for i in range(5):
            close(seen[f"hidden/{stack}/{i}"][:, :count], want[f"hidden/{stack}/{i}"], f"{stack} hidden {i}")
        for i in (1, 3):
            combine = np.zeros((count, cfg.num_experts))
            ids, weights = (np.asarray(seen[f"router/{stack}/{i}/{key}"])[:count] for key in ("ids", "weights"))
            np.put_along_axis(combine, ids, weights, axis=1)
            close(combine, want[f"router/{stack}/{i}/combine"], f"{stack} router {i}")
    close(logits, want["logits"], "logits")
    assert int(calls) == 4 and lengths.tolist() == [T]


def test_a_padding_token_in_a_text_has_no_position(tiny):
    cfg, graphdef, params, _ = load(tiny("nllb_moe"))
    model = nnx.merge(graphdef, params)
    tokens = jnp.asarray([[9, cfg.pad_token_id, 9, 9]])
    x = np.asarray(model.embedded(tokens, jnp.asarray([[True, True, True, False]]), 0))[0]
    bare = np.asarray(model.embed(tokens))[0] * cfg.d_model**0.5
    np.testing.assert_allclose((x - bare)[:, 0], [np.sin(2), 0, np.sin(3), 0], atol=1e-5)
    later = np.asarray(model.embedded(tokens[:, :1], jnp.ones((1, 1), bool), jnp.asarray([[5]])))[0, 0] - bare[0]
    np.testing.assert_allclose(later[0], np.sin(7), atol=1e-5)


def test_modules_initialise_with_values_of_the_right_scale():
    cfg = NllbMoeConfig(vocab_size=64, d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, num_experts=4, init_std=0.5)
    model = NllbMoeForConditionalGeneration(cfg, jnp.bfloat16, rngs=nnx.Rngs(0))
    for stack in (model.encoder, model.decoder):
        for part in (stack.layers["0"].attn.out, stack.layers["0"].ffn.mlp.up, stack.layers["3"].ffn.router.gate):
            assert 0.3 < float(jnp.std(part.weight[...])) < 0.7
    assert (
        model.embed.weight.dtype == jnp.bfloat16
        and model.encoder.layers["3"].ffn.router.gate.weight.dtype == jnp.float32
    )
    assert model.lm_head is None
    untied = NllbMoeForConditionalGeneration(replace(cfg, tie_word_embeddings=False), jnp.float32, rngs=nnx.Rngs(0))
    assert untied.lm_head.weight.shape == (64, 32) and untied.logits(jnp.ones((2, 32))).shape == (2, 64)


def test_rows_of_the_narrower_stack_end_in_zeros(tiny):
    cfg, _, _, rows = load(tiny("nllb_moe"))
    assert cfg.expert_width == 96 and {name: array.shape[2:] for name, array in rows.items()} == {
        "gate_up": (96, 64),
        "gate_up_bias": (96,),
        "down": (64, 96),
        "down_bias": (64,),
    }
    file = safetensors.numpy.load_file(tiny("nllb_moe") / "model.safetensors")
    for layer, number in ((0, "encoder.layers.1"), (3, "decoder.layers.3")):
        expert = f"model.{number}.ffn.experts.expert_2"
        width = 96 if "encoder" in number else 80
        np.testing.assert_array_equal(rows["gate_up"][layer, 2, :width], file[f"{expert}.fc1.weight"])
        np.testing.assert_array_equal(rows["gate_up_bias"][layer, 2, :width], file[f"{expert}.fc1.bias"])
        np.testing.assert_array_equal(rows["down"][layer, 2, :, :width], file[f"{expert}.fc2.weight"])
        np.testing.assert_array_equal(rows["down_bias"][layer, 2], file[f"{expert}.fc2.bias"])
    for name, cut in (
        ("gate_up", np.s_[2:, :, 80:]),
        ("gate_up_bias", np.s_[2:, :, 80:]),
        ("down", np.s_[2:, ..., 80:]),
    ):
        assert not rows[name][cut].any(), name


# ---------------------------------------------------------------------------------------------- files


def rewritten(directory, folder, **changes):
    """A copy of a tiny checkpoint with tensors added or (None) taken away."""
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    for name, value in changes.items():
        tensors[name.replace("__", ".")] = value
    folder.mkdir()
    (folder / "config.json").write_bytes((directory / "config.json").read_bytes())
    safetensors.numpy.save_file({n: v for n, v in tensors.items() if v is not None}, folder / "model.safetensors")
    return folder


def test_duplicates_of_the_shared_embedding_may_be_in_the_file(tiny, tmp_path):
    shared = safetensors.numpy.load_file(tiny("nllb_moe") / "model.safetensors")["model.shared.weight"]
    extra = {"model__encoder__embed_tokens__weight": shared, "model__decoder__embed_tokens__weight": shared.copy()}
    extra |= {
        "lm_head__weight": shared.copy(),
        "model__decoder__embed_positions__weights": np.zeros((4, 64), np.float32),
    }
    load(rewritten(tiny("nllb_moe"), tmp_path / "same", **extra))
    extra["model__decoder__embed_tokens__weight"] = shared + 1
    with pytest.raises(CheckpointError, match="model.decoder.embed_tokens.weight differs from model.shared.weight"):
        load(rewritten(tiny("nllb_moe"), tmp_path / "other", **extra))


def test_missing_tensors_are_listed_together(tiny, tmp_path):
    gone = (
        "model.encoder.layers.1.ffn.experts.expert_0.fc1.bias",
        "model.decoder.layers.0.cross_attention.k_proj.weight",
    )
    broken = rewritten(tiny("nllb_moe"), tmp_path / "broken", **{name.replace(".", "__"): None for name in gone})
    with pytest.raises(CheckpointError) as raised:
        load(broken)
    message = str(raised.value)
    assert "gate_up_bias of expert 0 in decoder layer 1" in message and "decoder.layers.0.cross.kv.weight" in message


# ---------------------------------------------------------------------------------------------- config


def test_defaults_are_those_of_transformers():
    theirs, ours = transformers.NllbMoeConfig(), NllbMoeConfig.from_hf({})
    for field in (field.name for field in fields(ours)):
        assert getattr(ours, field) == getattr(theirs, field), field
    saved = transformers.NllbMoeConfig(d_model=64, encoder_layers=6, num_experts=8, router_bias=True).to_dict()
    family = family_for(saved)
    cfg = family.config_cls.from_hf(saved)
    assert cfg == NllbMoeConfig(d_model=64, encoder_layers=6, num_experts=8, router_bias=True)
    assert family_for({"architectures": ["NllbMoeForConditionalGeneration"]}) is family


def test_the_released_model():
    cfg = NllbMoeConfig.from_hf(
        {
            "vocab_size": 256206,
            "d_model": 2048,
            "encoder_layers": 24,
            "decoder_layers": 24,
            "encoder_ffn_dim": 8192,
            "decoder_ffn_dim": 8192,
        }
    )
    assert cfg.moe_layers == (3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47)
    assert cfg.encoder_moe_layers == 6 and cfg.num_experts == 128 and cfg.num_experts_per_tok == 2
    numbers = sum(int(np.prod(shape)) for shape in cfg.expert_row_shapes().values())
    assert 4 * numbers == 134_258_688, "bytes of an expert in fp32"
    assert cfg.kv_bytes_per_token(jnp.bfloat16) == cfg.source_bytes_per_token(jnp.bfloat16) == 196_608
    assert cfg.state_bytes(jnp.bfloat16) == 0 and cfg.head_dim == 128


@pytest.mark.parametrize(
    ("field", "value"),
    (
        ("activation_function", "gelu"),
        ("second_expert_policy", "sampling"),
        ("second_expert_policy", "random"),
        ("router_dtype", "bfloat16"),
        ("quantization_config", {"quant_method": "gptq"}),
        ("d_model", 66),
        ("d_model", 2),
        ("decoder_attention_heads", 5),
        ("encoder_sparse_step", 0),
        ("encoder_sparse_step", 13),
        ("num_experts", 1),
        ("vocab_size", "many"),
        ("pad_token_id", None),
        ("decoder_start_token_id", 128112),
        ("moe_eval_capacity_token_fraction", 0),
        ("moe_eval_capacity_token_fraction", -1.0),
        ("moe_token_dropout", 1.0),
        ("router_bias", "no"),
        ("scale_embedding", 1),
    ),
)
def test_a_bad_field_is_named(field, value):
    with pytest.raises(CheckpointError, match=f"config.json: (encoder_|decoder_)?.*{field}"):
        NllbMoeConfig.from_hf({field: value})


def test_padding_may_not_take_room():
    with pytest.raises(CheckpointError, match="router_ignore_padding_tokens = True"):
        NllbMoeConfig.from_hf({"router_ignore_padding_tokens": True, "moe_eval_capacity_token_fraction": 0.5})
    NllbMoeConfig.from_hf({"router_ignore_padding_tokens": True})  # with room for all it makes no difference
