"""Executes the programs of engines. Imports little: a server starts a template with it before it imports anything else.

A template that is started early imports what an engine needs, and waits for the settings. It is one of the front's templates
like any other once it has them (`engine.fork_server`).
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

ENGINE: Final = "cloister.engine.engine_process"
TEMPLATE: Final = "cloister.engine.template"

Started = tuple["subprocess.Popen[bytes]", socket.socket]
"""A process, and this end of its socket pair."""

_early: Started | None = None


def spawn_program(
    far: socket.socket, variables: Mapping[str, str] = {}, module: str = ENGINE, arguments: tuple[str, ...] = ()
) -> subprocess.Popen[bytes]:
    """Starts a process by executing the interpreter again: no shell, no port, no name that another process could take.

    Args:
        far: the process's end of a socket pair; its number is the first argument of the module.
        variables: environment variables, in addition to those of this process.
        arguments: further arguments of the module.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(far.fileno()), *arguments],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **variables},
        pass_fds=(far.fileno(),),
        process_group=0,  # so that Ctrl-C in a terminal reaches the front only
    )


def start_template(preloaded: str = "") -> Started:
    """Starts a template of engines, which waits for the settings (`channel.Boot`) that it is to build one with.

    Args:
        preloaded: a module that it imports meanwhile; empty for none.
    """
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with far:
            return spawn_program(far, module=TEMPLATE, arguments=(preloaded,) if preloaded else ()), near
    except BaseException:
        near.close()
        raise


def start_early_template(preloaded: str) -> None:
    """Starts a template that `take_early_template` returns later. If it cannot be started, there is none: the code that needs a
    template starts another one, and reports why it cannot."""
    global _early
    discard_early_template()
    with contextlib.suppress(OSError):
        _early = start_template(preloaded)


def take_early_template() -> Started | None:
    """Returns the template that was started early, once; None if there is none, or it has ended."""
    global _early
    taken, _early = _early, None
    if taken is None:
        return None
    if taken[0].poll() is None:
        with contextlib.suppress(OSError):  # a server raises its limit after it has started the template
            resource.prlimit(taken[0].pid, resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE))
        return taken
    taken[1].close()
    return None


def discard_early_template() -> None:
    """Ends the template that was started early if nothing has taken it."""
    if (unused := take_early_template()) is not None:
        process, near = unused
        near.close()
        process.kill()
        process.wait()
