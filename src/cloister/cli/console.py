"""Terminal output: results on standard output, everything else on standard error; and checks of output paths."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from cloister.types.errors import ConfigError

out = Console()
err = Console(stderr=True)


def print_line(line: str, style: str = "", *, console: Console | None = None, end: str = "\n") -> None:
    """Prints a line verbatim on standard output or another console: no markup, no colours but `style`, no wrapping."""
    (console or out).print(line, style=style, end=end, markup=False, highlight=False, soft_wrap=True)


def print_error(message: str) -> None:
    """Prints one red line on standard error."""
    print_line(f"error: {message}", "bold red", console=err)


def leave(line: str, status: int) -> NoReturn:
    """Prints one red line on standard error, and exits with `status`."""
    print_line(line, "bold red", console=err)
    raise typer.Exit(status) from None


def print_json(value: object) -> None:
    """Prints a value as JSON on standard output, without colours."""
    print(json.dumps(value, indent=2, default=str))


def print_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[object]], console: Console | None = None) -> None:
    """Prints a table on standard output, or on another console; the first column is left-aligned, the others right-aligned."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for number, header in enumerate(headers):
        table.add_column(header, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    (console or out).print(table)


def wide_console(columns: int) -> Console:
    """Returns the console itself for a terminal, else one of the given width: files and pipes need no wrapping."""
    return out if out.is_terminal else Console(width=columns)


def make_progress() -> Progress:
    """Returns a transient progress bar on standard error; without a terminal nothing is shown."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )


# Checks of output paths, before work starts.


def make_folder(folder: Path) -> Path:
    """Returns a writable folder, creating it if needed.

    Raises:
        ConfigError: the folder cannot be created or written.
    """
    folder = folder.expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"{folder} is a file; name a folder") from None
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}; name another one") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write to the folder {folder}; name another one, or change who may write there")
    return folder


def find_place(file: Path) -> Path:
    """Returns a path for a new file, creating its folder if needed.

    Raises:
        ConfigError: the path is a folder, or its folder cannot be created or written.
    """
    file = file.expanduser()
    if file.is_dir():
        raise ConfigError(f"{file} is a folder; name a file")
    make_folder(file.parent)
    return file
