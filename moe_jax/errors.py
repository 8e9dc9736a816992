"""The exceptions that moe_jax raises on purpose.

Each class is also the built-in exception a reader would expect (`ValueError` for a bad value, `RuntimeError` for a
fault while running), so that callers need not import this module to handle them.
"""

from __future__ import annotations

from typing import Any


class MoEJaxError(Exception):
    """Base of all errors raised on purpose by moe_jax."""


class ConfigError(MoEJaxError, ValueError):
    """A configuration key or a sampling parameter is unknown or has a value that is not allowed."""


class InputError(MoEJaxError, ValueError):
    """The prompt (ids, text, mask) cannot be run as given; raised before any work is done."""


class TokenizerError(InputError):
    """Text was given or asked for, but the checkpoint has no usable tokenizer."""


class CheckpointError(MoEJaxError, ValueError):
    """A checkpoint is incomplete, inconsistent or in a layout that is not supported."""


class TransportError(MoEJaxError, RuntimeError):
    """Moving experts failed while the model was running.

    Attributes:
        partial: what had been generated before the fault (as the raising call would have returned it), or None when
            nothing had been.
    """

    def __init__(self, message: str, partial: Any = None):
        super().__init__(message)
        self.partial = partial
