"""How far a batch is: for a callback, or as a bar on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int], None]
"""Called with (prompts answered, prompts in all)."""


@contextmanager
def reporting(on_progress: Progress | bool | None, num_prompts: int) -> Iterator[Progress]:
    """Yields what to call after each prompt: the callback, a bar for True, nothing for None and False."""
    if callable(on_progress):
        yield on_progress
    elif not on_progress:
        yield lambda num_done, total: None
    else:
        with _bar(num_prompts) as report:
            yield report


@contextmanager
def _bar(num_prompts: int) -> Iterator[Progress]:
    from rich.console import Console  # only who wants a bar waits for it
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("prompts", total=num_prompts)
        yield lambda num_done, total: bars.update(task, completed=num_done)
