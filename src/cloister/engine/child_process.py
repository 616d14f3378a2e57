"""Child processes that serve an engine: executed programs (`engine.spawning`), and forks of a template that this process has
adopted."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Final, Protocol

_EXIT_POLL_S: Final = 0.01
_LAST_WAIT_S: Final = 1.0


class ProcessHandle(Protocol):
    """A child process, with the interface of subprocess.Popen."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


class ForkedProcess:
    """A fork of a template, which became a child of this process (`ProcessHandle`)."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Returns its exit status, negative for a signal; None while it runs."""
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # another caller has waited for it
                self._status = -signal.SIGKILL
            else:
                self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def kill(self) -> None:
        """Kills it if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


async def explain_death(process: ProcessHandle) -> str:
    """Returns why an engine ended before it was ready, for an error message."""
    give_up_s = time.monotonic() + _LAST_WAIT_S
    while (status := process.poll()) is None and time.monotonic() < give_up_s:
        await asyncio.sleep(_EXIT_POLL_S)
    if status is None:
        return "the engine closed its connection while it started; the log may say why"
    if status >= 0:
        return f"the engine ended with exit status {status} while it started; the log may say why"
    named = {each.value: f" ({each.name})" for each in signal.Signals}
    why = "memory may have run out, of the machine or its cgroup" if status == -signal.SIGKILL else "the log may say why"
    return f"the engine was killed by signal {-status}{named.get(-status, '')} while it started; {why}"


async def end(process: ProcessHandle) -> int:
    """Kills a process if it still runs; returns its exit status. A caller that is cancelled waits for it too, for a second at
    most: otherwise it would stay a zombie."""
    process.kill()
    try:
        while (status := process.poll()) is None:  # SIGKILL ends any process, but the kernel may take a while
            await asyncio.sleep(_EXIT_POLL_S)
    except asyncio.CancelledError:
        give_up_s = time.monotonic() + _LAST_WAIT_S
        while process.poll() is None and time.monotonic() < give_up_s:
            time.sleep(_EXIT_POLL_S)
        raise
    return status
