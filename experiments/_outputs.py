"""Files that a script writes at its end: whether they can be written is asked at its start."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes `content`, all or nothing. Raises OSError with the path."""
    text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    write_whole(path, lambda file: file.write(text.encode()))
