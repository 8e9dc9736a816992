"""Configuration of Qwen3-MoE."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from moe_jax.models.config import DecoderConfig, bad_field


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(DecoderConfig):
    """Qwen3-MoE: layer i is sparse iff it is not in `mlp_only_layers` and (i + 1) % `decoder_sparse_step` == 0.

    The sliding window counts only with `use_sliding_window`, and then for all layers. `head_dim` cannot be derived
    from the width in the released models; their config.json gives it.
    """

    DEFAULT_THETA: ClassVar[float] = 1e4

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e4
    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    use_sliding_window: bool = False
    sliding_window: int | None = 4096

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        layers = hf.get("mlp_only_layers") or ()
        if not isinstance(layers, list | tuple):
            raise bad_field("mlp_only_layers", layers, "must be a list of layer numbers")
        return super().from_hf({**hf, "mlp_only_layers": tuple(layers)})

    def __post_init__(self):
        super().__post_init__()
        for name in ("moe_intermediate_size", "decoder_sparse_step"):
            self.check_integer(name)
        for name in ("norm_topk_prob", "use_sliding_window"):
            self.check_boolean(name)
        outside = [i for i in self.mlp_only_layers if not isinstance(i, int) or not 0 <= i < self.num_hidden_layers]
        if outside:
            raise bad_field(
                "mlp_only_layers",
                list(self.mlp_only_layers),
                f"{outside} are not layers 0..{self.num_hidden_layers - 1}",
            )
        if not self.moe_layers:
            raise bad_field(
                "decoder_sparse_step", self.decoder_sparse_step, "with mlp_only_layers this leaves no sparse layer"
            )

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    @property
    def expert_width(self) -> int:
        return self.moe_intermediate_size

    @property
    def normalizes_router_weights(self) -> bool:
        return self.norm_topk_prob

    @property
    def moe_layers(self) -> tuple[int, ...]:
        step, dense = self.decoder_sparse_step, self.mlp_only_layers
        return tuple(i for i in range(self.num_hidden_layers) if i not in dense and (i + 1) % step == 0)
