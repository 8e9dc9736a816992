"""Configuration of DeepSeek-V2 and DeepSeek-V2-Lite."""

from dataclasses import dataclass
from typing import ClassVar

from moe_jax.models.config import bad_field
from moe_jax.models.mla import MLAConfig

TOPK_METHODS = ("greedy", "group_limited_greedy")


@dataclass(frozen=True, kw_only=True)
class DeepseekV2Config(MLAConfig):
    """DeepSeek-V2: softmax router, greedy (V2-Lite) or within the best groups; weights are scaled, not renormalised.

    `norm_topk_prob` true is refused: transformers ignores it while the authors' code divides by the sum *instead of*
    scaling, and no release sets it.
    """

    SUPPORTED: ClassVar[dict[str, tuple]] = MLAConfig.SUPPORTED | {
        "norm_topk_prob": (False, None),
        "scoring_func": ("softmax", None),
    }

    vocab_size: int = 102400
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e4
    num_experts: int = 64
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int = 1407
    n_shared_experts: int | None = 2
    first_k_dense_replace: int = 0
    n_group: int | None = None
    topk_group: int | None = None
    topk_method: str = "greedy"
    routed_scaling_factor: float = 1.0

    def __post_init__(self):
        if self.topk_method not in TOPK_METHODS:
            raise bad_field("topk_method", self.topk_method, f"must be {' or '.join(map(repr, TOPK_METHODS))}")
        super().__post_init__()

    @property
    def groups(self) -> int:
        return super().groups if self.topk_method == "group_limited_greedy" else 1
