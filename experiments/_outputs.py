"""Options and files that scripts have in common: whether a file can be written is asked at the start."""

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from host_offload.trace import write_whole


def check_writable(flag: str, path: Path) -> None:
    """Raises OSError that says what to do, unless a file can be made at `path`; `flag` is the option that names it."""
    if path.is_dir():
        raise IsADirectoryError(f"{flag}={path} is a directory: give the name of a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{flag}={path}: there is no directory {path.parent}; create it first")
    try:
        # Tried, not asked of the permission bits: those do not bind root, and read-only mounts have good ones.
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise PermissionError(
            f"{flag}={path}: the directory {path.parent} cannot be written to ({error.strerror}); name another one"
        ) from error


def shares_of(text: str, option: str, most: float = math.nextafter(1.0, 0)) -> list[float]:
    """Slot shares, more than 0 and at most `most`, of a comma-separated option. Raises typer.BadParameter."""
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{option} {text}: {error}") from error
    if not all(0 < share <= most for share in shares):
        last = " or are 1" if most == 1 else ""
        raise typer.BadParameter(f"{option} {text}: shares lie between 0 and 1{last}")
    return shares


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes `content`, all or nothing. Raises OSError with the path."""
    text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    write_whole(path, lambda file: file.write(text.encode()))
