"""Configuration of DeepSeek-V3."""

from dataclasses import dataclass
from typing import ClassVar

from moe_jax.models.config import bad_field
from moe_jax.models.mla import MLAConfig


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(MLAConfig):
    """DeepSeek-V3: sigmoid router with a correction bias, within the best groups.

    `num_nextn_predict_layers` layers after the last one predict further tokens; their weights are not used.
    """

    SUPPORTED: ClassVar[dict[str, tuple]] = MLAConfig.SUPPORTED | {
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
    }

    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    num_hidden_layers: int = 61
    num_attention_heads: int = 128
    num_key_value_heads: int | None = 128
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e4
    num_experts: int = 256
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 2048
    n_shared_experts: int | None = 1
    first_k_dense_replace: int = 3
    n_group: int | None = 8
    topk_group: int | None = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    rope_interleave: bool = True
    num_nextn_predict_layers: int = 1

    def __post_init__(self):
        super().__post_init__()
        for name in ("norm_topk_prob", "rope_interleave"):
            self.check_boolean(name)
        extra = self.num_nextn_predict_layers
        if isinstance(extra, bool) or not isinstance(extra, int) or extra < 0:
            raise bad_field("num_nextn_predict_layers", extra, "must be an integer of at least 0")
        if self.groups > 1 and self.num_experts // self.groups < 2:
            raise bad_field("n_group", self.n_group, "a group is scored by its two best experts, so it needs two")

    @property
    def rotates_pairs(self) -> bool:
        return self.rope_interleave

    @property
    def extra_layers(self) -> range:
        return range(self.num_hidden_layers, self.num_hidden_layers + self.num_nextn_predict_layers)

    @property
    def normalizes_router_weights(self) -> bool:
        return self.norm_topk_prob
