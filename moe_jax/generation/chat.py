"""A conversation as the token ids that a model continues, by the chat template of its tokenizer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from moe_jax.errors import ConfigError, InputError, TokenizerError
from moe_jax.generation.text import Tokenizer, encode

ROLES = ("system", "developer", "user", "assistant", "tool")
_EXAMPLE = '[{"role": "user", "content": "Hello"}]'
# Arguments of transformers' apply_chat_template that templates see as variables of the same name.
_VISIBLE = ("tools", "documents")


def encode_chat(
    tokenizer: Tokenizer,
    messages: Any,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation and of what opens the assistant's answer.

    Args:
        tokenizer: of transformers.
        messages: one conversation, a list of mappings with a "role" of `ROLES` and a "content", a text. An assistant's
            message with "tool_calls" needs no content. Further entries reach the template as they are.
        chat_template: Jinja text, or the name of one of the tokenizer's templates. None: the tokenizer's own.
        chat_template_kwargs: further variables of the template, such as {"enable_thinking": False}; "tools" and
            "documents" as transformers takes them.

    Raises:
        TokenizerError: there is no template.
        ConfigError: bad `chat_template` or `chat_template_kwargs`.
        InputError: bad messages (names the index and the field), or the template does not take them.
    """
    messages = _checked(messages)
    _check_template(tokenizer, chat_template)
    variables = _variables(tokenizer, chat_template_kwargs)
    try:
        text = tokenizer.apply_chat_template(
            messages, chat_template=chat_template, add_generation_prompt=True, tokenize=False, **variables
        )
    except Exception as error:  # a template is a program: it may raise anything, on purpose too
        raise InputError(
            f"the chat template cannot be applied to these messages ({type(error).__name__}: {error}): change the "
            "messages, or pass another chat_template"
        ) from error
    # Not the special tokens that the tokenizer adds to a text of its own accord: the template writes them.
    ids = encode(tokenizer, text, "the conversation", add_special_tokens=False)
    if not ids:
        raise InputError("the chat template makes an empty prompt of these messages: pass another chat_template")
    return ids


def _checked(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list | tuple):
        raise InputError(f"messages is of type {type(messages).__name__}: give a list of messages, as in {_EXAMPLE}")
    if not messages:
        raise InputError(f"messages is empty: give at least one, as in {_EXAMPLE}")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if isinstance(message, list | tuple):
            raise InputError(f"{where} is a {type(message).__name__}: give one conversation, a list of mappings")
        if not isinstance(message, Mapping):
            raise InputError(f"{where} is of type {type(message).__name__}: it must be as in {_EXAMPLE}")
        if "role" not in message:
            raise InputError(f'{where} has no "role": give one of {", ".join(ROLES)}')
        role, content = message["role"], message.get("content")
        if role not in ROLES:
            raise InputError(f'{where}["role"] is {role!r}: it must be one of {", ".join(ROLES)}')
        if content is None:
            if role == "assistant" and message.get("tool_calls"):
                continue
            raise InputError(f'{where} ({role}) has no "content": give its text')
        if not isinstance(content, str):
            raise InputError(
                f'{where}["content"] is of type {type(content).__name__}: it must be a text (models here read text '
                "only; join the parts of a list)"
            )
    return [dict(message) for message in messages]


def _check_template(tokenizer: Tokenizer, chat_template: Any) -> None:
    own = getattr(tokenizer, "chat_template", None)
    names = sorted(own) if isinstance(own, dict) else []
    listed = f"; the tokenizer's templates are {', '.join(names)}" if names else ""
    if chat_template is None:
        if own is None:
            raise TokenizerError(
                "the tokenizer of this checkpoint has no chat template, as base models have none: pass chat_template= "
                "(Jinja text), or give generate() the whole prompt as a text"
            )
        if names and "default" not in names:
            raise ConfigError(f"chat_template is needed, none of them is the default{listed}")
    elif not isinstance(chat_template, str):
        raise ConfigError(f"chat_template={chat_template!r} is not allowed: it must be Jinja text or a name{listed}")
    # A name that is none would be a template without variables, and the prompt that name alone.
    elif chat_template not in names and "{" not in chat_template:
        raise ConfigError(f"chat_template={chat_template!r} is neither Jinja text nor the name of a template{listed}")


def _variables(tokenizer: Tokenizer, given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"chat_template_kwargs={given!r} is not allowed: it must map names of variables to values")
    arguments = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in given:
        if name == "messages" or (name in arguments and name not in _VISIBLE):
            raise ConfigError(
                f"chat_template_kwargs has {name!r}, which is no variable of a template that a caller may set: leave "
                "it out"
            )
    return dict(given)
