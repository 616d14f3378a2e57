"""`cloister` without the second that its imports take: a process that has imported it forks one for every command.

    python -m tests.docs.forked_cli SOCKET          # forks
    python tests/docs/forked_cli.py SOCKET ARG ...  # is `cloister ARG ...`

A command gets the caller's files, directory, environment and signals, and ends when its caller does.
"""

import json
import os
import random
import select
import signal
import socket
import sys
from collections.abc import Callable

_FORWARDED = (signal.SIGTERM, signal.SIGINT)
_MOST_BYTES = 1 << 20


def main() -> int:
    path, *arguments = sys.argv[1:]
    if __package__ is None:
        return call(path, arguments)
    run = serve(path)
    return run()


def serve(path: str) -> Callable[[], int]:
    """Forks for each caller; returns, in a fork, what it is to do."""
    import importlib
    import pkgutil

    import cloister.cli
    import cloister.server.app

    for module in pkgutil.iter_modules(cloister.cli.__path__):
        if module.name != "__main__":
            importlib.import_module(f"cloister.cli.{module.name}")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path + ".new")
        listener.listen()
        os.rename(path + ".new", path)
        while True:
            caller, _ = listener.accept()
            if os.fork() == 0:
                break
            caller.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, files, _, _ = socket.recv_fds(caller, _MOST_BYTES, 3)
    command = os.fork()
    if command:
        return lambda: watch(command, caller)
    caller.close()
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)
    sys.argv, environment, directory = json.loads(request)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    random.seed()
    return cloister.cli.main  # type: ignore[return-value]  # it leaves by SystemExit


def watch(command: int, caller: socket.socket) -> int:
    """Waits for a command's end and tells its caller; if the caller ends first, ends the command."""
    caller.sendall(command.to_bytes(4, "little"))
    ended = os.pidfd_open(command)
    ready, _, _ = select.select([ended, caller], [], [])
    if ended not in ready:
        os.kill(command, signal.SIGKILL)
    _, status = os.waitpid(command, 0)
    if ended in ready:
        caller.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))
    return 0


def call(path: str, arguments: list[str]) -> int:
    """Has a command run; returns its exit status, as a shell counts."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        request = json.dumps([["cloister", *arguments], dict(os.environ), os.getcwd()]).encode()
        socket.send_fds(server, [request], [0, 1, 2])
        command = int.from_bytes(server.recv(4), "little")
        for number in _FORWARDED:
            signal.signal(number, lambda number, _: os.kill(command, number))
        status = int.from_bytes(server.recv(4), "little", signed=True)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
