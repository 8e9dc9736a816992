"""What a conversion starts from."""

from __future__ import annotations

from pathlib import Path

from moe_jax.checkpoint.new_directory import require_new
from moe_jax.checkpoint.prepared import is_prepared
from moe_jax.checkpoint.reader import Checkpoint
from moe_jax.errors import CheckpointError


def open_source(source: Path, destination: Path) -> Checkpoint:
    """Opens the checkpoint to convert. Raises `CheckpointError` as that does, and for what needs no reading."""
    require_new(destination)
    if is_prepared(source):
        raise CheckpointError(f"{source} is a prepared checkpoint already: convert the one that it was made of")
    return Checkpoint.open(source)
