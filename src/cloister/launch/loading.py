"""Reports slow loads on standard error: a progress bar on a terminal, elsewhere lines at start, end and intervals."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TextIO, TypeVar

from cloister.types.clock import Clock, WallClock

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")

QUICK_S: Final = 1.0
"""A load that finishes earlier prints nothing."""
REPORT_S: Final = 20.0
"""Interval of progress lines without a terminal: a calibration takes minutes, and would look hung."""

_logger = logging.getLogger(__name__)


class Loading:
    """Context manager around a load; starts with its first phase.

    Args:
        name: name of what is loaded.
        shown: False prints nothing.
        quick_s: delay before the first output, in seconds.
        report_s: seconds between further lines where there is no terminal.
        stream: output stream; None is standard error.
    """

    def __init__(
        self,
        name: str,
        *,
        shown: bool = True,
        quick_s: float = QUICK_S,
        report_s: float = REPORT_S,
        stream: TextIO | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._name = Path(name).name
        self._stream = stream or sys.stderr
        self._clock = clock or WallClock()
        self._since_s: float | None = None
        self._lock = threading.Lock()
        self._report_s = report_s
        self._timer = self._make_timer(quick_s) if shown else None
        self._phase, self._done = "", 0
        self._total: int | None = None
        self._bar: Progress | None = None
        self._is_over = self._speaks = False

    def begin(self, phase: str, total: int | None = None) -> None:
        """Starts a new phase.

        Args:
            total: number of its parts, if known.
        """
        with self._lock:
            if self._since_s is None:
                self._since_s = self._clock.now()
                if self._timer is not None:
                    self._timer.start()
            self._phase, self._done, self._total = phase, 0, total
            self._draw()

    def track(self, items: Iterable[T], phase: str, total: int) -> Iterator[T]:
        """Yields items and counts them as parts of a phase."""
        self.begin(phase, total)
        for item in items:
            yield item
            with self._lock:
                self._done += 1
                self._draw()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            self._is_over = True
            if self._timer is not None:
                self._timer.cancel()
            if self._bar is not None:
                self._bar.stop()
            elif self._speaks and kind is None and self._since_s is not None:
                self._tell(f"loaded {self._name} in {self._clock.now() - self._since_s:.1f} s")

    def _show(self) -> None:
        with self._lock:
            if self._is_over:
                return
            if not self._stream.isatty():
                self._tell(self._describe())
                self._speaks = True
                self._timer = self._make_timer(self._report_s)
                self._timer.start()
                return
            self._speaks = True
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(file=self._stream), transient=True)
            self._bar.add_task("", total=None)
            self._draw()
            self._bar.start()

    def _make_timer(self, delay_s: float) -> threading.Timer:
        timer = threading.Timer(delay_s, self._show)
        timer.daemon = True
        return timer

    def _describe(self) -> str:
        if not self._speaks or self._since_s is None:
            return f"loading {self._name}: {self._phase}"
        parts = f", {self._done} of {self._total}" if self._total else ""
        return f"still loading {self._name} after {self._clock.now() - self._since_s:.0f} s: {self._phase}{parts}"

    def _draw(self) -> None:
        if self._bar is not None:
            task = self._bar.tasks[0]
            self._bar.update(task.id, description=f"{self._name}: {self._phase}", completed=self._done)
            task.total = self._total

    def _tell(self, line: str) -> None:
        """Logs a line if logging is configured, else prints it."""
        if logging.getLogger().hasHandlers() and _logger.isEnabledFor(logging.INFO):
            _logger.info("%s", line)
        else:
            print(line, file=self._stream, flush=True)
