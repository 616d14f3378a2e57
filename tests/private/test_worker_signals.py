"""A captured worker: it can end neither another one, nor any other process of its node."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import msgspec
import pytest

from cloister.private.workers.zygote import Zygote
from cloister.trust.hardening import kernel
from cloister.trust.hardening.kernel import INTERFACES


class Captured:
    """What a worker runs when its content has taken it over: it tells whom it may signal."""

    def __init__(self, victims: list[int]) -> None:
        self._victims = victims

    def close(self) -> None:
        pass

    async def warm_up(self) -> None:
        pass

    async def serve(self, front: socket.socket, broker: socket.socket, key_service: socket.socket) -> None:
        front.send(msgspec.json.encode([may_kill(pid) for pid in (*self._victims, os.getpid())]))


def may_kill(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    return True


def landlock_version() -> int:
    try:
        return kernel.call(INTERFACES[kernel.machine()].numbers["landlock_create_ruleset"], None, 0, 1)
    except OSError:
        return 0


@pytest.mark.skipif(landlock_version() < 6, reason="Landlock holds signals back since Linux 6.12")
def test_a_captured_worker_can_signal_nobody_but_itself() -> None:
    sibling = os.fork()
    if sibling == 0:
        signal.pause()
    near, far = socket.socketpair()
    control, connections = socket.socketpair()
    with near, far, control, connections:
        zygote = Zygote(control, Captured([os.getpid(), sibling]), 5.0)
        worker = os.fork()
        if worker == 0:
            broker, key_service = socket.socketpair()
            zygote._become_worker(far, broker, key_service)
        try:
            near.settimeout(10)
            assert msgspec.json.decode(near.recv(100)) == [False, False, True]
        finally:
            for pid in (worker, sibling):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def test_a_kernel_without_such_rules_serves_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    from cloister.trust.hardening import landlock

    monkeypatch.setattr(landlock, "SCOPES_SINCE", 10_000)
    assert not landlock.confine_signals()
    assert may_kill(os.getppid())
    assert Path("/proc/self/status").exists()
