"""Prompts in, token arrays out: everything that can be wrong with a prompt is found here, before any work is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_jax.errors import InputError, warn
from moe_jax.generation.sampling import SamplingParams
from moe_jax.generation.text import Tokenizer, encode, require_tokenizer


@dataclass(frozen=True)
class PreparedBatch:
    """Checked prompts.

    Attributes:
        prompts: B arrays i32 [T_b], without padding.
        input_ids: i32 [B, T], as given (padding included); texts of different lengths are padded on the left.
        was_batched: False if the caller gave one sequence without a batch dimension, or one text.
        from_text: True if the caller gave text.
        max_new_tokens: most tokens to generate; 0 for a forward pass.
    """

    prompts: tuple[np.ndarray, ...]
    input_ids: np.ndarray
    was_batched: bool
    from_text: bool
    max_new_tokens: int

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each prompt without padding, i32 [B]."""
        return np.array([len(prompt) for prompt in self.prompts], np.int32)


def prepare(
    inputs: Any,
    *,
    vocab_size: int,
    max_length: int,
    params: SamplingParams | None = None,
    new_tokens: int | None = None,
    attention_mask: Any = None,
    tokenizer: Tokenizer | None = None,
) -> PreparedBatch:
    """Checks prompts and strips their padding.

    Without an attention mask, padding is found as transformers' `generate` finds it: where a batch holds
    `params.pad_token_id` and that is not an EOS id, these tokens are padding (a warning says so once). If it is an EOS
    id too, all tokens count as text.

    Args:
        inputs: ids as a list, list of lists, NumPy or JAX array or anything with `__array__` (a torch tensor), of shape
            [T] or [B, T] and an integer dtype; or a text, or a list of texts.
        vocab_size: ids must be in [0, vocab_size).
        max_length: most tokens of prompt and output together.
        params: of the request; None for a forward pass, which generates nothing and takes every token as text unless
            there is a mask.
        new_tokens: most tokens to generate after the prompt, 0 for a source of an encoder-decoder; None: `params` say.
        attention_mask: of the shape of the ids; 1 for text, 0 for padding, which must be on the left or on the right.
        tokenizer: needed for text.

    Raises:
        InputError: names the row, the position, the value and the remedy.
        ConfigError: `params.max_length` decides how much is generated, and the prompt fills it already.
    """
    texts = _as_texts(inputs)
    if texts is not None:
        if attention_mask is not None:
            raise InputError("attention_mask goes with input_ids; a text has no padding: leave attention_mask out")
        prompts = _encode(texts, require_tokenizer(tokenizer, "a text prompt", "use token ids (input_ids)"))
        ids = _pad_left(prompts, 0 if params is None else params.fill_token_id)
        was_batched = not isinstance(inputs, str)
    else:
        ids = _as_ids(inputs)
        was_batched = ids.ndim == 2
        mask = None if attention_mask is None else _as_mask(attention_mask, ids.shape)
        ids = np.atleast_2d(ids)
        guessed = mask is None
        if guessed:
            mask = _guess_mask(ids, params)
        prompts = _strip(ids, np.atleast_2d(mask), guessed)
    max_new_tokens = 0 if params is None else params.new_tokens(ids.shape[1]) if new_tokens is None else new_tokens
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            raise InputError(f"prompt {row} is empty: it needs at least one token")
        wrong = np.flatnonzero((prompt < 0) | (prompt >= vocab_size))
        if len(wrong):
            raise InputError(
                f"token id {prompt[wrong[0]]} at position {wrong[0]} of prompt {row} (padding not counted) is outside "
                f"the vocabulary: ids go from 0 to {vocab_size - 1}"
            )
        if len(prompt) + max_new_tokens > max_length:
            raise InputError(_too_long(row, len(prompt), max_new_tokens, max_length))
    # Ids under a mask may be anything (-100 is common): they are never looked up, but must fit the output's dtype.
    ids = np.clip(ids, np.iinfo(np.int32).min, np.iinfo(np.int32).max)
    return PreparedBatch(
        prompts=tuple(prompt.astype(np.int32) for prompt in prompts),
        input_ids=ids.astype(np.int32),
        was_batched=was_batched,
        from_text=texts is not None,
        max_new_tokens=max_new_tokens,
    )


def assemble(batch: PreparedBatch, new_ids: Sequence[Sequence[int]], pad_token_id: int) -> np.ndarray:
    """Prompt and new tokens in the layout of transformers' `generate`.

    Args:
        batch: from `prepare`.
        new_ids: new tokens of each row, of any lengths.
        pad_token_id: fills rows on the right that ended earlier than others.

    Returns:
        i32 [B, T + longest new_ids]; the prompts as given, padding included.
    """
    if len(new_ids) != len(batch.prompts):
        raise InputError(f"new_ids has {len(new_ids)} rows for a batch of {len(batch.prompts)}")
    B, T = batch.input_ids.shape
    result = np.full((B, T + max(map(len, new_ids))), pad_token_id, np.int32)
    result[:, :T] = batch.input_ids
    for row, tokens in zip(result, new_ids, strict=True):
        row[T : T + len(tokens)] = tokens
    return result


