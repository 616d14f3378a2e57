"""The template of engines: `python -m cloister.engine.template FD [MODULE]`. It imports MODULE, waits
for settings, builds an engine once, and forks those that serve.

A template never runs its engine: it gets no request, and its KV cache is memory that nothing has touched. When it forks it has
one thread. A fork shares all its pages, weights and code among them, until it writes to them, so it costs what it writes.

An engine is a child of the front, not of the template: a process in between ends at once, and the front adopts what it leaves
behind. So engines live on when the template dies, and the front sees how they end.

An engine that must not be forked, because a library in it has threads of its own, is served by the template itself, which is
then an engine like any other.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import logging
import os
import socket
import sys
import time
from typing import Final

import msgspec

from cloister.engine import channel, engine_process
from cloister.engine.core import EngineCore
from cloister.engine.fork_server import MESSAGE_BYTES, MYSELF, PID_BYTES, TemplateReady
from cloister.engine.machine import freeze_gc_heap, pause_gc, return_free_memory
from cloister.types.events import EngineMessage
from cloister.types.logs import describe
from cloister.types.processes import count_threads, end_with_parent, name_process

THREADED_LIBRARIES: Final = ("torch",)
"""Libraries with threads that a fork would lack."""

_logger = logging.getLogger("cloister.engine.template")  # it runs as `__main__`, whose messages no log shows


def main(descriptor: int, preloaded: str = "") -> int:
    """Runs the template; returns the exit status.

    Args:
        preloaded: a module that is imported before the settings are there; empty for none.
    """
    pause_gc()
    engine_process.ignore_terminal()
    end_with_parent()
    name_process("template")
    faulthandler.enable()
    control = socket.socket(fileno=descriptor)
    if preloaded:
        with contextlib.suppress(ImportError):  # a missing module is an error of the engine that needs it, which says so
            importlib.import_module(preloaded)
    received = control.recv(MESSAGE_BYTES)
    if not received:
        return 0  # the front has ended, or needs no template
    boot = channel.decode_boot(received)
    engine_process.set_up(boot)
    core = engine_process.build(boot, lambda message: _send(control, message))
    if core is None:
        return 1
    return _Template(control, core, os.getppid()).run()


def _send(control: socket.socket, message: EngineMessage | TemplateReady) -> None:
    control.send(msgspec.msgpack.encode(message))


class _Template:
    """Forks engines.

    Args:
        control: the front's requests.
        core: the engine, which has not run.
        front: process id of the front.
    """

    def __init__(self, control: socket.socket, core: EngineCore, front: int) -> None:
        self._control = control
        self._core = core
        self._front = front

    def run(self) -> int:
        """Serves until the front closes the socket."""
        refusal = prepare()
        _send(self._control, TemplateReady(refusal))
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._control, 16, 1)
            if not message:
                return 0
            with socket.socket(fileno=descriptors[0]) as sock:
                if refusal:
                    self._reply(MYSELF)
                    return self._serve(sock)
                self._reply(self._fork(sock))
            self._core.startup = []  # the first engine reports what the template took

    def _reply(self, pid: int) -> None:
        self._control.send(pid.to_bytes(PID_BYTES, "little"))

    def _serve(self, sock: socket.socket) -> int:
        self._control.close()
        name_process("engine")
        return engine_process.serve(sock, lambda _boot, _send: self._core)

    def _fork(self, sock: socket.socket) -> int:
        """Forks an engine; returns its process id, once its parent is the front."""
        receiver, sender = os.pipe()
        if (between := os.fork()) == 0:
            os.close(receiver)
            self._fork_orphan(sock, sender)
        os.close(sender)
        with open(receiver, "rb") as said:
            pid = int.from_bytes(said.read(PID_BYTES), "little")
        os.waitpid(between, 0)
        if pid == MYSELF:
            raise OSError("no process could be forked")
        return pid

    def _fork_orphan(self, sock: socket.socket, sender: int) -> None:
        """Forks and exits; the engine never returns either."""
        status = 1
        try:
            between, pid = os.getpid(), os.fork()
            if pid == 0:
                os.close(sender)
                status = self._become_engine(sock, between)
            else:
                os.write(sender, pid.to_bytes(PID_BYTES, "little"))
                status = 0
        except Exception as error:
            _logger.critical("a fork ends: %s", describe(error))
        finally:
            os._exit(status)

    def _become_engine(self, sock: socket.socket, between: int) -> int:
        while os.getppid() == between:
            time.sleep(0.0005)
        end_with_parent(self._front)
        return self._serve(sock)


def prepare() -> str:
    """Makes this process fit to be forked; returns why it is not, empty if it is.

    One fork is rehearsed: libraries that end their threads for a fork (the native back end, OpenBLAS) have none afterwards.
    """
    if loaded := [name for name in THREADED_LIBRARIES if name in sys.modules]:
        return f"{', '.join(loaded)} has threads that a fork would lack"
    freeze_gc_heap(searches=False)  # forks share these pages, so the garbage collector must not touch them
    return_free_memory()
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    num_threads = count_threads()
    return "" if num_threads == 1 else f"it has {num_threads} threads, and a fork would lack all but one"


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1]), *sys.argv[2:]))
