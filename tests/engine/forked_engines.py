"""Engine processes without the second that their imports take: a process that has imported it all forks one for each.

It is started once in a process of tests, for transports whose `spawn` is `spawn_forked`. An engine is a process of its own, and
ends with this one, as a program does; `tests/engine/test_process.py` starts programs too.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import random
import select
import signal
import socket
import subprocess
import sys
import weakref

from cloister.engine.child_process import ProcessHandle
from tests.docs.forked_cli import watch


class ForkedEngine:
    """An engine that another process forked and waits for (`ProcessHandle`).

    Args:
        waiting: tells its exit status, and has it killed when it is closed.
    """

    def __init__(self, pid: int, waiting: socket.socket) -> None:
        self.pid = pid
        self._waiting = waiting.detach()
        self._close = weakref.finalize(self, os.close, self._waiting)
        self._status: int | None = None

    def poll(self) -> int | None:
        """Returns its exit status, negative for a signal; None while it runs."""
        if self._status is None and select.select([self._waiting], [], [], 0)[0]:
            told = os.read(self._waiting, 4)
            self._status = int.from_bytes(told, "little", signed=True) if told else -signal.SIGKILL
            self._close()
        return self._status

    def kill(self) -> None:
        """Kills it if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # the template has reaped it, and is about to say so
                os.kill(self.pid, signal.SIGKILL)


def spawn_forked(far: socket.socket) -> ProcessHandle:
    """Starts an engine process as `spawn_program` does."""
    waiting, told = socket.socketpair()
    with told:
        socket.send_fds(_template(), [b"."], [far.fileno(), told.fileno(), 1, 2])
    return ForkedEngine(int.from_bytes(waiting.recv(4), "little"), waiting)


@functools.cache
def _template() -> socket.socket:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with far:
        command = [sys.executable, "-m", "tests.engine.forked_engines", str(far.fileno())]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[far.fileno()])

    def end() -> None:
        near.close()
        process.wait(300)

    atexit.register(end)
    return near


def main() -> int:
    from cloister.engine import engine_process
    from tests.engine import replica  # noqa: F401

    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    while True:
        message, files, _, _ = socket.recv_fds(control, 1, 4)
        if not message:
            return 0
        if os.fork() == 0:
            break
        for file in files:
            os.close(file)
    control.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    far, told, *printed = files
    engine = os.fork()
    if engine:
        for file in (far, *printed):
            os.close(file)
        return watch(engine, socket.socket(fileno=told))
    os.close(told)
    for place, file in enumerate(printed, 1):
        os.dup2(file, place)
        os.close(file)
    os.setpgid(0, 0)
    random.seed()
    return engine_process.main(far)


if __name__ == "__main__":
    sys.exit(main())
