"""Reading config.json: field names as in Hugging Face, aliases, defaults and checks."""

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from moe_jax.engine.kv_cache import LayerCache, page_bytes, source_bytes, state_bytes, token_bytes
from moe_jax.errors import CheckpointError
from moe_jax.layers.rope import Yarn
from pallas_kernels.expert_ffn import SILU, ExpertSpec

# Names that older files or sibling classes use for the same field (tried in order after the field's own name).
ALIASES = {"num_experts": ("num_local_experts", "n_routed_experts")}


def bad_field(name: str, value: Any, remedy: str) -> CheckpointError:
    """The error for a field of config.json: names the field, its value and what would work."""
    return CheckpointError(f"config.json: {name} = {value!r}: {remedy}")


def text_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json as that of a text model: what `text_config` says, then what stands beside it.

    Checkpoints with further modalities nest the language model's settings. A null in there counts as absent.
    Raises CheckpointError if `text_config` is no object.
    """
    text = hf.get("text_config")
    if text is None:
        return dict(hf)
    if not isinstance(text, Mapping):
        raise bad_field("text_config", text, "must be an object with the settings of the language model")
    return {**hf, **{name: value for name, value in text.items() if value is not None}}


def read_rope(
    hf: Mapping[str, Any], default: float, types: tuple[str, ...], partial: bool = False
) -> tuple[float, Yarn | None]:
    """(base of the rotary embedding, its YaRN extension or None).

    Settings come from `rope_parameters`, else `rope_scaling`; the base from there, else top level, else `default`.
    `partial`: the family reads `partial_rotary_factor` itself; else only 1 is allowed.
    Raises CheckpointError for a rope type that is not among `types` and for bad values.
    """
    name = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    rope = hf.get(name) or {}
    if not isinstance(rope, Mapping):
        raise bad_field(name, rope, "must be an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in types:
        raise bad_field(f"{name}.rope_type", kind, f"this family supports only {' and '.join(map(repr, types))}")
    partial_factor = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if not partial and partial_factor not in (None, 1, 1.0):
        raise bad_field("partial_rotary_factor", partial_factor, "this family rotates whole heads (1.0)")
    theta = rope.get("rope_theta", hf.get("rope_theta", default))
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 1:
        raise bad_field("rope_theta", theta, "must be a number above 1")
    return float(theta), _read_yarn(name, rope, hf) if kind == "yarn" else None


def _read_yarn(name: str, rope: Mapping[str, Any], hf: Mapping[str, Any]) -> Yarn:
    """YaRN settings of a rope dict; absent ones as in transformers."""
    longest = hf.get("max_position_embeddings")
    values = {"original_max_position_embeddings": longest, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
    # A null counts as absent.
    values |= {field.name: rope[field.name] for field in fields(Yarn) if rope.get(field.name) is not None}
    truncate = values.pop("truncate")
    if not isinstance(truncate, bool):
        raise bad_field(f"{name}.truncate", truncate, "must be true or false")
    if "factor" not in values:
        raise bad_field(f"{name}.factor", None, 'rope_type "yarn" needs the factor of the extension')
    for key, value in values.items():
        # 0 turns an mscale off.
        zero_allowed = key in ("mscale", "mscale_all_dim")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not (0 < value < math.inf or (zero_allowed and value == 0)):
            raise bad_field(f"{name}.{key}", value, "must be a positive number")
    return Yarn(**values, truncate=truncate)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(abc.ABC):
    """What the engine asks of every family's configuration. Fields carry their Hugging Face names.

    A family also has `vocab_size`, `hidden_size`, `head_dim`, `max_position_embeddings`, `num_experts`,
    `num_experts_per_tok` (fields, properties or constants), `moe_layers`, `expert_spec`, `expert_row_shapes` and
    `cache_layout`, as `DecoderConfig` describes them.
    """

    SUPPORTED: ClassVar[dict[str, tuple]] = {}
    # Whether a source goes through an encoder first; `generate` then continues a target.
    encoder_decoder: ClassVar[bool] = False
    # Whether its layers may read their pages through `pallas_kernels.paged_attention` in decode.
    attention_kernel: ClassVar[bool] = True

    @classmethod
    def read(cls, hf: Mapping[str, Any], **derived: Any) -> Self:
        """Config from the fields of config.json and the fields `derived`, which are not read.

        Raises CheckpointError naming the field for bad values, contradicting aliases and features not implemented.
        """
        for name, allowed in cls.SUPPORTED.items():
            if name in hf and hf[name] not in allowed:
                raise bad_field(name, hf[name], f"not supported by this family; must be {allowed[0]!r} or absent")
        values = dict(derived)
        for field in fields(cls):
            if field.name in values:
                continue
            given = {name: hf[name] for name in (field.name, *ALIASES.get(field.name, ())) if name in hf}
            if len(set(map(repr, given.values()))) > 1:
                raise bad_field(field.name, given, "aliases of one field disagree; keep one of them")
            if given:
                values[field.name] = next(iter(given.values()))
        return cls(**values)

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
    def attention_sinks(self) -> bool:
        """Whether the attention's softmax has a learned sink in each head."""
        return False

    @property
    def extra_layers(self) -> range:
        """Numbers of layers that a checkpoint may hold beyond the model's: those that predict further tokens."""
        return range(0)

    @property
    def encoder_moe_layers(self) -> int:
        """How many of the MoE layers belong to an encoder; they come first."""
        return 0

    @abc.abstractmethod
    def cache_layout(self) -> tuple[LayerCache, ...]:
        """What each layer of the decoder keeps of the past."""

    def kv_bytes_per_token(self, dtype) -> int:
        """Bytes that one token takes in the cache over all layers, in the long run."""
        return token_bytes(self.cache_layout(), dtype)

    def kv_page_bytes(self, page_size: int, dtype) -> int:
        """Bytes of a page of `page_size` tokens over all layers."""
        return page_bytes(self.cache_layout(), page_size, dtype)

    def state_bytes(self, dtype) -> int:
        """Bytes that a sequence takes in the cache however long it is: the states of recurrent layers."""
        return state_bytes(self.cache_layout(), dtype)

    def source_bytes_per_token(self, dtype) -> int:
        """Bytes that one token of a source takes in the cache of an encoder-decoder."""
        return source_bytes(self.cache_layout(), dtype)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """A pre-norm decoder with grouped-query attention, rotary positions and sparse feed-forward layers.

    Fields carry their Hugging Face names; families give the defaults of their transformers class and add fields.
    `head_dim` and `num_key_value_heads` may be None when constructed; `__post_init__` fills them in.

    Raises CheckpointError for a value that no model can have.
    """

    SUPPORTED: ClassVar[dict[str, tuple]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False, None),
    }
    DEFAULT_THETA: ClassVar[float] = 1e4
    ROPE_TYPES: ClassVar[tuple[str, ...]] = ("default",)
    PARTIAL_ROTARY: ClassVar[bool] = False

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
    yarn: Yarn | None = None
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    num_experts: int
    num_experts_per_tok: int

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Config from the content of config.json; absent fields take the defaults of the transformers class.

        Raises CheckpointError naming the field for bad values, contradicting aliases and features not implemented.
        """
        theta, yarn = read_rope(hf, cls.DEFAULT_THETA, cls.ROPE_TYPES, cls.PARTIAL_ROTARY)
        return cls.read(hf, rope_theta=theta, yarn=yarn)

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

    @property
    def window(self) -> int | None:
        """Sliding window in tokens (a token sees itself and window - 1 before it), None for full attention."""
        return None

    @property
    def rotary_dim(self) -> int | None:
        """Components of a head that rotary embedding turns; None in a model without positions."""
        return self.head_dim

    @property
    def expert_width(self) -> int:
        """F, the hidden width of one expert."""
        return self.intermediate_size

    @property
    def shared_width(self) -> int:
        """Hidden width of the dense MLP beside the routed experts of a sparse layer; 0: none."""
        return 0

    @property
    def normalizes_router_weights(self) -> bool:
        """Whether the K chosen scores are divided by their sum."""
        return False

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Decoder layer number of each sparse layer, ascending; its index here is the MoE layer number."""
        return tuple(range(self.num_hidden_layers))

    def expert_spec(self) -> ExpertSpec:
        """What an expert computes and how its row is stored."""
        return SILU

    def expert_row_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one expert's tensors, output dimension first: gate_up [2F, D] (gate rows first), down [D, F].

        Names and order are those of `expert_spec().parts`, first of "gate_up", then of "down".
        """
        D, F = self.hidden_size, self.expert_width
        return {"gate_up": (2 * F, D), "down": (D, F)}

    def cache_layout(self) -> tuple[LayerCache, ...]:
        """What each decoder layer keeps of the past: keys and values of every token."""
        head = (self.num_key_value_heads, self.head_dim)
        return (LayerCache(paged={"k": head, "v": head}),) * self.num_hidden_layers