def _too_long(row: int, length: int, max_new_tokens: int, max_length: int) -> str:
    start = f"prompt {row} has {length} tokens"
    if max_new_tokens:
        start += f" and max_new_tokens={max_new_tokens}"
    room = max_length - length
    shorter = f"ask for at most {room} new tokens, shorten it" if max_new_tokens and room > 0 else "shorten it"
    return (
        f"{start}, more than the limit of {max_length}: {shorter}, or raise max_sequence_length if the model allows it"
    )


def _as_texts(inputs: Any) -> list[str] | None:
    """The texts if the input is text, None if it is ids; a mixture is an error."""
    if isinstance(inputs, str):
        return [inputs]
    if not isinstance(inputs, list | tuple) or not any(isinstance(item, str) for item in inputs):
        return None
    for row, item in enumerate(inputs):
        if not isinstance(item, str):
            raise InputError(f"prompt {row} is {type(item).__name__} among texts: give either all texts or all ids")
    return list(inputs)


def _encode(texts: list[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    return [np.asarray(encode(tokenizer, text, f"prompt {row}"), np.int64) for row, text in enumerate(texts)]


def _pad_left(prompts: list[np.ndarray], pad: int) -> np.ndarray:
    longest = max(map(len, prompts))
    return np.stack([np.pad(prompt, (longest - len(prompt), 0), constant_values=pad) for prompt in prompts])


def _as_array(name: str, value: Any) -> np.ndarray:
    """A NumPy array of `value`, refusing what NumPy cannot hold as one."""
    if value is None or isinstance(value, dict) or (hasattr(value, "keys") and not hasattr(value, "__array__")):
        raise InputError(
            f"{name} of type {type(value).__name__} is not understood: give token ids or text "
            "(of a tokenizer's output, its input_ids and attention_mask)"
        )
    try:
        if isinstance(value, list | tuple):
            value = [np.asarray(item) for item in value]
            lengths = [len(item) if item.ndim else 1 for item in value]
            if len({item.shape[:1] for item in value}) > 1:
                raise InputError(
                    f"rows of {name} differ in length ({', '.join(map(str, lengths[:8]))}): pad the shorter ones on "
                    "the left and pass an attention_mask with 0 for padding"
                )
        return np.asarray(value)
    except InputError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:  # deeper ragged lists; tensors of another device
        raise InputError(f"{name} cannot be read as an array: {error}") from error


def _as_ids(inputs: Any) -> np.ndarray:
    if isinstance(inputs, bytes | bytearray):
        raise InputError("the prompt is bytes: decode it to a text first, as in prompt.decode()")
    ids = _as_array("input_ids", inputs)
    if ids.ndim == 0 or ids.ndim > 2:
        raise InputError(f"input_ids has shape {ids.shape}: it must be [tokens] or [batch, tokens]; a text is a str")
    if ids.ndim == 2 and ids.shape[0] == 0:
        raise InputError("input_ids is a batch of 0 sequences: give at least one")
    if ids.size == 0:
        raise InputError("prompt 0 is empty: it needs at least one token")
    if ids.dtype.kind not in "iu":
        raise InputError(f"input_ids has dtype {ids.dtype}: token ids must be integers")
    if ids.dtype == np.uint64 and ids.max() > np.iinfo(np.int64).max:
        raise InputError(f"token id {ids.max()} is outside the vocabulary")
    return ids.astype(np.int64)


def _as_mask(attention_mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    mask = _as_array("attention_mask", attention_mask)
    if mask.shape != shape:
        raise InputError(f"attention_mask has shape {mask.shape}, input_ids has {shape}: they must be equal")
    if mask.dtype.kind not in "biuf" or not np.isin(mask, (0, 1)).all():
        raise InputError("attention_mask must hold only 1 (text) and 0 (padding)")
    return mask.astype(bool)


def _guess_mask(ids: np.ndarray, params: SamplingParams | None) -> np.ndarray:
    pad = None if params is None else params.pad_token_id
    if pad is None or not (ids == pad).any():
        return np.ones(ids.shape, bool)
    if pad in params.eos_token_id:
        if len(ids) > 1:  # alone, a sequence needs no padding: then the token is meant
            warn(
                "input_ids holds the padding token, which is also an EOS token, and there is no attention_mask: "
                "all tokens count as text. Pass attention_mask if some are padding"
            )
        return np.ones(ids.shape, bool)
    warn(
        "input_ids holds the padding token and there is no attention_mask: padding is left out of the prompt. "
        "Pass attention_mask to say which tokens count"
    )
    return ids != pad


def _strip(ids: np.ndarray, mask: np.ndarray, guessed: bool) -> list[np.ndarray]:
    prompts = []
    for row, (tokens, keep) in enumerate(zip(ids, mask, strict=True)):
        kept = np.flatnonzero(keep)
        if len(kept) and kept[-1] - kept[0] + 1 != len(kept):
            hole = kept[0] + int(np.argmin(keep[kept[0] :]))
            reason = "holds the padding token" if guessed else "has a 0 in attention_mask"
            raise InputError(
                f"prompt {row} {reason} at position {hole}, between tokens: padding must be on the left or on the right"
                + ("; if the token is meant, pass attention_mask with 1 there" if guessed else "")
            )
        prompts.append(tokens[keep])
    return prompts
