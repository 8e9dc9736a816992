"""Text out of token ids, piece by piece: a checkpoint's tokenizer, an incremental decoder, transformers' streamers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from moe_jax.errors import InputError, TokenizerError

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no UTF-8, or no complete character yet

# A directory without any of these files has no tokenizer; with one of them, failing to load it is an error.
_SETTINGS = "tokenizer_config.json"
_SENTENCEPIECE = "*.model"
_VOCABULARIES = ("tokenizer.json", _SENTENCEPIECE, "vocab.json", "*.tiktoken")
_REMEDY = "Run on token ids (input_ids) or"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_KEEP = 4  # ids in the decoder's window before it looks for older ones to forget


class Tokenizer(Protocol):
    """What this package uses of a transformers tokenizer."""

    def __call__(self, text: str, *, verbose: bool = True) -> Any: ...
    def decode(self, ids: list[int], **options: Any) -> str: ...
    def convert_ids_to_tokens(self, token_id: int) -> str | None: ...


def load_tokenizer(directory: str | os.PathLike) -> Tokenizer | None:
    """The tokenizer of a checkpoint directory through transformers' AutoTokenizer; needs no torch, no network.

    Code that comes with a checkpoint is never run.

    Returns:
        The tokenizer, or None if the directory holds no tokenizer files.

    Raises:
        TokenizerError: there are tokenizer files, but they cannot be loaded.
    """
    directory = Path(directory)
    vocabularies = sorted(path.name for pattern in _VOCABULARIES for path in directory.glob(pattern))
    if not vocabularies:
        if not (directory / _SETTINGS).is_file():
            return None
        raise TokenizerError(
            f"{directory} has {_SETTINGS} but no vocabulary. {_REMEDY} put the release's tokenizer.json beside it"
        )
    # transformers would give up on such a file with advice about another package.
    if all(fnmatch(name, _SENTENCEPIECE) for name in vocabularies) and find_spec("sentencepiece") is None:
        raise TokenizerError(
            f"{directory} has a tokenizer only in SentencePiece's format ({', '.join(vocabularies)}), and the package "
            f"that reads it is not installed. {_REMEDY} put tokenizer.json beside it, or pip install sentencepiece"
        )
    auto_tokenizer = _import_auto_tokenizer()
    try:
        return auto_tokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # from_pretrained raises a dozen unrelated types for a broken file
        raise TokenizerError(
            f"the tokenizer in {directory} cannot be loaded: {error}. {_REMEDY} repair its files"
        ) from error


def _import_auto_tokenizer() -> Any:
    """transformers says at import that torch is missing, which is of no interest here: its advice is off meanwhile."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        from transformers import AutoTokenizer
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    return AutoTokenizer


def require_tokenizer(tokenizer: Tokenizer | None, what: str, instead: str) -> Tokenizer:
    """`tokenizer`; without one TokenizerError: `what` (such as "a text prompt") needs one, and what to do `instead`."""
    if tokenizer is None:
        raise TokenizerError(f"{what} needs a tokenizer, and the checkpoint has none that could be loaded: {instead}")
    return tokenizer


