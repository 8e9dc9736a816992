"""Traces of other systems: recognised, read and written. What each format holds stands in docs/traces.md."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from ..trace import Trace, TraceError
from . import gptoss_fingerprint, gptoss_routes, moe_cache_lab, moe_policylang, rtrace, sglang, vllm
from .base import FACTS, Facts, Format, Peek
from .json_text import json_objects

__all__ = ["FACTS", "FORMATS", "export_trace", "import_trace", "recognise"]

# In the order in which `recognise` asks them: a format that could take another's file comes later.
FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        rtrace.FORMAT,
        *moe_cache_lab.FORMATS,
        moe_policylang.FORMAT,
        gptoss_fingerprint.FORMAT,
        gptoss_routes.FORMAT,
        sglang.FORMAT,
        vllm.FORMAT,
    )
}


def import_trace(path: str | os.PathLike, format: str | None = None, **facts: Any) -> Trace:
    """Reads a trace of this project or another system.

    Args:
        path: the file.
        format: a name of `FORMATS`, or "native"; None recognises it by suffix and content.
        facts: what the format cannot hold, by the names of `FACTS`: `E`, `moe_layers`, ... Which are needed, the error
            says when they are missing.

    Returns the validated trace. Its requests are numbered in the order of the file and served one after the other, as
    the formats do not say which tokens shared a step. Weights that a format does not hold are 1/K, and
    `header["weights"]` is then "unknown". `header["source_format"]` names the format.

    Raises FileNotFoundError; TraceError naming file and line, byte or record of damage, a fact that is missing, unknown
    or contradicts the file, or a format that is unknown.
    """
    path = Path(path)
    if format is None:
        format = recognise(path)
    if format == "native":
        if facts:
            raise TraceError(f"{path}: a native trace holds everything: leave out {', '.join(sorted(facts))}")
        return Trace.load(path)
    form = _format(format)
    return form.read(path, Facts(facts, form.name, form.facts, path))


def export_trace(trace: Trace, path: str | os.PathLike, format: str) -> list[str]:
    """Writes a trace in another system's format, all or nothing.

    Args:
        trace: valid.
        path: the file; its suffix must be one that the format has.
        format: a name of `FORMATS`, or "native" for `.npz` and `.parquet`.

    Returns what the file does not hold of this trace, one phrase each: [] if nothing is lost.

    Raises TraceError if the format cannot tell this routing at all (several requests in a format of one, ids that do
    not fit, ...), ValueError for another suffix.
    """
    path = Path(path)
    trace.validate("export")
    if format == "native":
        trace.save(path)
        return []
    form = _format(format)
    if path.suffix not in form.suffixes:
        raise ValueError(f"export path {str(path)!r}: format {format} is written as {', '.join(form.suffixes)}")
    return form.write(trace, path)


def recognise(path: str | os.PathLike) -> str:
    """The name of a file's format, or "native". Raises FileNotFoundError, or TraceError if it is of none."""
    path = Path(path)
    peek = _peek(path)
    if peek.magic.startswith(b"PAR1") or "header" in peek.names:
        return "native"
    for name, form in FORMATS.items():
        if form.recognise(peek):
            return name
    held = f"arrays {sorted(peek.names)}" if peek.names else f"{sorted(peek.first)}" if peek.first else repr(peek.magic)
    raise TraceError(f"{path}: not a known trace format; it begins with {held}. Known: native, {', '.join(FORMATS)}")


def _peek(path):
    with path.open("rb") as file:
        magic = file.read(8)
        if magic.startswith(b"PK"):
            file.seek(0)
            # As in read_npz_arrays: whatever the archive's parser raises means damage.
            try:
                names = frozenset(np.load(file, allow_pickle=False).files)
            except Exception as error:
                raise TraceError(f"{path}: not a readable .npz file, perhaps truncated: {error}") from error
            return Peek(magic, names, {})
    if magic.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        for _, first in json_objects(path, 1 << 16):
            return Peek(magic, frozenset(), first)
    return Peek(magic, frozenset(), {})


def _format(name):
    if name not in FORMATS:
        raise TraceError(f"format {name!r} is not known: use native, {', '.join(FORMATS)}")
    return FORMATS[name]
