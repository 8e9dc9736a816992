"""Reading config.json: defaults and aliases as in transformers, and an error that names each bad field."""

import re

import jax
import jax.numpy as jnp
import pytest
import transformers
from flax import nnx

from moe_jax.checkpoint.mapping import Ignore
from moe_jax.errors import CheckpointError
from moe_jax.layers.rope import Yarn
from moe_jax.models.registry import FAMILIES, abstract_params, family_for, targets

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
BY_NAME = {family.name: family for family in FAMILIES}
GQA = ("mixtral", "qwen3_moe", "olmoe", "jamba")
ROPE_GQA = ("mixtral", "qwen3_moe", "olmoe")
DEEPSEEK = {
    "q_lora_rank": 6,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 5,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
MORE = {"deepseek_v2": DEEPSEEK | {"topk_method": "group_limited_greedy"}, "deepseek_v3": DEEPSEEK}
MORE["jamba"] = {"attn_layer_period": 2, "attn_layer_offset": 0, "mamba_d_state": 3}
MORE["qwen3_5_moe"] = {"full_attention_interval": 2}
MORE["deepseek_v4"] = {
    "num_key_value_heads": 1,
    "head_dim": 8,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 6,
    "o_groups": 2,
    "o_lora_rank": 5,
    "index_n_heads": 2,
    "index_head_dim": 4,
    "moe_intermediate_size": 8,
}


def read(name: str, **changes):
    return BY_NAME[name].config_cls.from_hf({**SMALL, **MORE.get(name, {}), **changes})


@pytest.mark.parametrize(
    ("name", "theirs"),
    (
        ("mixtral", transformers.MixtralConfig),
        ("qwen3_moe", transformers.Qwen3MoeConfig),
        ("olmoe", transformers.OlmoeConfig),
        ("deepseek_v2", transformers.DeepseekV2Config),
        ("deepseek_v3", transformers.DeepseekV3Config),
        ("jamba", transformers.JambaConfig),
    ),
)
def test_defaults_are_those_of_transformers(name, theirs):
    # The class has no default for how many experts a DeepSeek-V2 token uses.
    given = {"num_experts_per_tok": 6} if name == "deepseek_v2" else {}
    want, cfg = theirs(**given), BY_NAME[name].config_cls.from_hf(given)
    assert cfg == BY_NAME[name].config_cls(**given)
    for field in (*SMALL, "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "initializer_range"):
        theirs_name = "n_routed_experts" if field == "num_experts" and name not in GQA else field
        assert getattr(cfg, field) == getattr(want, theirs_name), field
    if name not in GQA:
        for field in DEEPSEEK.keys() | {"n_shared_experts", "routed_scaling_factor"}:
            assert getattr(cfg, field) == getattr(want, field), field
    if name == "jamba":
        for field in ("attn", "expert"):
            assert getattr(cfg, f"{field}_layer_period") == getattr(want, f"{field}_layer_period")
            assert getattr(cfg, f"{field}_layer_offset") == getattr(want, f"{field}_layer_offset")
        for field in ("mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_dt_rank"):
            assert getattr(cfg, field) == getattr(want, field), field
    else:
        assert cfg.rope_theta == want.rope_parameters["rope_theta"]
    assert cfg.window is None and getattr(want, "sliding_window", None) is None
    if name in GQA:
        assert cfg.head_dim == want.hidden_size // want.num_attention_heads
    if name in ("qwen3_moe", "olmoe", "deepseek_v3"):
        assert cfg.norm_topk_prob == want.norm_topk_prob


@pytest.mark.parametrize("name", ROPE_GQA)
def test_a_config_that_transformers_saves_reads_back(name):
    theirs = {
        "mixtral": transformers.MixtralConfig(**{k: v for k, v in SMALL.items() if k != "num_experts"}, head_dim=6),
        "qwen3_moe": transformers.Qwen3MoeConfig(**SMALL, head_dim=6),
        "olmoe": transformers.OlmoeConfig(**SMALL),
    }[name]
    saved = theirs.to_dict()
    assert family_for(saved) is BY_NAME[name]
    cfg = BY_NAME[name].config_cls.from_hf(saved)
    assert cfg.num_experts == (8 if name == "mixtral" else 4)
    assert cfg.head_dim == (4 if name == "olmoe" else 6)
    assert cfg.rope_theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize("name", ("deepseek_v2", "deepseek_v3"))
def test_a_deepseek_config_that_transformers_saves_reads_back(name):
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 5e4,
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
    }
    values = {k: v for k, v in SMALL.items() if k != "num_experts"} | MORE[name] | {"n_routed_experts": 4}
    theirs = {"deepseek_v2": transformers.DeepseekV2Config, "deepseek_v3": transformers.DeepseekV3Config}[name]
    saved = theirs(**values, rope_parameters=yarn).to_dict()
    assert saved["head_dim"] == 2, "transformers writes the rotary width under this name"
    assert family_for(saved) is BY_NAME[name]
    cfg = BY_NAME[name].config_cls.from_hf(saved)
    assert cfg == read(name, rope_parameters=yarn)
    assert cfg.rope_theta == 5e4
    assert cfg.yarn == Yarn(8.0, 16, mscale=1.0)


def test_deepseek_derived_values():
    cfg = read("deepseek_v3", num_nextn_predict_layers=2, n_shared_experts=3)
    assert cfg.head_dim == 6 and cfg.rotary_dim == 2 and cfg.rotates_pairs
    assert cfg.moe_layers == (1, 2, 3) and cfg.extra_layers == range(4, 6)
    assert cfg.expert_row_shapes() == {"gate_up": (16, 16), "down": (16, 8)} and cfg.shared_width == 24
    assert cfg.kv_bytes_per_token(jnp.bfloat16) == 4 * (8 + 2) * 2 and cfg.state_bytes(jnp.bfloat16) == 0
    assert (cfg.groups, cfg.top_groups) == (2, 1)
    assert read("deepseek_v2", topk_method="greedy").groups == 1
    assert read("deepseek_v2", n_shared_experts=None).shared_width == 0
    assert not read("deepseek_v3", rope_interleave=False).rotates_pairs
    assert read("deepseek_v2", v_head_dim=9).head_dim == 10, "the widest head, rounded to an even number"


def test_jamba_derived_values():
    saved = transformers.JambaConfig(**SMALL, **MORE["jamba"]).to_dict()
    assert family_for(saved) is BY_NAME["jamba"]
    cfg = BY_NAME["jamba"].config_cls.from_hf(saved)
    assert cfg == read("jamba") and cfg.rotary_dim is None and cfg.mamba_dt_rank == 1
    assert cfg.attention_layers == (0, 2) and cfg.moe_layers == (1, 3)
    assert [sorted(layer.paged) for layer in cfg.cache_layout()] == [["k", "v"], []] * 2
    assert cfg.kv_bytes_per_token(jnp.bfloat16) == 2 * (2 * 2 * 4) * 2, "two attention layers, keys and values"
    assert cfg.state_bytes(jnp.bfloat16) == 2 * (3 * 32 * 2 + 32 * 3 * 4), "two Mamba layers, Di = 32"
    released = BY_NAME["jamba"].config_cls()
    assert released.kv_bytes_per_token(jnp.bfloat16) == 16_384
    assert released.state_bytes(jnp.bfloat16) == 28 * (3 * 8192 * 2 + 8192 * 16 * 4)


def test_aliases():
    cfg = read("mixtral")
    without = {k: v for k, v in SMALL.items() if k != "num_experts"}
    for alias in ("num_local_experts", "n_routed_experts"):
        assert BY_NAME["mixtral"].config_cls.from_hf({**without, alias: 4}) == cfg
    assert read("mixtral", num_local_experts=4) == cfg
    with pytest.raises(CheckpointError, match="num_experts.*disagree"):
        read("mixtral", num_local_experts=8)
    assert read("mixtral", num_key_value_heads=None).num_key_value_heads == 4
    assert read("olmoe", rope_theta=5e5).rope_theta == 5e5
    assert read("olmoe", rope_scaling=None, rope_parameters={"rope_type": "default", "rope_theta": 7}).rope_theta == 7
    assert read("olmoe", rope_scaling={"type": "default"}, rope_theta=9).rope_theta == 9


def test_derived_values():
    cfg = read("qwen3_moe", moe_intermediate_size=8, head_dim=6, decoder_sparse_step=2, mlp_only_layers=[1])
    assert cfg.moe_layers == (3,)
    assert cfg.expert_row_shapes() == {"gate_up": (16, 16), "down": (16, 8)}
    assert cfg.kv_bytes_per_token(jnp.bfloat16) == 2 * 4 * 2 * 6 * 2
    assert cfg.window is None
    assert read("qwen3_moe", use_sliding_window=True, sliding_window=12).window == 12
    assert read("mixtral", sliding_window=12).window == 12
    assert read("mixtral").normalizes_router_weights and not read("olmoe").normalizes_router_weights
    assert read("olmoe").expert_row_shapes() == {"gate_up": (48, 16), "down": (16, 24)}
    assert hash(cfg) == hash(
        read("qwen3_moe", **{f: getattr(cfg, f) for f in cfg.__dataclass_fields__ if f not in SMALL})
    )


@pytest.mark.parametrize(
    ("name", "field", "value"),
    (
        ("mixtral", "hidden_act", "gelu"),
        ("qwen3_moe", "attention_bias", True),
        ("olmoe", "attention_bias", True),
        ("mixtral", "rope_scaling", {"type": "linear", "factor": 2}),
        ("qwen3_moe", "rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        ("qwen3_moe", "rope_scaling", "yarn"),
        ("qwen3_moe", "partial_rotary_factor", 0.5),
        ("mixtral", "rope_theta", 0),
        ("mixtral", "hidden_size", 17),
        ("mixtral", "head_dim", 5),
        ("mixtral", "num_key_value_heads", 3),
        ("mixtral", "num_experts_per_tok", 5),
        ("mixtral", "num_hidden_layers", 0),
        ("mixtral", "vocab_size", "32"),
        ("mixtral", "sliding_window", 0),
        ("mixtral", "tie_word_embeddings", "yes"),
        ("olmoe", "rms_norm_eps", 0.0),
        ("olmoe", "clip_qkv", -1.0),
        ("olmoe", "head_dim", 8),
        ("olmoe", "norm_topk_prob", None),
        ("qwen3_moe", "decoder_sparse_step", 0),
        ("qwen3_moe", "decoder_sparse_step", 5),
        ("qwen3_moe", "mlp_only_layers", [4]),
        ("qwen3_moe", "mlp_only_layers", 3),
        ("qwen3_moe", "moe_intermediate_size", -1),
        ("deepseek_v2", "norm_topk_prob", True),
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("deepseek_v2", "moe_layer_freq", 2),
        ("deepseek_v2", "num_experts_per_tok", None),
        ("deepseek_v2", "topk_group", 3),
        ("deepseek_v2", "num_experts_per_tok", 3),
        ("deepseek_v3", "n_group", 3),
        ("deepseek_v3", "n_group", "x"),
        ("deepseek_v2", "n_group", [2]),
        ("deepseek_v2", "topk_group", True),
        ("deepseek_v3", "first_k_dense_replace", 4),
        ("deepseek_v3", "n_shared_experts", -1),
        ("deepseek_v3", "q_lora_rank", 0),
        ("deepseek_v3", "qk_rope_head_dim", 3),
        ("deepseek_v3", "routed_scaling_factor", 0),
        ("deepseek_v3", "rope_interleave", "yes"),
        ("deepseek_v3", "num_nextn_predict_layers", -1),
        ("jamba", "mamba_conv_bias", False),
        ("jamba", "mamba_proj_bias", True),
        ("jamba", "mamba_dt_rank", "large"),
        ("jamba", "mamba_d_conv", 1),
        ("jamba", "attn_layer_offset", 2),
        ("jamba", "attn_layer_period", 0),
        ("jamba", "expert_layer_offset", -1),
    ),
)
def test_a_bad_value_is_named(name, field, value):
    culprit = "num_attention_heads" if field == "hidden_size" else field
    with pytest.raises(CheckpointError, match=rf"config\.json: {culprit}"):
        read(name, **{field: value})


def test_a_group_of_one_expert_has_no_two_best():
    with pytest.raises(CheckpointError, match="n_group = 4.*two best"):
        read("deepseek_v3", n_group=4, num_experts_per_tok=1)
    assert read("deepseek_v2", n_group=4, num_experts_per_tok=1).groups == 4


@pytest.mark.parametrize(
    ("field", "value"),
    (("factor", None), ("factor", "40"), ("beta_fast", 0), ("mscale", -1.0), ("truncate", 1), ("attention_factor", 0)),
)
def test_a_bad_yarn_setting_is_named(field, value):
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    with pytest.raises(CheckpointError, match=rf"rope_scaling\.{field} = {value!r}"):
        read("deepseek_v3", rope_scaling=yarn | {field: value})
    assert read("deepseek_v3", rope_scaling=yarn | {"mscale": 0}).yarn.mscale == 0


def test_layers_that_predict_further_tokens_are_ignored():
    table = BY_NAME["deepseek_v3"].table(read("deepseek_v3"))
    ignored = [rule.pattern for rule in table if isinstance(rule, Ignore)]
    names = ("model.layers.4.eh_proj.weight", "model.layers.4.self_attn.o_proj.weight")
    assert all(any(re.fullmatch(pattern, name) for pattern in ignored) for name in names)
    for name in ("model.layers.3.self_attn.o_proj.weight", "model.layers.5.eh_proj.weight"):
        assert not any(re.fullmatch(pattern, name) for pattern in ignored)


def test_an_unknown_architecture_lists_the_supported_ones():
    with pytest.raises(CheckpointError, match=r"architectures = \['LlamaForCausalLM'\].*not supported") as caught:
        family_for({"architectures": ["LlamaForCausalLM"], "model_type": "mixtral"})
    for family in FAMILIES:
        for name in (family.architecture, family.name, *family.aliases):
            assert name in str(caught.value)
            assert family_for({"architectures": [name]}) is family_for({"model_type": name}) is family
    with pytest.raises(CheckpointError, match="neither architectures nor model_type.*MixtralForCausalLM or mixtral;"):
        family_for({})
    for wrong in ("MixtralForCausalLM", [["MixtralForCausalLM"]], {"MixtralForCausalLM": 1}):
        with pytest.raises(CheckpointError, match="architectures = .*must be a list of names"):
            family_for({"architectures": wrong})


@pytest.mark.parametrize("tied", (False, True))
def test_abstract_params_hold_no_memory_and_match_targets(tied):
    cfg = read("qwen3_moe", tie_word_embeddings=tied, decoder_sparse_step=2, head_dim=6)
    _, params = abstract_params(cfg, jnp.bfloat16)
    leaves = jax.tree.leaves(params)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) and leaf.dtype == jnp.bfloat16 for leaf in leaves)
    shapes = targets(cfg)
    assert len(shapes) == len(leaves)
    assert ("lm_head.weight" in shapes) == (not tied)
    assert shapes["layers.0.attn.qkv.weight"] == ((4 + 2 * 2) * 6, 16)
    assert shapes["layers.0.mlp.gate_up.weight"] == (48, 16) and "layers.0.router.gate.weight" not in shapes
    assert shapes["layers.1.router.gate.weight"] == (4, 16) and "layers.1.mlp.down.weight" not in shapes
    assert shapes["layers.1.attn.q_norm.weight"] == (6,)
    assert shapes["embed.weight"] == (32, 16)


def test_abstract_params_are_the_callers_own():
    cfg = read("qwen3_moe")
    _, params = abstract_params(cfg, jnp.bfloat16)
    del params["layers"]
    assert "layers" in abstract_params(cfg, jnp.bfloat16)[1]
    assert all(leaf.dtype == jnp.float16 for leaf in jax.tree.leaves(abstract_params(cfg, "float16")[1]))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, family in BY_NAME.items() if not family.config_cls.encoder_decoder])
@pytest.mark.fully_optimised  # draws arrays of real size
def test_modules_initialise_with_values_of_the_right_scale(name):
    family = BY_NAME[name]
    cfg = read(name, num_hidden_layers=2, initializer_range=0.5)
    model = family.model_cls(cfg, jnp.float32, rngs=nnx.Rngs(0))
    assert 0.3 < float(jnp.std(model.layers["0"].attn.out.weight[...])) < 0.7
    with pytest.raises(ValueError, match="int8"):
        family.model_cls(cfg, jnp.int8, rngs=nnx.Rngs(0))
