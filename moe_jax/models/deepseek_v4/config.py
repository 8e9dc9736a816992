"""Configuration of DeepSeek-V4, from the released config.json or the one that transformers saves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from moe_jax.engine.kv_cache import LayerCache
from moe_jax.layers.compressed_attention import Compression, compressed_cache
from moe_jax.layers.rope import Rope
from moe_jax.models.config import DecoderConfig, bad_field, read_rope
from pallas_kernels.expert_ffn import ExpertSpec

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
HASH, SCORED = "hash_moe", "moe"

# Tokens an entry, by kind of layer, and the kind of a layer by its entry in `compress_ratios`.
RATES = {SPARSE: 4, HEAVY: 128}
KINDS = {0: SLIDING, 4: SPARSE, 128: HEAVY}

# Fields of V4.1, which shares entries between layers and adds n-gram memories: V4's formulas would give nonsense.
FOREIGN = ("kv_source_", "index_source_", "candidate_", "engram_", "gate_temp", "text_config")


@dataclass(frozen=True, kw_only=True)
class DeepseekV4Config(DecoderConfig):
    """DeepSeek-V4: hyper-connections, windows with compressed entries of the past, hash and scored routers.

    `layer_types` says how each layer attends, `mlp_layer_types` how it routes. Released files say the same as
    `compress_ratios` (a number a layer, some more for the layers that predict further tokens) and `num_hash_layers`.
    `rope_theta` is the base of sliding layers; the others have `compress_rope_theta` and `yarn`.
    """

    SUPPORTED: ClassVar[dict[str, tuple]] = DecoderConfig.SUPPORTED | {
        "mlp_bias": (False, None),
        "num_key_value_heads": (1,),
        "n_shared_experts": (1,),
        "scoring_func": ("sqrtsoftplus",),
        "norm_topk_prob": (True,),
        "topk_method": ("noaux_tc", None),
        "tie_word_embeddings": (False,),
    }
    ROPE_TYPES: ClassVar[tuple[str, ...]] = ("default", "yarn")
    attention_kernel: ClassVar[bool] = False  # compressed entries have masks of their own

    vocab_size: int = 129280
    hidden_size: int = 4096
    intermediate_size: int | None = None
    num_hidden_layers: int = 43
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 1
    head_dim: int | None = 512
    max_position_embeddings: int = 1048576
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e4
    num_experts: int = 256
    num_experts_per_tok: int = 6
    moe_intermediate_size: int = 2048
    q_lora_rank: int = 1024
    qk_rope_head_dim: int = 64
    o_groups: int = 8
    o_lora_rank: int = 1024
    sliding_window: int = 128
    layer_types: tuple[str, ...]
    sparse_rate: int
    heavy_rate: int
    compress_rope_theta: float
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512
    mlp_layer_types: tuple[str, ...]
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        foreign = sorted(name for name, value in hf.items() if name.startswith(FOREIGN) and value is not None)
        if foreign:
            remedy = "not part of DeepSeek-V4; a later architecture, such as V4.1, is not supported"
            raise bad_field(foreign[0], hf[foreign[0]], remedy)
        count = hf.get("num_hidden_layers", cls.num_hidden_layers)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise bad_field("num_hidden_layers", count, "must be an integer of at least 1")
        return cls.read(
            hf,
            intermediate_size=None,
            layer_types=_read_layers(hf, count),
            mlp_layer_types=_read_routers(hf, count),
            qk_rope_head_dim=_read_rotary_dim(hf, hf.get("head_dim", cls.head_dim)),
            **_read_rates(hf),
            **_read_ropes(hf),
        )

    def __post_init__(self):
        object.__setattr__(self, "intermediate_size", self.moe_intermediate_size)
        for name in (
            "moe_intermediate_size",
            "q_lora_rank",
            "qk_rope_head_dim",
            "o_groups",
            "o_lora_rank",
            "sparse_rate",
            "heavy_rate",
            "index_n_heads",
            "index_head_dim",
            "index_topk",
            "hc_mult",
            "hc_sinkhorn_iters",
        ):
            self.check_integer(name)
        super().__post_init__()
        for name in ("routed_scaling_factor", "swiglu_limit", "hc_eps", "compress_rope_theta"):
            self.check_positive(name)
        rotary = self.qk_rope_head_dim
        for name in ("head_dim", "index_head_dim"):
            if rotary % 2 or rotary > getattr(self, name):
                remedy = f"must be even and at most {name} = {getattr(self, name)}"
                raise bad_field("qk_rope_head_dim", rotary, remedy)
        if self.num_attention_heads % self.o_groups:
            raise bad_field("o_groups", self.o_groups, f"must divide num_attention_heads = {self.num_attention_heads}")
        for kind, rate in ((SPARSE, self.sparse_rate), (HEAVY, self.heavy_rate)):
            if rate & (rate - 1):
                raise bad_field(f"compress_rates.{kind}", rate, "must be a power of two, so that windows fit pages")
        if set(self.layer_types) == {SLIDING}:
            remedy = f"at least one layer must be {SPARSE!r} or {HEAVY!r}"
            raise bad_field("layer_types", list(self.layer_types), remedy)

    @property
    def window(self) -> int:
        return self.sliding_window

    @property
    def attention_sinks(self) -> bool:
        return True

    @property
    def rotary_dim(self) -> int:
        return self.qk_rope_head_dim

    @property
    def expert_width(self) -> int:
        return self.moe_intermediate_size

    @property
    def shared_width(self) -> int:
        return self.moe_intermediate_size

    @property
    def normalizes_router_weights(self) -> bool:
        return True

    def expert_spec(self) -> ExpertSpec:
        return ExpertSpec(activation="clamped_silu", limit=float(self.swiglu_limit))

    def rope(self, layer: int) -> Rope:
        """Rotary embedding of decoder layer `layer`."""
        if self.layer_types[layer] == SLIDING:
            return Rope(self.qk_rope_head_dim, self.rope_theta)
        return Rope(self.qk_rope_head_dim, self.compress_rope_theta, self.yarn)

    def compression(self, layer: int) -> Compression | None:
        """How decoder layer `layer` compresses the past; None in a sliding layer."""
        kind = self.layer_types[layer]
        if kind == SLIDING:
            return None
        if kind == HEAVY:
            return Compression(self.heavy_rate)
        return Compression(self.sparse_rate, (self.index_n_heads, self.index_head_dim, self.index_topk))

    def cache_layout(self) -> tuple[LayerCache, ...]:
        """A window of tokens, and compressed entries with the tokens that wait for theirs."""
        return tuple(
            compressed_cache(self.head_dim, self.sliding_window, self.compression(layer))
            for layer in range(self.num_hidden_layers)
        )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _a_layer(name: str, given: Any, count: int, allowed: Sequence) -> tuple:
    """The list `given` of the field `name`, one of `allowed` for each of the `count` layers; more are cut off."""
    shown = ", ".join(map(repr, allowed))
    if not isinstance(given, list | tuple):
        raise bad_field(name, given, f"must be a list with one of {shown} for each layer")
    if len(given) < count or any(value not in allowed for value in given[:count]):
        raise bad_field(name, given, f"must hold one of {shown} for each of the {count} layers")
    return tuple(given[:count])


def _read_layers(hf: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """Kinds of the layers: `layer_types`, else `compress_ratios`, else transformers' default."""
    types, ratios = hf.get("layer_types"), hf.get("compress_ratios")
    by_ratio = None
    if ratios is not None:
        by_ratio = tuple(KINDS[ratio] for ratio in _a_layer("compress_ratios", ratios, count, tuple(KINDS)))
    if types is not None:
        kinds = _a_layer("layer_types", types, count, (SLIDING, SPARSE, HEAVY))
        if by_ratio is not None and by_ratio != kinds:
            raise bad_field("compress_ratios", ratios, "disagrees with layer_types; keep one of them")
        return kinds
    if by_ratio is not None:
        return by_ratio
    return tuple(SPARSE if i >= 2 and i % 2 else HEAVY for i in range(count))


