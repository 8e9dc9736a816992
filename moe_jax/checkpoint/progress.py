"""A bar of bytes on stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextlib.contextmanager
def byte_bar(what: str, total: int, progress: bool | None) -> Iterator[Callable[[int], None]]:
    """Shows a bar with this text; the function that it gives is told bytes that are done.

    progress: whether it is shown; None: only when stderr is a terminal.
    """
    shown = sys.stderr.isatty() if progress is None else progress
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task(what, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
