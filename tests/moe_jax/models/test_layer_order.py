"""Layers run from the first to the last. With more than ten of them the order of their names as text is another."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import tiny_models
from flax import nnx

from moe_jax.engine.kv_cache import PagedKV
from moe_jax.models.registry import abstract_params, family_for

LAYERS = 12


def traced(recipe, run, **changes):
    """Numbers of the MoE layers in the order that `run(model, cfg, kv, experts)` calls them; nothing is computed."""
    config = {**tiny_models.RECIPES[recipe].config, **changes}
    cfg = family_for(config).config_cls.from_hf(config)
    graphdef, params = abstract_params(cfg, "float32")
    called = []

    def experts(layer, x, ids, weights, scores, live, token_ids, state):
        called.append(layer)
        return jnp.zeros_like(x), state

    def trace(params):
        kv = PagedKV.create(cfg.cache_layout(), 3, 8, 1, 2, jnp.float32)
        return run(nnx.merge(graphdef, params), cfg, kv, experts)

    jax.eval_shape(trace, params)
    return called


TOKENS, LIVE = jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4), bool)
POSITIONS = jnp.arange(4)[None]


def test_decoder():
    def run(model, cfg, kv, experts):
        seen = {}
        out = model(TOKENS, POSITIONS, LIVE, kv, experts, None, capture=seen)
        assert [name for name in seen if name.startswith("attn/")] == [f"attn/{i}" for i in range(LAYERS)]
        return out[0]

    assert traced("mixtral", run, num_hidden_layers=LAYERS) == list(range(LAYERS))


def test_both_stacks_of_an_encoder_decoder():
    def run(model, cfg, kv, experts):
        seen = {}
        kept, _ = model.encode(TOKENS, LIVE, jnp.int32(4), experts, None, capture=seen)
        kv = replace(kv, page_table=jnp.ones((1, 2), jnp.int32)).with_source(kept, jnp.asarray([4]))
        out = model(TOKENS, POSITIONS, LIVE, kv, experts, None, capture=seen)
        for stack in ("encoder", "decoder"):
            hidden = [name for name in seen if name.startswith(f"hidden/{stack}/")]
            assert hidden == [f"hidden/{stack}/{i}" for i in range(LAYERS + 1)]
        return out[0]

    sizes = dict(encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_sparse_step=1, decoder_sparse_step=1)
    assert traced("nllb_moe", run, **sizes) == list(range(2 * LAYERS))
