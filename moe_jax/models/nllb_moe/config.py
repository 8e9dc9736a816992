"""Configuration of NLLB-MoE."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from moe_jax.engine.kv_cache import LayerCache
from moe_jax.models.config import ModelConfig, bad_field
from pallas_kernels.expert_ffn import ExpertSpec


@dataclass(frozen=True, kw_only=True)
class NllbMoeConfig(ModelConfig):
    """NLLB-MoE: an encoder and a decoder, each with experts in every `sparse_step`-th layer, two experts a token.

    The encoder's sparse layers come first among the MoE layers. Numbers of layers run through both stacks: the
    decoder's first layer is number `encoder_layers`.
    """

    SUPPORTED: ClassVar[dict[str, tuple]] = {
        "activation_function": ("relu",),
        "second_expert_policy": ("all",),  # "sampling" and "random" choose the second expert by lot
        "router_dtype": ("float32",),
        "is_encoder_decoder": (True,),
        "quantization_config": (None,),
    }
    encoder_decoder: ClassVar[bool] = True
    num_experts_per_tok: ClassVar[int] = 2

    vocab_size: int = 128112
    d_model: int = 1024
    encoder_layers: int = 12
    encoder_ffn_dim: int = 4096
    encoder_attention_heads: int = 16
    encoder_sparse_step: int = 4
    decoder_layers: int = 12
    decoder_ffn_dim: int = 4096
    decoder_attention_heads: int = 16
    decoder_sparse_step: int = 4
    max_position_embeddings: int = 1024
    init_std: float = 0.02
    scale_embedding: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int = 1
    decoder_start_token_id: int = 2
    num_experts: int = 128
    router_bias: bool = False
    router_ignore_padding_tokens: bool = False
    normalize_router_prob_before_dropping: bool = False
    batch_prioritized_routing: bool = False
    moe_eval_capacity_token_fraction: float = 1.0
    moe_token_dropout: float = 0.2

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Config from the content of config.json; absent fields take the defaults of the transformers class.

        Raises CheckpointError naming the field.
        """
        return cls.read(hf)

    def __post_init__(self):
        for name in ("vocab_size", "d_model", "max_position_embeddings", "num_experts"):
            self.check_integer(name)
        if self.d_model % 2 or self.d_model < 4:
            raise bad_field("d_model", self.d_model, "must be even and at least 4: half of it are sines")
        for stack in ("encoder", "decoder"):
            for name in ("layers", "ffn_dim", "attention_heads", "sparse_step"):
                self.check_integer(f"{stack}_{name}")
            heads, step = getattr(self, f"{stack}_attention_heads"), getattr(self, f"{stack}_sparse_step")
            if self.d_model % heads:
                raise bad_field(f"{stack}_attention_heads", heads, f"must divide d_model = {self.d_model}")
            if step > getattr(self, f"{stack}_layers"):
                layers = f"{stack}_layers = {getattr(self, f'{stack}_layers')}"
                raise bad_field(f"{stack}_sparse_step", step, f"no layer of the {stack} is sparse; at most {layers}")
        if self.num_experts < self.num_experts_per_tok:
            raise bad_field("num_experts", self.num_experts, "must be at least 2: each token takes two")
        for name in ("pad_token_id", "decoder_start_token_id"):
            token = getattr(self, name)
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise bad_field(name, token, f"must be an id below vocab_size = {self.vocab_size}")
        for name in ("init_std", "moe_eval_capacity_token_fraction"):
            self.check_positive(name)
        for name in (
            "scale_embedding",
            "tie_word_embeddings",
            "router_bias",
            "router_ignore_padding_tokens",
            "normalize_router_prob_before_dropping",
            "batch_prioritized_routing",
        ):
            self.check_boolean(name)
        dropout = self.moe_token_dropout
        if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
            raise bad_field("moe_token_dropout", dropout, "must be a number from 0 to below 1")
        if self.router_ignore_padding_tokens and self.moe_eval_capacity_token_fraction < 1:
            raise bad_field(
                "router_ignore_padding_tokens",
                True,
                "lets padding take room from tokens, which is not supported: set it to false, or "
                "moe_eval_capacity_token_fraction to 1.0",
            )

    @property
    def hidden_size(self) -> int:
        """D."""
        return self.d_model

    @property
    def head_dim(self) -> int:
        """H, the width of a head of the decoder."""
        return self.d_model // self.decoder_attention_heads

    @property
    def window(self) -> None:
        """No sliding window."""
        return None

    @property
    def embedding_scale(self) -> float:
        """Factor on the embedding of a token."""
        return math.sqrt(self.d_model) if self.scale_embedding else 1.0

    @property
    def encoder_sparse(self) -> tuple[int, ...]:
        """Numbers of the encoder's sparse layers."""
        return tuple(range(self.encoder_sparse_step - 1, self.encoder_layers, self.encoder_sparse_step))

    @property
    def decoder_sparse(self) -> tuple[int, ...]:
        """Numbers of the decoder's sparse layers within the decoder."""
        return tuple(range(self.decoder_sparse_step - 1, self.decoder_layers, self.decoder_sparse_step))

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Number of each sparse layer, through both stacks."""
        return (*self.encoder_sparse, *(self.encoder_layers + layer for layer in self.decoder_sparse))

    @property
    def encoder_moe_layers(self) -> int:
        return len(self.encoder_sparse)

    @property
    def expert_width(self) -> int:
        """F of the rows: the wider of both stacks' experts; the others' rows end in zeros, which changes nothing."""
        return max(self.encoder_ffn_dim, self.decoder_ffn_dim)

    def expert_spec(self) -> ExpertSpec:
        """What an expert computes and how its row is stored."""
        return ExpertSpec(activation="relu", biases=True)

    def expert_row_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one expert's tensors: gate_up [F, D] (there is no gate), gate_up_bias [F], down [D, F], down_bias
        [D]."""
        rows = self.expert_spec().row_tensors(self.expert_width, self.d_model)
        return {name: shape for name, (shape, _) in rows.items()}

    def cache_layout(self) -> tuple[LayerCache, ...]:
        """Keys and values of every token of the target in pages, and of every token of the source beside them."""
        head = (self.decoder_attention_heads, self.head_dim)
        layer = LayerCache(paged={"k": head, "v": head}, source={"source_k": head, "source_v": head})
        return (layer,) * self.decoder_layers
