"""Which family reads a config.json, and the abstract parameters of a model."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.checkpoint.loading import PackedMatrix
from moe_jax.checkpoint.mapping import ExpertRule, Ignore, Rule
from moe_jax.errors import CheckpointError
from moe_jax.layers.linear import Linear
from moe_jax.models.config import ModelConfig, bad_field
from moe_jax.models.dbrx.config import DbrxConfig
from moe_jax.models.dbrx.modeling import DbrxForCausalLM
from moe_jax.models.dbrx.params import WEIGHT_TABLE as DBRX_TABLE
from moe_jax.models.deepseek_v2.config import DeepseekV2Config
from moe_jax.models.deepseek_v2.modeling import DeepseekV2ForCausalLM
from moe_jax.models.deepseek_v2.params import WEIGHT_TABLE as DEEPSEEK_V2_TABLE
from moe_jax.models.deepseek_v3.config import DeepseekV3Config
from moe_jax.models.deepseek_v3.modeling import DeepseekV3ForCausalLM
from moe_jax.models.deepseek_v3.params import WEIGHT_TABLE as DEEPSEEK_V3_TABLE
from moe_jax.models.deepseek_v4.config import DeepseekV4Config
from moe_jax.models.deepseek_v4.modeling import DeepseekV4ForCausalLM
from moe_jax.models.deepseek_v4.params import WEIGHT_TABLE as DEEPSEEK_V4_TABLE
from moe_jax.models.gpt_oss.config import GptOssConfig
from moe_jax.models.gpt_oss.modeling import GptOssForCausalLM
from moe_jax.models.gpt_oss.params import WEIGHT_TABLE as GPT_OSS_TABLE
from moe_jax.models.jamba.config import JambaConfig
from moe_jax.models.jamba.modeling import JambaForCausalLM
from moe_jax.models.jamba.params import WEIGHT_TABLE as JAMBA_TABLE
from moe_jax.models.mixtral.config import MixtralConfig
from moe_jax.models.mixtral.modeling import MixtralForCausalLM
from moe_jax.models.mixtral.params import WEIGHT_TABLE as MIXTRAL_TABLE
from moe_jax.models.nllb_moe.config import NllbMoeConfig
from moe_jax.models.nllb_moe.modeling import NllbMoeForConditionalGeneration
from moe_jax.models.nllb_moe.params import TIED as NLLB_MOE_TIED
from moe_jax.models.nllb_moe.params import weight_table as nllb_moe_table
from moe_jax.models.olmoe.config import OlmoeConfig
from moe_jax.models.olmoe.modeling import OlmoeForCausalLM
from moe_jax.models.olmoe.params import WEIGHT_TABLE as OLMOE_TABLE
from moe_jax.models.qwen3_5_moe.config import Qwen3_5MoeConfig
from moe_jax.models.qwen3_5_moe.modeling import Qwen3_5MoeForCausalLM
from moe_jax.models.qwen3_5_moe.params import WEIGHT_TABLE as QWEN3_5_MOE_TABLE
from moe_jax.models.qwen3_moe.config import Qwen3MoeConfig
from moe_jax.models.qwen3_moe.modeling import Qwen3MoeForCausalLM
from moe_jax.models.qwen3_moe.params import WEIGHT_TABLE as QWEN3_MOE_TABLE

Table = tuple[Rule | ExpertRule | Ignore, ...]


@dataclass(frozen=True)
class Family:
    """One architecture: its `model_type` and class name in config.json, and our three parts.

    `aliases`: other names that `architectures` or `model_type` may hold for the same text model.
    `weight_table`: a table, or a function of the config that makes one.
    `tied` pairs a path that is absent from a model with a tied head with the parameter whose weights it shares.
    """

    name: str
    architecture: str
    config_cls: type[ModelConfig]
    model_cls: type[nnx.Module]
    weight_table: Table | Callable[[Any], Table]
    tied: tuple[tuple[str, str], ...] = (("lm_head.weight", "embed.weight"),)
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """What `architectures` or `model_type` of a config.json may say."""
        return (self.architecture, *self.aliases, self.name)

    def table(self, cfg: ModelConfig) -> Table:
        """The weight table for a model of `cfg`: also says which layers of the file are not part of the model."""
        extra = [Ignore(rf"model\.layers\.{layer}\..*", "predicts further tokens") for layer in cfg.extra_layers]
        table = self.weight_table(cfg) if callable(self.weight_table) else self.weight_table
        return (*table, *extra)


FAMILIES = (
    Family("mixtral", "MixtralForCausalLM", MixtralConfig, MixtralForCausalLM, MIXTRAL_TABLE),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", Qwen3MoeConfig, Qwen3MoeForCausalLM, QWEN3_MOE_TABLE),
    Family(
        "qwen3_5_moe",
        "Qwen3_5MoeForCausalLM",
        Qwen3_5MoeConfig,
        Qwen3_5MoeForCausalLM,
        QWEN3_5_MOE_TABLE,
        aliases=("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
    ),
    Family("olmoe", "OlmoeForCausalLM", OlmoeConfig, OlmoeForCausalLM, OLMOE_TABLE),
    Family("deepseek_v2", "DeepseekV2ForCausalLM", DeepseekV2Config, DeepseekV2ForCausalLM, DEEPSEEK_V2_TABLE),
    Family("deepseek_v3", "DeepseekV3ForCausalLM", DeepseekV3Config, DeepseekV3ForCausalLM, DEEPSEEK_V3_TABLE),
    Family("deepseek_v4", "DeepseekV4ForCausalLM", DeepseekV4Config, DeepseekV4ForCausalLM, DEEPSEEK_V4_TABLE, tied=()),
    Family("jamba", "JambaForCausalLM", JambaConfig, JambaForCausalLM, JAMBA_TABLE),
    Family("gpt_oss", "GptOssForCausalLM", GptOssConfig, GptOssForCausalLM, GPT_OSS_TABLE),
    Family("dbrx", "DbrxForCausalLM", DbrxConfig, DbrxForCausalLM, DBRX_TABLE, tied=()),
    Family(
        "nllb-moe",
        "NllbMoeForConditionalGeneration",
        NllbMoeConfig,
        NllbMoeForConditionalGeneration,
        nllb_moe_table,
        tied=NLLB_MOE_TIED,
    ),
)


def family_for(config: Mapping[str, Any]) -> Family:
    """The family of a config.json: by its `architectures`, or by `model_type` where that is absent.

    Raises CheckpointError: with all supported architectures if none fits; for `architectures` that is no list of names.
    """
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list | tuple) or not all(isinstance(name, str) for name in architectures):
        raise bad_field("architectures", architectures, "must be a list of names, as in ['MixtralForCausalLM']")
    model_type = config.get("model_type")
    named = set(architectures or [model_type])
    for family in FAMILIES:
        if not named.isdisjoint(family.names):
            return family
    if not architectures and model_type is None:
        problem = "config.json: neither architectures nor model_type says which model this is"
    else:
        problem = f"config.json: architectures = {architectures!r}, model_type = {model_type!r}: not supported"
    supported = "; ".join(" or ".join(family.names) for family in FAMILIES)
    raise CheckpointError(f"{problem}. Supported are: {supported} (docs/families.md has example checkpoints)")


def abstract_params(
    cfg: ModelConfig, dtype, packed: Mapping[str, PackedMatrix] | None = None
) -> tuple[nnx.GraphDef, dict]:
    """Structure and parameters of the model of `cfg` without memory.

    packed: path of a `Linear`'s weight -> how it is held, see `Linear.pack`. The path holds the part of suffix "", the
    others are that path with their suffix.

    Returns:
        (graphdef, params): nested dict with string keys, leaves `jax.ShapeDtypeStruct`. Fill the dict with arrays and
        call `nnx.merge(graphdef, params)` inside the traced function.
    """

    if packed:

        def build():
            model = _model(cfg, dtype)
            linear = dict(_packing_linears(model))
            for path, matrix in packed.items():
                linear[path].pack(matrix.form, {s: jnp.zeros(shape, of) for s, (shape, of) in matrix.tensors.items()})
            return model

        graphdef, state = nnx.split(nnx.eval_shape(build))
    else:
        graphdef, state = _decoded(cfg, np.dtype(dtype))
    return graphdef, nnx.to_pure_dict(state)


@functools.lru_cache(maxsize=32)  # a load asks several times, and models are loaded again with other settings
def _decoded(cfg, dtype):
    return nnx.split(nnx.eval_shape(lambda: _model(cfg, dtype)))


def packable(cfg: ModelConfig) -> tuple[str, ...]:
    """Paths of the weights of the model of `cfg` that may be held packed, such as `layers.0.attn.qkv.weight`."""
    return tuple(path for path, _ in _packing_linears(nnx.eval_shape(lambda: _model(cfg, "float32"))))


def _model(cfg, dtype):
    return next(family.model_cls for family in FAMILIES if family.config_cls is type(cfg))(cfg, dtype, rngs=nnx.Rngs(0))


def _packing_linears(model) -> Iterator[tuple[str, Linear]]:
    """(path of its weight, `Linear`) of all that `packs`."""
    for path, node in nnx.iter_graph(model):
        if isinstance(node, Linear) and node.packs:
            yield ".".join(map(str, (*path, "weight"))), node


def targets(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of the model of `cfg` by dotted path, e.g. `layers.0.attn.qkv.weight`."""
    _, params = abstract_params(cfg, "float32")
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {".".join(str(key.key) for key in path): leaf.shape for path, leaf in leaves}