def encode(tokenizer: Tokenizer, text: str, what: str, **settings: Any) -> list[int]:
    """The ids of a text; `settings` go to the tokenizer.

    Raises InputError, naming the text by `what`, where it holds half a surrogate pair: Python makes these of bytes that
    are no UTF-8, and of JSON escapes that were cut, and tokenizers cannot read them.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{what} holds {text[error.start]!r} at character {error.start}, half a surrogate pair and no character: "
            "decode its bytes as what they are, or with errors='replace'"
        ) from error
    # verbose=False: the length is checked by the caller, against the limit that counts, with an error that says what to
    # do.
    return list(tokenizer(text, verbose=False, **settings)["input_ids"])


class IncrementalDecoder:
    """Turns ids into text as they come, at a constant cost a token.

    The pieces are valid UTF-8 and, with `flush`, concatenate exactly to
    `tokenizer.decode(all_ids, skip_special_tokens=...)`. Only text that no later id can change is given out. What has
    to wait, for each kind of tokenizer:

    * byte-level BPE: the last character while it is incomplete (a character may span several ids);
    * byte fallback of SentencePiece (`<0xE2>`): the run of byte tokens, because one wrong byte spoils the whole run;
    * clean-up of spaces before punctuation: the last few characters, if the tokenizer does that.

    Ids are decoded behind a few earlier ones, never alone, since the first token of a text loses its leading space.

    Args:
        tokenizer: of transformers.
        skip_special_tokens: leave special tokens out, as in `tokenizer.decode`.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = False):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._cleans = _cleans_up(tokenizer)
        self._kind: dict[int, str] = {}  # id -> "text", "byte" or "silent"
        self._reset()

    def _reset(self) -> None:
        self._window: list[int] = []  # the last ids; older ones cannot change what is to come
        self._run: list[int] = []  # byte tokens at the end, waiting for a token that is none
        self._shown = 0  # characters of the window's text that were given out
        self._dirty = ""  # given out by the window, waiting for the clean-up of spaces

    def push(self, ids: Iterable[int]) -> str:
        """Adds ids; returns the text that became certain (may be empty)."""
        new = [token for token in map(int, ids) if self._kind_of(token) != "silent"]
        if not new:
            return ""
        ids, closed = self._run + new, len(self._run + new)
        while closed and self._kind_of(ids[closed - 1]) == "byte":
            closed -= 1
        self._run = ids[closed:]
        if not closed:
            return ""
        self._window += ids[:closed]
        text = self._decode(self._window)
        # Of an incomplete character a decoder makes exactly one replacement character, at the end.
        stable = len(text) - text.endswith(REPLACEMENT)
        piece = text[self._shown : stable]
        self._shown = max(self._shown, stable)
        self._forget(text)
        if not self._cleans:
            return piece
        self._dirty += piece
        cut = _clean_boundary(self._dirty)
        piece, self._dirty = self._dirty[:cut], self._dirty[cut:]
        return self._tokenizer.clean_up_tokenization(piece)

    def pending(self) -> str:
        """The text that `flush` would give now; later ids may still change it."""
        rest = self._dirty + self._decode(self._window + self._run)[self._shown :]
        return self._tokenizer.clean_up_tokenization(rest) if self._cleans else rest

    def flush(self) -> str:
        """The rest of the text (an incomplete character as U+FFFD). The decoder is then ready for another text."""
        rest = self.pending()
        self._reset()
        return rest

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)

    def _kind_of(self, token: int) -> str:
        kind = self._kind.get(token)
        if kind is None:
            name = self._tokenizer.convert_ids_to_tokens(token)
            # Silent: ids beyond the tokenizer (models pad their vocabulary) and special tokens that are skipped.
            silent = name is None or (self._skip and _is_special(self._tokenizer, token) and not self._decode([token]))
            kind = "silent" if silent else "byte" if _BYTE_TOKEN.fullmatch(name) else "text"
            self._kind[token] = kind
        return kind

    def _forget(self, text: str) -> None:
        """Drops ids from the window that no longer matter; `text` is the window's.

        A cut is sound where the two sides decode to the same text apart as together (but for the space that opens the
        right side): a cut inside a character would show two replacement characters in place of one.
        """
        window = self._window
        if len(window) <= _KEEP:
            return
        for cut in range(len(window) - 1, max(0, len(window) - 8), -1):
            head, tail = self._decode(window[:cut]), self._decode(window[cut:])
            if tail and text in (head + tail, head + " " + tail):
                self._shown -= len(text) - len(tail)
                self._window = window[cut:]
                return


def _is_special(tokenizer: Any, token: int) -> bool:
    added = tokenizer.added_tokens_decoder.get(token)
    return (added is not None and added.special) or token in tokenizer.all_special_ids


def _cleans_up(tokenizer: Any) -> bool:
    """True if `tokenizer.decode` removes spaces before punctuation (transformers 5 does not for BPE unless forced)."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    if getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False):
        return True
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is None or type(backend.model).__name__ != "BPE"


def _clean_boundary(text: str) -> int:
    """How many characters the clean-up of spaces can treat without knowing what follows.

    Its patterns (" .", " n't", " 've", ...) open with a space and have at most four characters, so none reaches over a
    place that three characters other than spaces precede.
    """
    for cut in range(len(text), 2, -1):
        if " " not in text[cut - 3 : cut]:
            return cut
    return 0


class StreamerFeed:
    """Feeds an object with transformers' streamer interface (`put(value)`, `end()`; TextStreamer and its kin).

    Values are NumPy int64 arrays of the shapes that transformers' `generate` gives: the prompt [B, T] first, then [B]
    for each token. TextStreamer takes them as they are; it accepts only one sequence and raises ValueError for more.

    Raises:
        InputError: the object lacks `put` or `end`.
    """

    def __init__(self, streamer: Any):
        for method in ("put", "end"):
            if not callable(getattr(streamer, method, None)):
                raise InputError(
                    f"streamer of type {type(streamer).__name__} has no method {method}(): "
                    "it must have put(value) and end(), as transformers' TextStreamer has"
                )
        self._streamer = streamer

    def prompt(self, input_ids: np.ndarray) -> None:
        """Gives the prompts, int [B, T], padding included."""
        self._streamer.put(np.asarray(input_ids, np.int64))

    def tokens(self, steps: np.ndarray) -> None:
        """Gives new tokens, int [steps, B], one `put` a step."""
        for step in np.asarray(steps, np.int64):
            self._streamer.put(step)

    def end(self) -> None:
        """Says that no more tokens come."""
        self._streamer.end()
