"""Configuration of Jamba."""

import math
from dataclasses import dataclass
from typing import ClassVar

from moe_jax.engine.kv_cache import LayerCache
from moe_jax.layers.mamba import mamba_cache
from moe_jax.models.config import DecoderConfig, bad_field


@dataclass(frozen=True, kw_only=True)
class JambaConfig(DecoderConfig):
    """Jamba: Mamba layers with attention in every `attn_layer_period`-th and experts in every `expert_layer_period`-th.

    There are no positions. `mamba_dt_rank` "auto" is hidden_size / 16, rounded up.
    """

    SUPPORTED: ClassVar[dict[str, tuple]] = DecoderConfig.SUPPORTED | {
        "mamba_conv_bias": (True,),
        "mamba_proj_bias": (False,),
    }

    vocab_size: int = 65536
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 262144
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e4
    num_experts: int = 16
    num_experts_per_tok: int = 2
    attn_layer_period: int = 8
    attn_layer_offset: int = 4
    expert_layer_period: int = 2
    expert_layer_offset: int = 1
    mamba_d_state: int = 16
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_dt_rank: int | str = "auto"

    def __post_init__(self):
        super().__post_init__()
        if self.mamba_dt_rank == "auto":
            object.__setattr__(self, "mamba_dt_rank", math.ceil(self.hidden_size / 16))
        for name in ("mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_dt_rank"):
            self.check_integer(name)
        if self.mamba_d_conv < 2:
            raise bad_field("mamba_d_conv", self.mamba_d_conv, "must be at least 2")
        for kind, layers in (("attn", self.attention_layers), ("expert", self.moe_layers)):
            if not layers:
                raise bad_field(
                    f"{kind}_layer_offset",
                    getattr(self, f"{kind}_layer_offset"),
                    f"none of the {self.num_hidden_layers} layers is of this kind",
                )

    def _every(self, kind: str) -> tuple[int, ...]:
        """Layers i with i % period == offset."""
        self.check_integer(f"{kind}_layer_period")
        period, name = getattr(self, f"{kind}_layer_period"), f"{kind}_layer_offset"
        offset = getattr(self, name)
        if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset < period:
            raise bad_field(name, offset, f"must be from 0 to {kind}_layer_period - 1 = {period - 1}")
        return tuple(range(offset, self.num_hidden_layers, period))

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Decoder layer number of each layer with attention; the others are Mamba."""
        return self._every("attn")

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return self._every("expert")

    @property
    def rotary_dim(self) -> None:
        return None

    @property
    def mamba_inner(self) -> int:
        """Di, inner width of a Mamba layer."""
        return self.mamba_expand * self.hidden_size

    def cache_layout(self) -> tuple[LayerCache, ...]:
        """Keys and values in attention layers, states in the others."""
        recurrent = mamba_cache(self.mamba_inner, self.mamba_d_state, self.mamba_d_conv)
        attention = super().cache_layout()
        return tuple(
            attention[layer] if layer in self.attention_layers else recurrent for layer in range(self.num_hidden_layers)
        )
