"""Configuration of Mixtral."""

from dataclasses import dataclass
from typing import ClassVar

from moe_jax.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(DecoderConfig):
    """Mixtral: every layer is sparse, router weights always sum to one, one sliding window for all layers or none."""

    DEFAULT_THETA: ClassVar[float] = 1e6

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    num_experts: int = 8
    num_experts_per_tok: int = 2
    sliding_window: int | None = None

    @property
    def window(self) -> int | None:
        return self.sliding_window

    @property
    def normalizes_router_weights(self) -> bool:
        return True
