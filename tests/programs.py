"""`cloister VERB` as a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 120.0


class Program:
    """A program that runs, and what it printed.

    Args:
        arguments: of `cloister`, the verb first.
        announced: what it prints when it serves; the group is its address.
        apart: keeps standard error apart, for `end` to return.

    Attributes:
        url: the address that it announced.
        lines: that it printed until then.
    """

    def __init__(self, *arguments: str, announced: str = r"Serving on (\S+)", apart: bool = False) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cloister.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if apart else subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        late = threading.Timer(START_TIMEOUT_S, self.process.kill)
        late.start()
        try:
            self.url = self._wait_for_address(announced)
        finally:
            late.cancel()

    def stop(self) -> tuple[int, str]:
        """Ends it as an operator would; returns exit status and everything that it printed."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        """Waits until it ended by itself; see `stop`."""
        status, printed, _ = self.end()
        return status, printed

    def end(self) -> tuple[int, str, str]:
        """Waits until it ended; returns exit status, everything that it printed, and standard error where that is apart."""
        rest, errors = self.process.communicate(timeout=STOP_TIMEOUT_S)
        self.lines.append(rest)
        return self.process.returncode, "".join(self.lines), errors or ""

    def kill(self) -> None:
        """Ends it at once."""
        self.process.kill()
        self.process.communicate()

    def _wait_for_address(self, announced: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(announced, line):
                return found[1]
        errors = self.process.communicate()[1] or ""
        raise AssertionError("the program did not start: " + "".join(self.lines) + errors)
