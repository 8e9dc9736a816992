"""Configuration of OLMoE."""

from dataclasses import dataclass
from typing import ClassVar

from moe_jax.models.config import DecoderConfig, bad_field


@dataclass(frozen=True, kw_only=True)
class OlmoeConfig(DecoderConfig):
    """OLMoE: every layer is sparse; queries and keys are normalised over the whole projection, then clipped.

    `intermediate_size` is the width of one expert; the class default (2048) is not that of the 1B-7B release (1024).
    """

    DEFAULT_THETA: ClassVar[float] = 1e4

    vocab_size: int = 50304
    hidden_size: int = 2048
    intermediate_size: int = 2048
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e4
    num_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    clip_qkv: float | None = None

    def __post_init__(self):
        super().__post_init__()
        self.check_boolean("norm_topk_prob")
        if self.clip_qkv is not None:
            self.check_positive("clip_qkv")
        if self.num_attention_heads * self.head_dim != self.hidden_size:
            raise bad_field(
                "head_dim",
                self.head_dim,
                f"OLMoE's query norm needs heads * head_dim = hidden_size = {self.hidden_size}",
            )

    @property
    def normalizes_router_weights(self) -> bool:
        return self.norm_topk_prob
