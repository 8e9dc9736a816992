"""What the families with multi-head latent attention share: DeepSeek-V2 and V3."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from flax import nnx

from moe_jax.checkpoint.mapping import Rule
from moe_jax.engine.kv_cache import LayerCache
from moe_jax.layers.mla import LatentAttention, mla_cache
from moe_jax.models.config import DecoderConfig, bad_field
from moe_jax.models.decoder import Decoder
from moe_jax.models.params import (
    BASE_RULES,
    DENSE_MLP_RULES,
    LAYER,
    STACKED_EXPERT_RULES,
    expert_rules,
    gated_mlp_rules,
)


@dataclass(frozen=True, kw_only=True)
class MLAConfig(DecoderConfig):
    """MLA, `first_k_dense_replace` dense layers, then sparse ones with shared experts and a group-limited router.

    `head_dim` of the file is ignored: heads are `qk_nope_head_dim + qk_rope_head_dim` wide in queries and keys and
    `v_head_dim` in values; the field holds the larger of the two. `num_experts` is `n_routed_experts` in the file.
    """

    SUPPORTED: ClassVar[dict[str, tuple]] = DecoderConfig.SUPPORTED | {
        "mlp_bias": (False, None),
        "moe_layer_freq": (1, None),
    }
    ROPE_TYPES: ClassVar[tuple[str, ...]] = ("default", "yarn")

    moe_intermediate_size: int
    n_shared_experts: int | None
    first_k_dense_replace: int
    kv_lora_rank: int = 512
    q_lora_rank: int | None = 1536
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    n_group: int | None
    topk_group: int | None
    routed_scaling_factor: float

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        return super().from_hf({name: value for name, value in hf.items() if name != "head_dim"})

    def __post_init__(self):
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "moe_intermediate_size"):
            self.check_integer(name)
        if self.q_lora_rank is not None:
            self.check_integer("q_lora_rank")
        if self.qk_rope_head_dim % 2:
            raise bad_field("qk_rope_head_dim", self.qk_rope_head_dim, "must be even, rotary embedding turns pairs")
        widest = max(self.qk_nope_head_dim + self.qk_rope_head_dim, self.v_head_dim)
        object.__setattr__(self, "head_dim", widest + widest % 2)
        super().__post_init__()
        self.check_positive("routed_scaling_factor")
        shared, dense = self.n_shared_experts, self.first_k_dense_replace
        if shared is not None and (isinstance(shared, bool) or not isinstance(shared, int) or shared < 0):
            raise bad_field("n_shared_experts", shared, "must be an integer of at least 0, or null")
        if isinstance(dense, bool) or not isinstance(dense, int) or not 0 <= dense < self.num_hidden_layers:
            raise bad_field(
                "first_k_dense_replace",
                dense,
                f"must be from 0 to {self.num_hidden_layers - 1}, so that a sparse layer is left",
            )
        for name in ("n_group", "topk_group"):
            if getattr(self, name) is not None:
                self.check_integer(name)
        if self.groups > 1:
            self._check_groups()

    def _check_groups(self):
        for name in ("n_group", "topk_group"):
            self.check_integer(name)
        n, top = self.n_group, self.topk_group
        if self.num_experts % n:
            raise bad_field("n_group", n, f"must divide the {self.num_experts} experts")
        if top > n:
            raise bad_field("topk_group", top, f"there are only {n} groups")
        if self.num_experts_per_tok > top * (self.num_experts // n):
            raise bad_field(
                "num_experts_per_tok",
                self.num_experts_per_tok,
                f"{top} groups of {self.num_experts // n} experts hold fewer",
            )

    @property
    def groups(self) -> int:
        """Groups of experts among which the router chooses; 1: no grouping."""
        return self.n_group or 1

    @property
    def top_groups(self) -> int:
        """Groups whose experts a token may use."""
        return self.topk_group or 1

    @property
    def rotary_dim(self) -> int:
        return self.qk_rope_head_dim

    @property
    def rotates_pairs(self) -> bool:
        """Whether rope turns components 2i and 2i + 1 together (else i and i + H/2)."""
        return True

    @property
    def expert_width(self) -> int:
        return self.moe_intermediate_size

    @property
    def shared_width(self) -> int:
        return self.moe_intermediate_size * (self.n_shared_experts or 0)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(range(self.first_k_dense_replace, self.num_hidden_layers))

    def cache_layout(self) -> tuple[LayerCache, ...]:
        """A latent and a rotary key of every token."""
        return (mla_cache(self.kv_lora_rank, self.qk_rope_head_dim),) * self.num_hidden_layers


class MLADecoder(Decoder):
    """The shared decoder with MLA; a family adds its router.

    Parameter paths of attention: `layers.N.attn.qkv.weight` [Q + R + Hr, D] (query or compressed query, latent, rotary
    key), `q_norm`, `q_up` (with `q_lora_rank`), `latent_norm`, `kv_up` [N (H + Hv), R] and `out`.
    """

    router_weights_dtype = jnp.float32

    def make_attention(self, layer: int, rngs: nnx.Rngs) -> LatentAttention:
        cfg = self.cfg
        return LatentAttention(
            cfg.hidden_size,
            cfg.num_attention_heads,
            self.dtype,
            q_rank=cfg.q_lora_rank,
            latent_dim=cfg.kv_lora_rank,
            nope_dim=cfg.qk_nope_head_dim,
            rope_dim=cfg.qk_rope_head_dim,
            v_dim=cfg.v_head_dim,
            pairs=cfg.rotates_pairs,
            score_factor=1.0 if cfg.yarn is None else cfg.yarn.score_factor,
            layer=layer,
            std=cfg.initializer_range,
            rngs=rngs,
        )


# q_proj or q_a_proj: a file has one of them, as `q_lora_rank` says.
MLA_RULES = (
    *BASE_RULES,
    Rule(LAYER + r"self_attn\.q(?:_a)?_proj\.weight", r"layers.\1.attn.qkv.weight", part=(0, 2)),
    Rule(LAYER + r"self_attn\.kv_a_proj_with_mqa\.weight", r"layers.\1.attn.qkv.weight", part=(1, 2)),
    Rule(LAYER + r"self_attn\.q_a_layernorm\.weight", r"layers.\1.attn.q_norm.weight"),
    Rule(LAYER + r"self_attn\.q_b_proj\.weight", r"layers.\1.attn.q_up.weight"),
    Rule(LAYER + r"self_attn\.kv_a_layernorm\.weight", r"layers.\1.attn.latent_norm.weight"),
    Rule(LAYER + r"self_attn\.kv_b_proj\.weight", r"layers.\1.attn.kv_up.weight"),
    *DENSE_MLP_RULES,
    *gated_mlp_rules(r"mlp\.shared_experts", "shared"),
    *expert_rules("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    *STACKED_EXPERT_RULES,
)
