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
    """Prints a line as it is, on standard output or on another console: no markup, no colours but `style`, no wrapping."""
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
    """Prints a table on standard output, or on another console; the first column stands left, the others right."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for number, header in enumerate(headers):
        table.add_column(header, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    (console or out).print(table)


def wide_console(columns: int) -> Console:
    """Returns the console of a terminal as it is, else one of that many columns: files and pipes need not wrap."""
    return out if out.is_terminal else Console(width=columns)


def make_progress() -> Progress:
    """Returns a progress bar on standard error that is gone when it is done; where that is no terminal, nothing is shown."""
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


# Checks of output paths, made before the work starts.


def make_folder(folder: Path) -> Path:
    """Returns a folder that can be written to, made if it was not there.

    Raises:
        ConfigError: it cannot be made or written to.
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
    """Returns a path at which a file can be written; its folder is made if it was not there.

    Raises:
        ConfigError: it is a folder, or its folder cannot be made or written to.
    """
    file = file.expanduser()
    if file.is_dir():
        raise ConfigError(f"{file} is a folder; name a file")
    make_folder(file.parent)
    return file
