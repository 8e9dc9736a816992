"""What `run_generate.py` is given to continue or to answer: texts, files, conversations."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

DEMO_PROMPT = "Once upon a time there was a poor woodcutter who lived at the edge of a great forest with his"


class UsageError(Exception):
    """The options contradict each other or name what is not there."""


def read_prompts(prompt, prompt_file, batch, demo) -> list[str]:
    """The texts to continue."""
    if prompt is not None and prompt_file is not None:
        raise UsageError("--prompt and --prompt-file both give a prompt: leave one of them out")
    if prompt_file is None:
        if prompt is None and not demo:
            raise UsageError("no prompt: give --prompt TEXT, or --prompt-file FILE (- reads standard input)")
        return [DEMO_PROMPT if prompt is None else prompt] * (batch or 1)
    try:
        raw = sys.stdin.buffer.read() if prompt_file == "-" else Path(prompt_file).read_bytes()
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompt-file={prompt_file}: not UTF-8 text ({error.reason} at {error.start})") from error
    except OSError as error:
        raise UsageError(f"--prompt-file={prompt_file}: {error.strerror}") from error
    if batch is None:
        text = text.removesuffix("\n")
        if not text:
            raise UsageError(f"--prompt-file={prompt_file}: the file is empty")
        return [text]
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) < batch:
        raise UsageError(
            f"--prompt-file={prompt_file} has {len(lines)} lines that are not blank, fewer than --batch={batch}"
        )
    return lines[:batch]


@dataclasses.dataclass(frozen=True)
class Chat:
    """Prompts are messages of users: after the text `system` if there is one, by `template` or the tokenizer's own."""

    system: str | None = None
    template: str | None = None

    def encode(self, tokenizer, prompts: list[str]) -> dict[str, Any]:
        """Arguments of `generate`: ids [B, T] of a conversation each, padded on the left, and their mask."""
        import numpy as np

        from moe_jax.generation.chat import encode_chat

        if self.template is None and tokenizer.chat_template is None:
            raise UsageError(
                "--chat: the tokenizer has no chat template, as base models have none: give --chat-template FILE, or "
                "leave --chat out"
            )
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        rows = [encode_chat(tokenizer, [*first, {"role": "user", "content": text}], self.template) for text in prompts]
        ids, mask = np.zeros((2, len(rows), max(map(len, rows))), int)
        for i, row in enumerate(rows):
            ids[i, -len(row) :], mask[i, -len(row) :] = row, 1
        return {"inputs": ids, "attention_mask": mask}


def read_chat(chat, system, template_file) -> Chat | None:
    """How prompts become conversations, None if they do not."""
    if not chat:
        for flag, value in (("--system", system), ("--chat-template", template_file)):
            if value is not None:
                raise UsageError(f"{flag} is for conversations: add --chat, or leave it out")
        return None
    if template_file is None:
        return Chat(system)
    try:
        return Chat(system, Path(template_file).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(f"--chat-template={template_file}: not UTF-8 text") from error
    except OSError as error:
        raise UsageError(f"--chat-template={template_file}: {error.strerror}") from error


def token_id(tokenizer, text: str) -> int:
    """The id that --forced-bos names."""
    if text.isdecimal():
        return int(text)
    token = tokenizer.get_vocab().get(text)
    if token is None:
        raise UsageError(f"--forced-bos={text!r} is no token of this tokenizer: give one of its vocabulary, or an id")
    return token
