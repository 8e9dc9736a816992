"""Configuration of DBRX."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from moe_jax.errors import CheckpointError
from moe_jax.models.config import DecoderConfig, bad_field

# Our field -> where the file has it.
FIELDS = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "max_position_embeddings": "max_seq_len",
    "vocab_size": "vocab_size",
    "initializer_range": "initializer_range",
    "tie_word_embeddings": "tie_word_embeddings",
    "rope_parameters": "rope_parameters",
    "rope_theta": "attn_config.rope_theta",
    "num_key_value_heads": "attn_config.kv_n_heads",
    "clip_qkv": "attn_config.clip_qkv",
    "intermediate_size": "ffn_config.ffn_hidden_size",
    "num_experts": "ffn_config.moe_num_experts",
    "num_experts_per_tok": "ffn_config.moe_top_k",
    "moe_normalize_expert_weights": "ffn_config.moe_normalize_expert_weights",
    "hidden_act": "ffn_config.ffn_act_fn.name",
}


@dataclass(frozen=True, kw_only=True)
class DbrxConfig(DecoderConfig):
    """DBRX: layer norms, clipped q, k and v, and router weights divided by their p-norm.

    `moe_normalize_expert_weights` is p (None: not divided). Names of the file's own, partly in nested objects, are
    translated; errors name the file's. The base of the rotary embedding is that of `rope_parameters` if the file has
    it, else `attn_config.rope_theta` (transformers 5 ignores the latter, though the released files have only that).
    """

    SUPPORTED: ClassVar[dict[str, tuple]] = DecoderConfig.SUPPORTED | {"tie_word_embeddings": (False,)}
    DEFAULT_THETA: ClassVar[float] = 1e4

    vocab_size: int = 32000
    hidden_size: int = 2048
    intermediate_size: int = 3584
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 1
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5  # of the layer norms; not in the file
    rope_theta: float = 1e4
    num_experts: int = 4
    num_experts_per_tok: int = 1
    clip_qkv: float | None = None
    moe_normalize_expert_weights: float | None = 1.0

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        values = {}
        for ours, path in FIELDS.items():
            found: Any = hf
            *outer, last = path.split(".")
            for name in outer:
                found = found.get(name) or {}
                if not isinstance(found, Mapping):
                    raise bad_field(name, found, "must be an object")
            if last in found:
                values[ours] = found[last]
        try:
            return super().from_hf(values)
        except CheckpointError as error:
            message = re.sub(r"(?<=config\.json: )\w+(?= =)", lambda m: FIELDS.get(m[0], m[0]), str(error))
            raise CheckpointError(message) from error

    def __post_init__(self):
        super().__post_init__()
        for name in ("clip_qkv", "moe_normalize_expert_weights"):
            if getattr(self, name) is not None:
                self.check_positive(name)
