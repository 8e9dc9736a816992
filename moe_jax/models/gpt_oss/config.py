"""Configuration of gpt-oss."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from moe_jax.models.config import DecoderConfig, bad_field
from pallas_kernels.expert_ffn import ExpertSpec
from pallas_kernels.formats import MXFP4, Dense

SLIDING, FULL = "sliding_attention", "full_attention"

# The rope settings of a file without any (transformers' class default).
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(DecoderConfig):
    """gpt-oss: sliding and full attention with learned sinks, biases everywhere, experts with a clamped SwiGLU.

    `layer_types` says of each layer whether it attends within `sliding_window` or to everything; absent, they
    alternate, beginning with a window. `expert_format` comes from the file's `quantization_config`: "dense" or "mxfp4".
    """

    SUPPORTED: ClassVar[dict[str, tuple]] = {"hidden_act": ("silu",)}
    DEFAULT_THETA: ClassVar[float] = 150000.0
    ROPE_TYPES: ClassVar[tuple[str, ...]] = ("default", "yarn")

    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_hidden_layers: int = 36
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 8
    head_dim: int | None = 64
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 150000.0
    num_experts: int = 128
    num_experts_per_tok: int = 4
    attention_bias: bool = True
    sliding_window: int | None = 128
    layer_types: tuple[str, ...] | None = None
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    expert_format: str = "dense"

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        values = dict(hf)
        if not hf.get("rope_parameters") and not hf.get("rope_scaling"):
            values["rope_parameters"] = DEFAULT_ROPE
        types = hf.get("layer_types")
        if types is not None:
            if not isinstance(types, list | tuple):
                raise bad_field("layer_types", types, f"must be a list of {SLIDING!r} and {FULL!r}")
            values["layer_types"] = tuple(types)
        quantization = hf.get("quantization_config")
        if quantization is not None:
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
            if method != "mxfp4":
                raise bad_field("quantization_config.quant_method", method, "this family supports only 'mxfp4'")
        values["expert_format"] = "dense" if quantization is None else "mxfp4"
        return super().from_hf(values)

    def __post_init__(self):
        count = self.num_hidden_layers
        if self.layer_types is None:
            alternating = tuple(FULL if i % 2 else SLIDING for i in range(count))
            object.__setattr__(self, "layer_types", alternating)
        super().__post_init__()
        self.check_boolean("attention_bias")
        for name in ("swiglu_alpha", "swiglu_limit"):
            self.check_positive(name)
        unknown = sorted({str(t) for t in self.layer_types} - {SLIDING, FULL})
        if unknown or len(self.layer_types) != count:
            remedy = f"must be {SLIDING!r} or {FULL!r} for each of the {count} layers"
            raise bad_field("layer_types", list(self.layer_types), remedy)
        if SLIDING in self.layer_types and self.sliding_window is None:
            raise bad_field("sliding_window", None, f"layer_types has {SLIDING!r} layers: give their window in tokens")
        if self.expert_format == "mxfp4":
            for name in ("hidden_size", "intermediate_size"):
                if getattr(self, name) % MXFP4.block:
                    remedy = f"MXFP4 experts need a multiple of {MXFP4.block}"
                    raise bad_field(name, getattr(self, name), remedy)

    @property
    def window(self) -> int | None:
        return self.sliding_window if SLIDING in self.layer_types else None

    def layer_window(self, layer: int) -> int | None:
        """Sliding window of decoder layer `layer` in tokens, None for full attention."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    @property
    def attention_sinks(self) -> bool:
        return True

    def expert_spec(self) -> ExpertSpec:
        form = MXFP4() if self.expert_format == "mxfp4" else Dense()
        return ExpertSpec(
            activation="clamped_swiglu",
            alpha=self.swiglu_alpha,
            limit=self.swiglu_limit,
            biases=True,
            gate_up=form,
            down=form,
        )

    def expert_row_shapes(self) -> dict[str, tuple[int, ...]]:
        tensors = self.expert_spec().row_tensors(self.expert_width, self.hidden_size)
        return {name: shape for name, (shape, _) in tensors.items()}
