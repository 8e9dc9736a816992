"""A tokenizer for models of 256 tokens: each id is a byte, so most of what a random model writes is no UTF-8."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(**settings) -> PreTrainedTokenizerFast:
    """The tokenizer of transformers; `settings` as its constructor takes them, such as `chat_template`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
