"""The exceptions that moe_jax raises on purpose.

Each class is also the built-in exception a reader would expect (`ValueError` for a bad value, `RuntimeError` for a
fault while running), so that callers need not import this module to handle them.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

PACKAGE = str(Path(__file__).resolve().parent)


class MoEJaxError(Exception):
    """Base of all errors raised on purpose by moe_jax."""


class ConfigError(MoEJaxError, ValueError):
    """A configuration key or a sampling parameter is unknown or has a value that is not allowed."""


class InputError(MoEJaxError, ValueError):
    """The prompt (ids, text, mask) cannot be run as given; raised before any work is done."""


class TokenizerError(InputError):
    """Text or a chat was given or asked for, but the checkpoint has no usable tokenizer or no chat template."""


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


def warn(message: str) -> None:
    """A UserWarning at the line outside this package that led here, so that it names the user's own file."""
    warnings.warn(message, stacklevel=2, skip_file_prefixes=(PACKAGE,))
