"""Configuration of Qwen3.5-MoE."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from moe_jax.engine.kv_cache import LayerCache
from moe_jax.layers.gated_delta_net import delta_net_cache
from moe_jax.models.config import DecoderConfig, bad_field, text_settings

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Qwen3_5MoeConfig(DecoderConfig):
    """Qwen3.5-MoE: Gated DeltaNet in most layers, gated attention in the others, experts and a shared one in all.

    Released files nest these fields in `text_config`. `layer_types` says what each layer is; absent, every
    `full_attention_interval`-th one attends. The first `partial_rotary_factor` of a head's components rotate; with
    text alone the three positions of multimodal rotary embedding are one, so `mrope_section` has no effect.
    No layer is dense: `intermediate_size` of a file is ignored, the field holds the width of an expert.
    """

    SUPPORTED: ClassVar[dict[str, tuple]] = DecoderConfig.SUPPORTED | {
        "attn_output_gate": (True, None),
        "mlp_only_layers": ([], None),
        "decoder_sparse_step": (1, None),
        "norm_topk_prob": (True, None),
    }
    ROPE_TYPES: ClassVar[tuple[str, ...]] = ("default", "yarn")
    PARTIAL_ROTARY: ClassVar[bool] = True

    vocab_size: int = 248320
    hidden_size: int = 2048
    intermediate_size: int = 512
    num_hidden_layers: int = 40
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 2
    head_dim: int | None = 256
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e4
    partial_rotary_factor: float = 0.25
    num_experts: int = 256
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    layer_types: tuple[str, ...] | None = None
    full_attention_interval: int = 4
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        values = text_settings(hf)
        if values.get("tie_word_embeddings") != hf.get("tie_word_embeddings", values.get("tie_word_embeddings")):
            raise bad_field("tie_word_embeddings", hf["tie_word_embeddings"], "text_config says otherwise")
        rope = values.get("rope_parameters") or values.get("rope_scaling")
        if isinstance(rope, Mapping) and rope.get("partial_rotary_factor") is not None:
            values["partial_rotary_factor"] = rope["partial_rotary_factor"]
        types = values.get("layer_types")
        if types is not None:
            if not isinstance(types, list | tuple):
                raise bad_field("layer_types", types, f"must be a list of {LINEAR!r} and {FULL!r}")
            values["layer_types"] = tuple(types)
        return super().from_hf(values)

    def __post_init__(self):
        for name in (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "full_attention_interval",
            "linear_conv_kernel_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
        ):
            self.check_integer(name)
        object.__setattr__(self, "intermediate_size", self.moe_intermediate_size)
        super().__post_init__()
        if self.linear_conv_kernel_dim < 2:
            raise bad_field("linear_conv_kernel_dim", self.linear_conv_kernel_dim, "must be at least 2")
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise bad_field(
                "linear_num_value_heads",
                self.linear_num_value_heads,
                f"must be a multiple of linear_num_key_heads = {self.linear_num_key_heads}",
            )
        self.check_positive("partial_rotary_factor")
        if self.partial_rotary_factor > 1 or self.rotary_dim < 2 or self.rotary_dim % 2:
            raise bad_field(
                "partial_rotary_factor",
                self.partial_rotary_factor,
                f"must be at most 1 and take an even number of the {self.head_dim} components of a head",
            )
        self._check_layer_types()

    def _check_layer_types(self):
        count, interval = self.num_hidden_layers, self.full_attention_interval
        if self.layer_types is None:
            types = tuple(LINEAR if (i + 1) % interval else FULL for i in range(count))
            if FULL not in types:
                remedy = f"none of the {count} layers would attend; must be at most {count}"
                raise bad_field("full_attention_interval", interval, remedy)
            object.__setattr__(self, "layer_types", types)
        unknown = sorted({str(kind) for kind in self.layer_types} - {LINEAR, FULL})
        if unknown or len(self.layer_types) != count or FULL not in self.layer_types:
            remedy = f"must be {LINEAR!r} or {FULL!r} for each of the {count} layers, {FULL!r} at least once"
            raise bad_field("layer_types", list(self.layer_types), remedy)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Decoder layer number of each layer with attention; the others are Gated DeltaNet."""
        return tuple(layer for layer, kind in enumerate(self.layer_types) if kind == FULL)

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def shared_width(self) -> int:
        return self.shared_expert_intermediate_size

    @property
    def normalizes_router_weights(self) -> bool:
        return True

    @property
    def linear_channels(self) -> int:
        """Channels of the convolution of a Gated DeltaNet layer: its queries, keys and values."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * keys + self.linear_num_value_heads * self.linear_value_head_dim

    def cache_layout(self) -> tuple[LayerCache, ...]:
        """Keys and values in attention layers, states in the others."""
        recurrent = delta_net_cache(
            self.linear_channels,
            self.linear_conv_kernel_dim,
            self.linear_num_value_heads,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
        )
        attention = super().cache_layout()
        return tuple(attention[layer] if kind == FULL else recurrent for layer, kind in enumerate(self.layer_types))
