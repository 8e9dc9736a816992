"""A directory that is there when it is complete, or not at all: where converted checkpoints are written."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from rich.filesize import decimal

from moe_jax.errors import CheckpointError

# Beside the weights: configuration, tokenizer and chat template.
_COMPANIONS = ("*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja")


@contextlib.contextmanager
def new_directory(destination: Path, nbytes: int) -> Iterator[Path]:
    """A directory to write `nbytes` into, beside `destination`, whose name it gets if the block ends well.

    A fault or an interrupt removes it. Raises CheckpointError when `destination` exists, when the disk has less than
    `nbytes` left (before the block), and when it cannot be written or fills up meanwhile.
    """
    require_new(destination)
    partial = destination.with_name(f".{destination.name}.{uuid.uuid4().hex}")
    try:
        partial.mkdir(parents=True)
        if (free := shutil.disk_usage(partial).free) < nbytes:
            raise CheckpointError(
                f"{destination}: the weights take {decimal(nbytes)} and the disk has {decimal(free)} left: "
                "free space or name a directory on another disk"
            )
        yield partial
        require_new(destination)  # it may have come meanwhile, and renaming replaces an empty directory
        os.rename(partial, destination)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = ": free space and start again" if full else ""
        raise CheckpointError(f"{destination} cannot be written: {error.strerror or error}{remedy}") from error
    finally:
        if partial.exists():
            shutil.rmtree(partial)


def require_new(destination: Path) -> None:
    """Raises CheckpointError if there is something under this name."""
    if destination.exists() or destination.is_symlink():
        raise CheckpointError(f"{destination} exists already: name a directory that does not")


def copy_companions(source: Path, into: Path, *, without: frozenset[str] = frozenset()) -> None:
    """Copies configuration, tokenizer and chat template files of a checkpoint, but not those named in `without`."""
    for path in sorted({path for pattern in _COMPANIONS for path in source.glob(pattern)}):
        if path.name not in without:
            shutil.copyfile(path, into / path.name)
