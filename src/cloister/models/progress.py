"""The progress bar of downloads."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


def download_progress(shown: bool, *, transient: bool = False) -> Progress:
    """Returns a display on standard error whose tasks count bytes; a transient one is gone when it is done."""
    console = Console(stderr=True)
    shown = shown and (console.is_terminal or not transient)  # in a file a transient display leaves an empty line
    return Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        console=console, disable=not shown, transient=transient,
    )  # fmt: skip
