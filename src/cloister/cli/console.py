"""Terminal output: results on standard output, everything else on standard error; and checks of output paths."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from cloister.types.errors import ConfigError

REPORT_S: Final = 30.0
"""Seconds between lines about progress where there is no terminal."""
MOST_COLUMNS: Final = 10_000
"""Width of a table in a file, at most."""
LONG_WORD: Final = 20
"""A longer word is a path or the like rather than a figure, and may be cut."""
BESIDE_A_CELL: Final = 3
"""Columns taken by a cell's padding and border."""

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
    """Prints a table on standard output, or on another console; the first column is left-aligned, the others right-aligned.

    No figure is cut: in a file or a pipe, rows are as long as they need to be; on a narrow terminal the columns are split over
    several tables, each of which repeats the first column.
    """
    where = console or out
    if not where.is_terminal:
        table = _build_table(title, headers, rows)
        needed = where.measure(table, options=where.options.update(max_width=MOST_COLUMNS)).maximum
        Console(file=where.file, width=max(where.width, needed)).print(table)
        return
    for number, columns in enumerate(_fit_columns(headers, rows, where.width)):
        shown = [[row[column] for column in columns] for row in rows]
        where.print(_build_table("" if number else title, [headers[column] for column in columns], shown))


def _build_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for number, header in enumerate(headers):
        table.add_column(header, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    return table


def _fit_columns(headers: Sequence[str], rows: Sequence[Sequence[object]], width: int) -> list[list[int]]:
    """Returns the columns of each table: as many as fit with their words whole, and the first one in all."""
    needed = [
        min(LONG_WORD, max(len(word) for cell in (header, *(row[column] for row in rows)) for word in (*str(cell).split(), "")))
        + BESIDE_A_CELL
        for column, header in enumerate(headers)
    ]
    tables = [[0]]
    for column in range(1, len(headers)):
        if len(tables[-1]) > 1 and 1 + sum(needed[each] for each in (*tables[-1], column)) > width:
            tables.append([0])
        tables[-1].append(column)
    return tables


class LineProgress(Progress):
    """A progress bar that prints a line now and then where there is no terminal, such as in a log."""

    _said_s: float | None = None

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._say(task_id)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._say(task_id)

    def _say(self, task_id: TaskID) -> None:
        if not self.disable:
            return
        task = next(task for task in self.tasks if task.id == task_id)
        now_s, since_s = self.get_time(), self._said_s if self._said_s is not None else task.start_time
        if since_s is not None and now_s - since_s >= REPORT_S:
            self._said_s = now_s
            of = "" if task.total is None else f" of {task.total:,.0f}"
            print_line(f"{task.description}: {task.completed:,.0f}{of}", console=self.console)


def make_progress() -> LineProgress:
    """Returns a transient progress bar on standard error; without a terminal a line every half minute."""
    return LineProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )


@contextmanager
def writing_to(place: Path) -> Iterator[None]:
    """Turns the error of a full disk into one that names the place.

    Raises:
        ConfigError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(f"there is no space left for {place}; free some, or name another place") from None


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


def check_folder(folder: Path) -> None:
    """Checks that `make_folder` can make a folder later, without making it.

    Raises:
        ConfigError: it cannot.
    """
    folder = there = folder.expanduser().absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise ConfigError(f"{there} is a file; name a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write to the folder {folder}; name another one, or change who may write in {there}")


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
