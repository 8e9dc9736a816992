"""Reading config.json of decoder-only families: field names as in Hugging Face, aliases, defaults and checks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import jax.numpy as jnp

from moe_jax.errors import CheckpointError

# Names that older files or sibling classes use for the same field (tried in order after the field's own name).
ALIASES = {"num_experts": ("num_local_experts", "n_routed_experts")}


def bad_field(name: str, value: Any, remedy: str) -> CheckpointError:
    """The error for a field of config.json: names the field, its value and what would work."""
    return CheckpointError(f"config.json: {name} = {value!r}: {remedy}")


def rope_theta(hf: Mapping[str, Any], default: float) -> float:
    """Base of plain rotary embedding: from `rope_parameters`, else `rope_scaling`, else top level, else `default`.

    Raises CheckpointError for every rope type but "default".
    """
    name = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    rope = hf.get(name) or {}
    if not isinstance(rope, Mapping):
        raise bad_field(name, rope, "must be an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise bad_field(f"{name}.rope_type", kind, 'this family supports only "default" (no scaling)')
    partial_factor = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if partial_factor not in (None, 1, 1.0):
        raise bad_field("partial_rotary_factor", partial_factor, "this family rotates whole heads (1.0)")
    theta = rope.get("rope_theta", hf.get("rope_theta", default))
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 1:
        raise bad_field("rope_theta", theta, "must be a number above 1")
    return float(theta)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A pre-norm decoder with grouped-query attention, rotary positions and sparse feed-forward layers.

    Fields carry their Hugging Face names; families give the defaults of their transformers class and add fields.
    `head_dim` and `num_key_value_heads` may be None when constructed; `__post_init__` fills them in.

    Raises CheckpointError for a value that no model can have.
    """

    SUPPORTED: ClassVar[dict[str, tuple]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False, None),
        "quantization_config": (None,),
    }
    DEFAULT_THETA: ClassVar[float] = 1e4

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None
    head_dim: int | None = None
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    num_experts: int
    num_experts_per_tok: int

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Config from the content of config.json; absent fields take the defaults of the transformers class.

        Raises CheckpointError naming the field for bad values, contradicting aliases and features not implemented.
        """
        for name, allowed in cls.SUPPORTED.items():
            if name in hf and hf[name] not in allowed:
                raise bad_field(name, hf[name], f"not supported by this family; must be {allowed[0]!r} or absent")
        values = {"rope_theta": rope_theta(hf, cls.DEFAULT_THETA)}
        for field in fields(cls):
            if field.name in values:
                continue
            given = {name: hf[name] for name in (field.name, *ALIASES.get(field.name, ())) if name in hf}
            if len(set(map(repr, given.values()))) > 1:
                raise bad_field(field.name, given, "aliases of one field disagree; keep one of them")
            if given:
                values[field.name] = next(iter(given.values()))
        return cls(**values)

    def __post_init__(self):
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
            "num_experts",
            "num_experts_per_tok",
        ):
            self.check_integer(name)
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise bad_field(
                    "num_attention_heads",
                    self.num_attention_heads,
                    f"must divide hidden_size = {self.hidden_size} when head_dim is not given",
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        self.check_integer("head_dim")
        if self.head_dim % 2:
            raise bad_field("head_dim", self.head_dim, "must be even, rotary embedding turns pairs")
        if self.num_attention_heads % self.num_key_value_heads:
            raise bad_field(
                "num_key_value_heads",
                self.num_key_value_heads,
                f"must divide num_attention_heads = {self.num_attention_heads}",
            )
        if self.num_experts_per_tok > self.num_experts:
            raise bad_field(
                "num_experts_per_tok", self.num_experts_per_tok, f"there are only {self.num_experts} experts a layer"
            )
        for name in ("rms_norm_eps", "initializer_range"):
            self.check_positive(name)
        self.check_boolean("tie_word_embeddings")
        if self.window is not None:
            self.check_integer("sliding_window")

    def check_integer(self, name: str) -> None:
        """Raise CheckpointError unless the field `name` is an integer of at least one."""
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise bad_field(name, value, "must be an integer of at least 1")

    def check_positive(self, name: str) -> None:
        """Raise CheckpointError unless the field `name` is a positive finite number."""
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise bad_field(name, value, "must be a positive number")

    def check_boolean(self, name: str) -> None:
        """Raise CheckpointError unless the field `name` is true or false."""
        value = getattr(self, name)
        if not isinstance(value, bool):
            raise bad_field(name, value, "must be true or false")

    @property
    def window(self) -> int | None:
        """Sliding window in tokens (a token sees itself and window - 1 before it), None for full attention."""
        return None

    @property
    def expert_width(self) -> int:
        """F, the hidden width of one expert."""
        return self.intermediate_size

    @property
    def normalizes_router_weights(self) -> bool:
        """Whether the K chosen scores are divided by their sum."""
        return False

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Decoder layer number of each sparse layer, ascending; its index here is the MoE layer number."""
        return tuple(range(self.num_hidden_layers))

    def expert_row_shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes of one expert's tensors, output dimension first: gate_up [2F, D] (gate rows first), down [D, F]."""
        D, F = self.hidden_size, self.expert_width
        return {"gate_up": (2 * F, D), "down": (D, F)}

    def kv_bytes_per_token(self, dtype) -> int:
        """Bytes that one token takes in the KV cache over all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * jnp.dtype(dtype).itemsize