def _read_rates(hf: Mapping[str, Any]) -> dict[str, int]:
    """`sparse_rate` and `heavy_rate`: of `compress_rates`, else those of all releases."""
    rates = hf.get("compress_rates")
    rates = {} if rates is None else rates
    if not isinstance(rates, Mapping) or not rates.keys() <= RATES.keys():
        raise bad_field("compress_rates", rates, f"must be an object with {SPARSE!r} and {HEAVY!r}")
    rates = RATES | dict(rates)
    for kind, rate in rates.items():
        if not _is_integer(rate) or rate < 1:
            raise bad_field(f"compress_rates.{kind}", rate, "must be an integer of at least 1")
    return {"sparse_rate": rates[SPARSE], "heavy_rate": rates[HEAVY]}


def _read_routers(hf: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """Kinds of the routers: `mlp_layer_types`, else hash layers first, `num_hash_layers` of them (3)."""
    types = hf.get("mlp_layer_types")
    if types is not None:
        return _a_layer("mlp_layer_types", types, count, (HASH, SCORED))
    hashed = hf.get("num_hash_layers", 3)
    if not _is_integer(hashed) or hashed < 0:
        raise bad_field("num_hash_layers", hashed, "must be an integer of at least 0")
    return tuple(HASH if i < hashed else SCORED for i in range(count))


def _read_rotary_dim(hf: Mapping[str, Any], head_dim: Any) -> int:
    """Components that turn: `qk_rope_head_dim`, else a factor of the head's width, 64 of 512 if none is given."""
    given = hf.get("qk_rope_head_dim")
    if given is not None:
        return given
    factor = hf.get("partial_rotary_factor")
    rope = hf.get("rope_parameters")
    if factor is None and isinstance(rope, Mapping):
        part = rope.get("main")
        factor = (part if isinstance(part, Mapping) else rope).get("partial_rotary_factor")
    factor = 64 / 512 if factor is None else factor
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise bad_field("partial_rotary_factor", factor, "must be above 0 and at most 1")
    if not _is_integer(head_dim):
        raise bad_field("head_dim", head_dim, "must be an integer of at least 1")
    return int(head_dim * factor)


def _read_ropes(hf: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_theta` of sliding layers, and `compress_rope_theta` and `yarn` of the others.

    Files of transformers hold both under "main" and "compress". Released files have one YaRN object, which is for
    compressed layers, and the bases `rope_theta` and `compress_rope_theta` beside it.
    """
    name = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    rope = hf.get(name) or {}
    if not isinstance(rope, Mapping):
        raise bad_field(name, rope, "must be an object")
    main, compress = rope.get("main"), rope.get("compress")
    if not (isinstance(main, Mapping) and isinstance(compress, Mapping)):
        theta = hf.get("compress_rope_theta", 160000.0)
        if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 1:
            raise bad_field("compress_rope_theta", theta, "must be a number above 1")
        main, compress = {"rope_theta": hf.get("rope_theta", 1e4)}, rope | {"rope_theta": theta}
    # DeepSeek's own code turns with plain cosines and sines, whatever YaRN's formula for their magnitude says.
    compress = {"attention_factor": 1.0} | compress
    longest = {"max_position_embeddings": hf.get("max_position_embeddings", DeepseekV4Config.max_position_embeddings)}
    theta, _ = read_rope({"rope_parameters": main}, 1e4, ("default",), partial=True)
    types = DeepseekV4Config.ROPE_TYPES
    compress_theta, yarn = read_rope(longest | {name: compress}, 160000.0, types, partial=True)
    return {"rope_theta": theta, "compress_rope_theta": compress_theta, "yarn": yarn}
