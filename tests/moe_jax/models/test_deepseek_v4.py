"""DeepSeek-V4: both styles of config, all styles of names, cache sizes, and the released format offloaded."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from tiny_recipes_deepseek_v4 import RECIPES, released_layout, saved_layout

from moe_jax import MoE
from moe_jax.checkpoint.mapping import ExpertRule, Ignore
from moe_jax.errors import CheckpointError
from moe_jax.layers.compressed_attention import Compression
from moe_jax.layers.rope import Rope, Yarn
from moe_jax.models.deepseek_v4.config import DeepseekV4Config
from moe_jax.models.deepseek_v4.params import WEIGHT_TABLE
from moe_jax.models.registry import family_for, targets
from pallas_kernels.expert_ffn import ExpertSpec

TOLERANCE = 1e-4  # logits have a standard deviation of about 2.5
SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
# DeepSeek-V4-Flash's config.json, without what every family has. It has 43 layers and one that predicts a second token.
FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "num_hash_layers": 3,
    "qk_rope_head_dim": 64,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": YARN,
    "topk_method": "noaux_tc",
    "scoring_func": "sqrtsoftplus",
    "num_nextn_predict_layers": 1,
    "num_key_value_heads": 1,
    "expert_dtype": "fp4",
}


def test_released_config():
    cfg = family_for(FLASH).config_cls.from_hf(FLASH)
    assert (cfg.hidden_size, cfg.num_hidden_layers, cfg.num_experts, cfg.num_experts_per_tok) == (4096, 43, 256, 6)
    assert cfg.layer_types == (SLIDING, SLIDING, *(SPARSE, HEAVY) * 20, SPARSE)
    assert cfg.mlp_layer_types == ("hash_moe",) * 3 + ("moe",) * 40
    assert cfg.rope(0) == Rope(64, 1e4) and cfg.rope(2) == cfg.rope(3)
    assert cfg.rope(2) == Rope(64, 160000.0, Yarn(16, 65536, 32, 1, attention_factor=1.0))
    assert [cfg.compression(i) for i in (1, 2, 3)] == [None, Compression(4, (64, 128, 512)), Compression(128)]
    assert cfg.moe_layers == tuple(range(43)) and cfg.expert_width == cfg.shared_width == 2048
    assert cfg.expert_spec() == ExpertSpec("clamped_silu", limit=10.0)
    assert cfg.attention_sinks and not cfg.attention_kernel and cfg.window == 128


def test_cache_sizes_of_the_release():
    """Entries in pages; the window of 127 tokens and the tokens of windows that are still open as states."""
    cfg = DeepseekV4Config.from_hf(FLASH)
    assert cfg.kv_bytes_per_token(jnp.bfloat16) == 21 * (512 + 128) * 2 // 4 + 20 * 512 * 2 // 128 == 6880
    # In pages of 64 tokens an entry of 128 tokens takes a place in two pages.
    assert cfg.kv_page_bytes(64, jnp.bfloat16) == 64 * 21 * (512 + 128) * 2 // 4 + 20 * 512 * 2
    assert cfg.kv_page_bytes(128, jnp.bfloat16) == 128 * 6880
    window = 43 * 127 * 512 * 2
    sparse, heavy = 21 * 7 * (2048 + 512) * 2, 20 * 127 * 1024 * 2  # kv and gate
    assert cfg.state_bytes(jnp.bfloat16) == window + sparse + heavy


def test_defaults_are_those_of_transformers():
    want, cfg = transformers.DeepseekV4Config(), DeepseekV4Config.from_hf({})
    assert list(cfg.layer_types) == want.layer_types and list(cfg.mlp_layer_types) == want.mlp_layer_types
    assert {SPARSE: cfg.sparse_rate, HEAVY: cfg.heavy_rate} == want.compress_rates
    assert cfg.qk_rope_head_dim == want.qk_rope_head_dim and cfg.num_experts == want.n_routed_experts
    for field in (
        *("vocab_size", "hidden_size", "moe_intermediate_size", "num_attention_heads", "head_dim", "q_lora_rank"),
        *("num_experts_per_tok", "routed_scaling_factor", "swiglu_limit", "sliding_window", "o_groups", "o_lora_rank"),
        *("index_n_heads", "index_head_dim", "index_topk", "hc_mult", "hc_sinkhorn_iters", "hc_eps", "rms_norm_eps"),
        *("max_position_embeddings", "rope_theta", "compress_rope_theta", "initializer_range", "tie_word_embeddings"),
    ):
        assert getattr(cfg, field) == getattr(want, field), field


def test_a_config_that_transformers_saves_reads_back_as_the_released_one():
    saved = transformers.DeepseekV4Config(**{k: v for k, v in FLASH.items() if k != "expert_dtype"}).to_dict()
    assert "compress_ratios" not in saved and "main" in saved["rope_parameters"]
    assert DeepseekV4Config.from_hf(saved) == DeepseekV4Config.from_hf(FLASH)


SMALL = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_hash_layers": 1}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"compress_ratios": [0, 4, 2]},
            r"compress_ratios = \[0, 4, 2\]: must hold one of 0, 4, 128 for each of the 3",
        ),
        ({"compress_ratios": [0, 4]}, "compress_ratios = .*each of the 3 layers"),
        ({"compress_ratios": 4}, "compress_ratios = 4: must be a list"),
        ({"compress_ratios": [0, 0, 0]}, "layer_types = .*at least one layer must be"),
        ({"layer_types": [SLIDING, SPARSE, SPARSE]}, "compress_ratios = .*disagrees with layer_types"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types = .*must hold one of 'sliding_attention'"),
        ({"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types = .*'hash_moe', 'moe'"),
        ({"num_hash_layers": -1}, "num_hash_layers = -1: must be an integer of at least 0"),
        ({"compress_rates": {SPARSE: 4, "other": 3}}, "compress_rates = .*must be an object with"),
        ({"compress_rates": {SPARSE: 0}}, f"compress_rates.{SPARSE} = 0: must be an integer of at least 1"),
        ({"compress_rates": {HEAVY: 96}}, f"compress_rates.{HEAVY} = 96: must be a power of two"),
        ({"kv_source_layer_ids": [2, 8]}, r"kv_source_layer_ids = \[2, 8\]: not part of DeepSeek-V4; .*V4\.1"),
        ({"engram_layer_ids": [1]}, r"engram_layer_ids = \[1\]: not part of"),
        ({"text_config": {}}, "text_config = {}: not part of"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid': not supported"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2: not supported"),
        ({"n_shared_experts": 2}, "n_shared_experts = 2: not supported"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim = 7: must be even and at most head_dim = 512"),
        ({"qk_rope_head_dim": 256}, "qk_rope_head_dim = 256: must be even and at most index_head_dim = 128"),
        ({"qk_rope_head_dim": None, "partial_rotary_factor": 2}, "partial_rotary_factor = 2: must be above 0"),
        ({"o_groups": 5}, "o_groups = 5: must divide num_attention_heads = 64"),
        ({"rope_scaling": [1]}, r"rope_scaling = \[1\]: must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.rope_type = 'linear'"),
        ({"compress_rope_theta": "x"}, "compress_rope_theta = 'x': must be a number above 1"),
        ({"rope_theta": 0}, "rope_theta = 0: must be a number above 1"),
        ({"swiglu_limit": 0}, "swiglu_limit = 0: must be a positive number"),
        ({"hc_mult": 0}, "hc_mult = 0: must be an integer of at least 1"),
        ({"hc_sinkhorn_iters": 1.5}, "hc_sinkhorn_iters = 1.5: must be an integer"),
        ({"num_hidden_layers": None}, "num_hidden_layers = None: must be an integer"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': not supported"),
    ],
)
def test_a_bad_value_is_named(fields, message):
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        DeepseekV4Config.from_hf(FLASH | SMALL | fields)


def test_every_style_of_names_fills_every_parameter():
    """Released names, those that transformers saves, and those it has in memory."""
    recipe = RECIPES["deepseek_v4"]
    cfg = DeepseekV4Config.from_hf(recipe.config)
    memory = {name: np.zeros((1, 2, 1)) for name, _ in recipe.parameters(recipe.config)}
    for names in (memory, saved_layout(memory), released_layout(memory)):
        filled, experts = set(), set()
        for name in names:
            matches = [(rule, match) for rule in WEIGHT_TABLE if (match := re.fullmatch(rule.pattern, name))]
            assert len(matches) == 1, name
            rule, match = matches[0]
            (experts if isinstance(rule, ExpertRule) else filled).add(
                (rule.tensor, match[1]) if isinstance(rule, ExpertRule) else match.expand(rule.target)
            )
        assert filled == set(targets(cfg))
        assert experts == {(tensor, str(layer)) for tensor in ("gate_up", "down") for layer in range(6)}
    for name in ("mtp.0.enorm.weight", "mtp.0.ffn.experts.3.w1.scale"):
        assert [type(rule) for rule in WEIGHT_TABLE if re.fullmatch(rule.pattern, name)] == [Ignore]


# ---------------------------------------------------------------------------------------------- the released format

RUN = {
    "dtype": "float32",
    "progress": False,
    "max_batch": 2,
    "max_sequence_length": 512,
    "page_size": 64,
    "decode_chunk": 4,
    "prefill_chunk": 128,
}
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def prompts(expected):
    """Rows of 250 and 126 tokens: windows of 4 and 128 end within chunks of 64, at their ends, and while decoding."""
    ids = expected("deepseek_v4_fp4")["input_ids"]
    ids = np.concatenate([ids, np.roll(ids, 5, axis=1)])
    mask = np.ones_like(ids)
    mask[1, :124] = 0
    return ids, mask


@pytest.mark.slow
def test_released_format_equals_transformers(tiny, prompts, expected):
    """Logits in chunks of 128 tokens; and rows of unequal length with few slots give the tokens of each row alone."""
    want, (ids, mask) = expected("deepseek_v4_fp4"), prompts
    with MoE(tiny("deepseek_v4_fp4"), RUN | {"transport": "resident"}) as moe:
        assert np.abs(moe.forward(want["input_ids"]) - want["logits"]).max() <= TOLERANCE
        alone = moe.generate(ids[1, mask[1] == 1], NEW_TOKENS, eos_token_id=[])[-NEW_TOKENS:]
    few = {"transport": "callback", "policy": "lfru", "expert_slots": 4, "contract": "atomic-forced-admit"}
    with MoE(tiny("deepseek_v4_fp4"), RUN | few) as moe:
        tokens = moe.generate(ids, NEW_TOKENS, eos_token_id=[], attention_mask=mask)[:, -NEW_TOKENS:]
        np.testing.assert_array_equal(tokens, [want["gen_ids"].ravel(), alone])
        assert moe.stats()["last"]["decode"]["misses"] > 0
        moe.verify_slots()
