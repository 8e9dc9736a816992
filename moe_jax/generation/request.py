"""One call as the engine takes it: what generation continues and, in an encoder-decoder, the source it is told of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_jax.errors import InputError
from moe_jax.generation.inputs import PreparedBatch, assemble, prepare
from moe_jax.generation.sampling import SamplingParams
from moe_jax.generation.text import Tokenizer, require_tokenizer
from moe_jax.models.config import ModelConfig


@dataclass(frozen=True)
class Request:
    """A checked `generate` call.

    Attributes:
        batch: what the new tokens follow: the prompts, or the start token of each target.
        params: how they are chosen.
        source: the encoder's input; None without an encoder.
    """

    batch: PreparedBatch
    params: SamplingParams
    source: PreparedBatch | None = None

    def result(self, new_ids: Sequence[Sequence[int]], tokenizer: Tokenizer | None) -> Any:
        """What `generate` returns for the new ids of each row: texts for texts, else int32 ids."""
        if self.batch.from_text:
            texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in new_ids]
            return texts if self.batch.was_batched else texts[0]
        out = assemble(self.batch, new_ids, self.params.fill_token_id)
        return out if self.batch.was_batched else out[0]


def make_request(
    inputs: Any,
    params: SamplingParams,
    *,
    cfg: ModelConfig,
    max_length: int,
    max_batch: int,
    attention_mask: Any = None,
    tokenizer: Tokenizer | None = None,
) -> Request:
    """Checks a `generate` call; arguments as `prepare` takes them.

    Raises InputError, ConfigError: also for a batch larger than `max_batch`, and for a start or forced token beyond the
    vocabulary.
    """
    batch = prepare(
        inputs,
        vocab_size=cfg.vocab_size,
        max_length=max_length,
        params=params,
        new_tokens=0 if cfg.encoder_decoder else None,
        attention_mask=attention_mask,
        tokenizer=tokenizer,
    )
    if len(batch.prompts) > max_batch:
        raise InputError(
            f"a batch of {len(batch.prompts)} prompts is larger than max_batch={max_batch}: "
            "split it, or raise max_batch in the configuration"
        )
    if params.stop:
        require_tokenizer(tokenizer, "a stop string", "end sequences by eos_token_id")
    if not cfg.encoder_decoder:
        return Request(batch, params)
    return Request(_targets(batch, params, cfg, max_length), params, batch)


def _targets(source: PreparedBatch, params: SamplingParams, cfg: ModelConfig, max_length: int) -> PreparedBatch:
    """The start token of a target for each source."""
    start = cfg.decoder_start_token_id if params.decoder_start_token_id is None else params.decoder_start_token_id
    for name, token in (("decoder_start_token_id", start), ("forced_bos_token_id", params.forced_bos_token_id)):
        if token is not None and token >= cfg.vocab_size:
            raise InputError(f"{name}={token} is outside the vocabulary: ids go from 0 to {cfg.vocab_size - 1}")
    new_tokens = params.new_tokens(1)
    if 1 + new_tokens > max_length:
        raise InputError(
            f"the start token and max_new_tokens={new_tokens} are more than the limit of {max_length}: ask for at most "
            f"{max_length - 1} new tokens, or raise max_sequence_length if the model allows it"
        )
    ids = np.full((len(source.prompts), 1), start, np.int32)
    return PreparedBatch(tuple(ids), ids, source.was_batched, source.from_text, new_tokens)


def prepare_forward(
    input_ids: Any,
    *,
    cfg: ModelConfig,
    max_length: int,
    attention_mask: Any = None,
    decoder_input_ids: Any = None,
    tokenizer: Tokenizer | None = None,
) -> tuple[PreparedBatch, PreparedBatch | None]:
    """(the tokens whose logits are wanted, the sources or None) of a `forward` call. Raises InputError."""
    options = {"vocab_size": cfg.vocab_size, "max_length": max_length, "tokenizer": tokenizer}
    batch = prepare(input_ids, attention_mask=attention_mask, **options)
    if not cfg.encoder_decoder:
        if decoder_input_ids is not None:
            raise InputError("decoder_input_ids is for encoder-decoder models, this one has no encoder: leave it out")
        return batch, None
    if decoder_input_ids is None:
        raise InputError(
            "decoder_input_ids is missing: an encoder-decoder gives the logits of a target, whose first token is "
            f"usually decoder_start_token_id = {cfg.decoder_start_token_id}"
        )
    try:
        targets = prepare(decoder_input_ids, **options)
    except InputError as error:
        raise InputError(f"decoder_input_ids: {error}") from error
    if len(targets.prompts) != len(batch.prompts):
        raise InputError(
            f"decoder_input_ids has {len(targets.prompts)} rows and input_ids {len(batch.prompts)}: each source needs "
            "one target"
        )
    return targets, batch


def spread(rows: Sequence[np.ndarray], batch: PreparedBatch, attention_mask: Any = None) -> np.ndarray:
    """Values of the tokens of each prompt, [T_b, V], where `batch` had them: float32 [B, T, V], zeros on padding.

    [T, V] if the caller gave one sequence. Without a mask, shorter prompts (texts) stand on the right.
    """
    B, T = batch.input_ids.shape
    out = np.zeros((B, T, rows[0].shape[-1]), np.float32)
    mask = None if attention_mask is None else np.asarray(attention_mask, bool).reshape(B, T)
    for row, values in enumerate(rows):
        out[row, np.arange(T - len(values), T) if mask is None else mask[row]] = values
    return out if batch.was_batched else out[0]
