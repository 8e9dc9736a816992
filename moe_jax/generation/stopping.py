"""When a sequence ends: EOS ids on the device, stop strings on the host at chunk edges.

What is kept of a sequence that ends (ids, text, trace): everything up to and including the token that ends it. For
EOS that is the EOS id. For a stop string it is the token that completes it, so the text ends with the stop string and,
if that token says more ("st" + "opera" for the stop string "stop"), with the rest of that token. This is what
transformers' `generate` returns. Tokens that a chunk generated past it are the *overshoot*; they are cut and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.generation.text import IncrementalDecoder, Tokenizer

NO_TOKEN = -1  # fills a row of an EOS array: no token has this id
_MIN_EOS_WIDTH = 4


def eos_array(eos_sets: Sequence[Sequence[int]]) -> np.ndarray:
    """EOS ids of each row as one array that a compiled step takes.

    Args:
        eos_sets: the EOS ids of each of B rows; an empty set never stops.

    Returns:
        i32 [B, W], filled up with NO_TOKEN. W is a power of two, at least 4, so that other ids rarely recompile.
    """
    width = _MIN_EOS_WIDTH
    while width < max((len(ids) for ids in eos_sets), default=0):
        width *= 2
    result = np.full((len(eos_sets), width), NO_TOKEN, np.int32)
    for row, ids in zip(result, eos_sets, strict=True):
        row[: len(ids)] = ids
    return result


def is_eos(tokens: jax.Array, eos: jax.Array) -> jax.Array:
    """Which rows end: bool [B] from tokens i32 [B] (>= 0) and `eos_array`'s i32 [B, W]."""
    return jnp.any(tokens[:, None] == eos, axis=-1)


@dataclass(frozen=True)
class StopMatch:
    """A stop string was found.

    Attributes:
        stop: the stop string; of several completed by one token the one that begins first.
        kept: new tokens of the sequence that stay, the completing one included.
        overshoot: tokens after it, to be cut.
    """

    stop: str
    kept: int
    overshoot: int


class StopMatcher:
    """Finds the first token of one sequence that completes a stop string.

    Looks at decoded text with special tokens in it, so a stop string may span tokens and may be a special token's name.
    As in transformers, a stop string may begin in the prompt, but it must end in a new token.

    Args:
        tokenizer: of transformers.
        stops: stop strings, none empty.
        prompt_ids: ids of the prompt without padding.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], prompt_ids: Sequence[int] = ()):
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops))
        self._decoder = IncrementalDecoder(tokenizer)
        # A token has at least one byte and a character at most four: these ids cover the longest stop string.
        self._tail = self._decoder.push(prompt_ids[-4 * self._longest :])  # certain text before the pending one
        self._pending = self._decoder.pending()
        self._seen = 0
        self._match: StopMatch | None = None

    def push(self, ids: Iterable[int]) -> StopMatch | None:
        """Adds new tokens; returns the match if there is one now.

        Once there is a match, later tokens only add to its overshoot.
        """
        ids = [int(token) for token in ids]
        if self._match is not None:
            self._match = StopMatch(self._match.stop, self._match.kept, self._match.overshoot + len(ids))
            return self._match
        for done, token in enumerate(ids, start=1):
            self._seen += 1
            stop = self._push_token(token)
            if stop is not None:
                self._match = StopMatch(stop, self._seen, len(ids) - done)
                break
        return self._match

    def _push_token(self, token: int) -> str | None:
        """Looks at pending text too: waiting until it is certain would find a stop string a token late."""
        piece = self._decoder.push([token])
        pending = self._decoder.pending()
        text = self._tail + piece + pending
        # A match must reach past what was there before this token (of which a last, incomplete character may change).
        before = len(self._tail) + _common_prefix(self._pending, piece + pending)
        found = []
        for stop in self._stops:
            start = text.find(stop, max(0, before - len(stop) + 1))
            if start >= 0:
                found.append((start, stop))
        self._tail = (self._tail + piece)[-self._longest :]
        self._pending = pending
        return min(found)[1] if found else None


def _common_prefix(a: str, b: str) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
