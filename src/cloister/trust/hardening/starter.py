"""Forks processes where executing a program is forbidden; each child applies its own measures and runs a module.

The starter is forked from the launcher before a library loads, so it never holds request data, and neither do new forks. The
modules and their needs are fixed at the node's start: a client of the starter only chooses a role and arguments, and passes one
descriptor. Messages are JSON in datagrams of an unnamed socket pair.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from cloister.trust.hardening import kernel
from cloister.trust.hardening.applying import CLOSING, MEASURES, HardeningError, apply
from cloister.trust.hardening.code import Code
from cloister.trust.hardening.loaded_code import CodeOfRole, compare_loads
from cloister.trust.hardening.measure import Needs, Result, Results
from cloister.trust.hardening.state import Sealed, remember

MESSAGE_BYTES: Final = 64 * 1024
ANSWER_TIMEOUT_S: Final = 30.0
"""A fork and its measures take milliseconds; a starter that is silent for longer has ended."""


@dataclass(frozen=True, slots=True)
class Child:
    """A process created by the starter; `poll` and `kill` are as in subprocess.Popen.

    Attributes:
        results: results of its measures.
    """

    pid: int
    results: Results
    starter: Starter

    def poll(self) -> int | None:
        """Returns its exit status, negative for a signal; None while it runs."""
        return self.starter.poll(self.pid)

    def kill(self) -> None:
        """Kills it if it still runs."""
        self.starter.kill(self.pid)


@dataclass(frozen=True, slots=True)
class Role:
    """A role of a child.

    Attributes:
        module: run as `python -m` would.
        needs: what it must be able to do.
        closed: evidence of its lockdown, if the module locks itself down before it replies; else empty.
    """

    module: str
    needs: Needs
    closed: str = ""


class Starter:
    """Client of the starter.

    Attributes:
        results: results of the measures of the latest process of each role, or of each name.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sock.settimeout(ANSWER_TIMEOUT_S)
        self.results: dict[str, Results] = {}

    def start(self, role: str, arguments: Sequence[str], descriptor: int, name: str = "") -> Child:
        """Creates a process that runs the role's module; its last argument is the descriptor's number.

        Args:
            name: of the process in the evidence, if there are several with its role.

        Raises:
            HardeningError: the role is not one of this node's, or a measure is missing in the new process.
        """
        answer = self._ask({"do": "start", "role": role, "arguments": list(arguments)}, [descriptor])
        if "error" in answer:
            raise HardeningError(str(answer["error"]))
        results = Results(name or role, tuple(Result(**item) for item in answer["results"]))
        self.results[results.role] = results
        return Child(int(answer["pid"]), results, self)

    def poll(self, pid: int) -> int | None:
        """Returns the exit status of a child, negative for a signal; None while it runs."""
        try:
            status = self._ask({"do": "poll", "pid": pid})["status"]
        except HardeningError:
            return -signal.SIGKILL  # the kernel kills a starter's children with it
        return None if status is None else int(status)

    def kill(self, pid: int) -> None:
        """Kills a child."""
        with contextlib.suppress(HardeningError):
            self._ask({"do": "kill", "pid": pid})

    def _ask(self, question: Mapping[str, object], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        try:
            socket.send_fds(self._sock, [json.dumps(question).encode()], list(descriptors))
            answer = self._sock.recv(MESSAGE_BYTES)
        except OSError as error:
            raise HardeningError(
                f"the starter of processes does not answer ({type(error).__name__}); restart the node"
            ) from None
        if not answer:
            raise HardeningError("the starter of processes is gone; restart the node")
        decoded: dict[str, Any] = json.loads(answer)
        return decoded


def fork_starter(profile: str, needs: Needs, roles: Mapping[str, Role]) -> Starter:
    """Forks a starter from this process, which must not have threads yet.

    Args:
        needs: needs of the starter: those of all its children, and `fork`.
    """
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork() == 0:
        near.close()
        _run(lambda: _begin(parent, profile, needs), lambda: _Desk(far, profile, roles).serve())
    far.close()
    return Starter(near)


class _Desk:
    """Server of the starter: handles one request after another."""

    def __init__(self, sock: socket.socket, profile: str, roles: Mapping[str, Role]) -> None:
        self._sock = sock
        self._profile = profile
        self._roles = roles
        self._statuses: dict[int, int | None] = {}
        self._codes = {name: CodeOfRole() for name in roles}

    def serve(self) -> None:
        """Serves until the other end is closed; the children end with their parent."""
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._sock, MESSAGE_BYTES, 1)
            if not message:
                return
            try:
                answer = self._answer(json.loads(message), descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            self._sock.send(json.dumps(answer).encode())

    def _answer(self, question: Mapping[str, Any], descriptors: Sequence[int]) -> dict[str, object]:
        match question:
            case {"do": "start", "role": str(role), "arguments": list(arguments)} if role in self._roles and descriptors:
                return self._start(role, [str(argument) for argument in arguments], descriptors[0])
            case {"do": "poll", "pid": int(pid)} if pid in self._statuses:
                return {"status": self._status(pid)}
            case {"do": "kill", "pid": int(pid)} if pid in self._statuses:
                if self._status(pid) is None:
                    os.kill(pid, signal.SIGKILL)
                return {}
        return {"error": "no such role or process", "status": None}

    def _start(self, name: str, arguments: Sequence[str], descriptor: int) -> dict[str, object]:
        role = self._roles[name]
        record, known, is_complete = self._codes[name].begin()
        report, write = os.pipe()
        starter = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(report)
            self._sock.close()
            for code in self._codes.values():
                code.close(record)
            _run(
                lambda: self._harden(starter, role, write),
                lambda: compare_loads(record, known, is_complete=is_complete),
                lambda: _become(role.module, [*arguments, str(descriptor)]),
            )
        os.close(write)
        self._statuses[pid] = None
        with open(report, "rb") as said:
            answer: dict[str, object] = json.loads(said.read() or b'{"error": "the process died before it was hardened"}')
        return {**answer, "pid": pid}

    def _harden(self, parent: int, role: Role, write: int) -> None:
        """Applies the measures in the new process and reports the results to the starter."""
        with open(write, "w") as answer:
            try:
                os.setpgid(0, 0)  # so that Ctrl-C in a terminal reaches the front only
                _end_with(parent)
                results = apply(self._profile, role.needs)
                remember(Sealed(self._profile, role.needs, results))
            except HardeningError as error:
                json.dump({"error": error.message}, answer)
                raise
            items = [
                *results,
                *(Result(measure.name, True, role.closed) for measure in CLOSING if role.closed and not results.missing),
            ]
            json.dump({"results": [asdict(item) for item in items]}, answer)

    def _status(self, pid: int) -> int | None:
        if self._statuses[pid] is None:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._statuses[pid] = os.waitstatus_to_exitcode(status)
        return self._statuses[pid]


def _begin(parent: int, profile: str, needs: Needs) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _end_with(parent)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    apply(profile, needs, (*MEASURES, Code()))  # it is not locked down, because its forks start with its code


def _end_with(parent: int) -> None:
    """Has the kernel kill this process when its parent ends, even if that has already happened."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _become(module: str, arguments: Sequence[str]) -> None:
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _run(*steps: Callable[[], None]) -> None:
    """Runs a forked process to its end: never returns into the code of the parent."""
    status = 1
    try:
        for step in steps:
            step()
        status = 0
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
