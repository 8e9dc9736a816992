"""Dense weights of quantised checkpoints that stay packed: which do, and that nothing but memory changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax import MoE, OffloadConfig
from moe_jax.checkpoint import Checkpoint
from moe_jax.conversion.rows import prepare
from moe_jax.engine.loading import read_parts
from moe_jax.errors import ConfigError
from moe_jax.layers.linear import Linear
from moe_jax.models.registry import packable
from pallas_kernels import _compat
from pallas_kernels.formats import FP8, INT4, MXFP4

# What is done to the dense weights. The queries of the tiny FP8 model end within a block, before its keys.
KEPT = {
    "qwen3_moe_fp8": {"fp8 as stored": 2, "fp8 -> float32": 2},
    "mixtral_gptq": {"int4 as stored": 4},
    "qwen3_moe_gptq": {"int4 as stored": 4},
    "qwen3_moe_awq": {"int4 as stored": 4},
    "qwen3_moe_ct": {"int4 as stored": 4},
}
PROMPT = [5, 9, 2, 40, 41, 7, 7, 12, 30]
COMMON = {"dtype": "float32", "cache_rate": 0.5, "max_batch": 2, "progress": False, "max_sequence_length": 64}


def parts_of(directory, **settings):
    with Checkpoint.open(directory) as files:
        return read_parts(files, OffloadConfig.parse({"dtype": "float32", **settings}), False)


@pytest.mark.parametrize("name", KEPT)
def test_linear_layers_stay_as_they_are(name, tiny):
    parts, decoded = parts_of(tiny(name), dense_weights="packed"), parts_of(tiny(name))
    assert parts.conversions == KEPT[name]
    nbytes = [sum(leaf.nbytes for leaf in jax.tree.leaves(found.params)) for found in (parts, decoded)]
    assert nbytes[0] < nbytes[1]
    attention = parts.params["layers"]["0"]["attn"]
    assert attention["out"]["weight"].dtype == np.uint32 and "weight_scale" in attention["out"]
    for name in ("embed", "lm_head", "norm"):
        if name in parts.params:
            np.testing.assert_array_equal(parts.params[name]["weight"], decoded.params[name]["weight"])


def test_what_others_read_or_no_kernel_takes_is_decoded(tiny):
    found = parts_of(tiny("deepseek_v3_fp8"), dense_weights="packed")
    assert set(found.conversions) == {"fp8 as stored", "fp8 -> float32"}
    assert sum(found.conversions.values()) == 18
    kv_up = found.params["layers"]["0"]["attn"]["kv_up"]
    assert set(kv_up) == {"weight"} and kv_up["weight"].dtype == np.float32
    assert not any("kv_up" in path or "lm_head" in path for path in packable(found.cfg))
    assert parts_of(tiny("qwen3_moe_gptq_actorder"), dense_weights="packed").conversions == {"int4 -> float32": 4}
    assert parts_of(tiny("mixtral"), dense_weights="packed").conversions == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", (*sorted(KEPT.keys() - {"mixtral_gptq"}), "deepseek_v3_fp8", "deepseek_v4_fp4"))
def test_logits_and_tokens_are_those_of_decoded_weights(name, tiny):
    """On the CPU the weights are decoded in the program: the same numbers, so the same sums but for their order."""
    found = {}
    for held in ("decoded", "packed"):
        with MoE(tiny(name), COMMON | {"dense_weights": held, "transport": "callback"}) as moe:
            logits = np.asarray(moe.forward(np.array([PROMPT])))
            found[held] = logits, list(map(int, moe.generate(np.array(PROMPT), 12, eos_token_id=[])))
            found[held] += (moe.stats()["memory"]["dense_bytes"],)
            assert ("as stored" in moe.stats()["dense_weights"]) == (held == "packed")
    assert np.abs(found["packed"][0] - found["decoded"][0]).max() < 1e-4
    assert found["packed"][1] == found["decoded"][1]
    assert found["packed"][2] < found["decoded"][2]


@pytest.mark.parametrize("form", (FP8(16), INT4(32, zeros=True), MXFP4()), ids=str)
@pytest.mark.parametrize("implementation", ("xla", "interpret"))
def test_a_packed_layer(form, implementation, monkeypatch):
    """Any number of rows, with bias and residual; through the kernel that a GPU runs, too."""
    monkeypatch.setattr(_compat, "default_implementation", lambda: implementation)
    layer = Linear(64, 48, jnp.float32, bias=True, std=0.5, rngs=nnx.Rngs(1))
    layer.bias[...] = jnp.arange(48.0)
    parts = form.encode(np.asarray(layer.weight[...]))
    layer.weight[...] = form.decode(parts, (48,), 64, jnp.float32)
    plain = nnx.clone(layer)
    layer.pack(form, {suffix: jnp.asarray(part) for suffix, part in parts.items()})
    monkeypatch.setattr("moe_jax.layers.linear.row_implementation", lambda rows: "xla")
    for shape in ((1, 1, 64), (2, 3, 64)):
        x = jax.random.normal(jax.random.key(0), shape)
        residual = jnp.ones((*shape[:-1], 48))
        for call in (lambda of, x=x, r=residual: of(x, residual=r), lambda of, x=x: of.swiglu(x)):
            wanted = np.asarray(call(plain))
            assert np.abs(np.asarray(call(layer)) - wanted).max() < 1e-5 * np.abs(wanted).max()
    kept = Linear(64, 48, jnp.float32, packs=False, std=0.5, rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match="cannot be held as"):
        kept.pack(form, parts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("deepseek_v3_fp8", "deepseek_v4_fp4"))
def test_two_sequences_in_bfloat16_on_a_cpu(name, tiny):
    """XLA's CPU backend refuses some products of bfloat16 with float32 results."""
    with MoE(tiny(name), COMMON | {"dtype": "bfloat16", "transport": "device"}) as moe:
        ids = moe.generate(np.array([PROMPT, PROMPT]), 6, eos_token_id=[])
    assert ids.shape == (2, len(PROMPT) + 6) and (ids[0] == ids[1]).all()


def test_a_prepared_checkpoint_has_none(tiny, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    prepare(tiny("mixtral"), "../rows", progress=False)  # orbax takes no path that leads up
    with MoE("../rows", COMMON) as moe:
        assert len(moe.generate(np.array(PROMPT), 2, eos_token_id=[])) == len(PROMPT) + 2
    with pytest.raises(ConfigError, match="dense_weights='packed': a prepared checkpoint holds decoded dense weights"):
        MoE(tmp_path / "rows", COMMON | {"dense_weights": "packed"})
