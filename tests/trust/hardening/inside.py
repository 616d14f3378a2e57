"""Tries from inside a process what no process of a sealed node may do, on two threads; prints what became of it, as JSON.

Arguments: a directory that may be written to, one that may not, a port that may be taken, and the mode: `closed` closes
the process first, `harmless` tries only what can be tried on a process without measures.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from cloister.trust.hardening import close_this, kernel, sealed
from cloister.trust.hardening.interpreter import RefusedHook
from cloister.trust.hardening.kernel import INTERFACES
from cloister.trust.hardening.seccomp import ALWAYS, PR_SET_PTRACER

NUMBERS = INTERFACES[kernel.machine()].numbers
HARMLESS = (
    *(
        "be dumpable",
        "name a tracer",
        "fork",
        "run a program",
        "spawn a program",
        "run a shell",
        "trace",
        "profile",
        "trace threads",
    ),
    *("call out", "ask a name server", "take another port", "write where it may not", "make a directory where it may not"),
    *("read what it does not need", "list processes", "look into its parent"),
)
"""Attempts that do no harm to a process that takes no measures."""


def try_all(writable: Path, forbidden: Path, port: int, mode: str) -> dict[str, str]:
    attempts: dict[str, Callable[[], object]] = {
        **{
            f"call {name}": (lambda name=name: kernel.call(NUMBERS[name], 0, 0, 0, 0, 0, 0))
            for name in ALWAYS
            if name in NUMBERS
        },
        "call clone3": lambda: kernel.call(NUMBERS["clone3"], 0, 0),
        "be dumpable": lambda: kernel.prctl(kernel.PR_SET_DUMPABLE, 1),
        "name a tracer": lambda: kernel.prctl(PR_SET_PTRACER, os.getpid()),
        "raise the core limit": lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
        "read own memory from aside": lambda: kernel.call(NUMBERS["process_vm_readv"], os.getpid(), 0, 0, 0, 0, 0),
        "fork": fork,
        "execute": lambda: os.execv("/bin/true", ["true"]),
        "execute past the interpreter": lambda: kernel.call(NUMBERS["execve"], b"/bin/true", 0, 0),
        "run a program": lambda: subprocess.run(["/bin/true"], check=True),
        "spawn a program": lambda: os.posix_spawn("/bin/true", ["true"], {}),
        "run a shell": lambda: os.system("true"),
        "trace": lambda: sys.settrace(lambda *_: None),
        "profile": lambda: sys.setprofile(lambda *_: None),
        "trace threads": trace_threads,
        "break": breakpoint,
        "call out": lambda: call_out(("127.0.0.1", port)),
        "call out as it sends": lambda: send_fast(("127.0.0.1", port)),
        "ask a name server": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        "make a raw socket": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
        "take another port": lambda: take(port + 1),
        "write where it may not": lambda: (forbidden / "written").write_text("x"),
        "make a directory where it may not": lambda: (forbidden / "made").mkdir(),
        "read what it does not need": lambda: Path("/etc/passwd").read_text(),
        "list processes": lambda: os.listdir("/proc"),
        "look into its parent": lambda: Path(f"/proc/{os.getppid()}/environ").read_bytes(),
        "allowed: take its port": lambda: take(port),
        "allowed: write where it may": lambda: (writable / "written").write_text("x"),
        "allowed: make a thread": lambda: threading.Thread(target=int).start(),
        "allowed: map code": lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC),
        "allowed: load a library": lambda: ctypes.CDLL("libresolv.so.2"),
        "allowed: import a module": lambda: __import__("wave"),
    }
    chosen = HARMLESS if mode == "harmless" else attempts
    return {name: outcome(attempts[name]) for name in chosen}


def outcome(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, type(error).__name__)
    except Exception as error:
        return type(error).__name__
    return "worked"


def fork() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def trace_threads() -> None:
    threading.settrace(lambda *_: None)  # takes effect in the next thread, which then does not get to its work
    ran: list[bool] = []
    thread = threading.Thread(target=lambda: ran.append(True))
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        thread.start()
        thread.join()
    finally:
        sys.unraisablehook = hook
        threading.settrace(None)  # type: ignore[arg-type]
    if not ran:
        raise RefusedHook


def call_out(address: tuple[str, int]) -> None:
    with socket.socket() as sock:
        sock.settimeout(1)
        sock.connect(address)


def send_fast(address: tuple[str, int]) -> None:
    with socket.socket() as sock:
        sock.settimeout(1)
        sock.sendto(b"x", 0x20000000, address)  # MSG_FASTOPEN


def take(port: int) -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))


def main(writable: str, forbidden: str, port: str, mode: str) -> None:
    arguments = (Path(writable), Path(forbidden), int(port), mode)
    if mode == "closed":
        close_this()
    told: dict[str, dict[str, str]] = {"main": try_all(*arguments)}
    thread = threading.Thread(target=lambda: told.update(thread=try_all(*arguments)))
    thread.start()
    thread.join()
    state = sealed()
    statement = state.statement() if state is not None else {}
    print(json.dumps({**told, "statement": statement}))


if __name__ == "__main__":
    main(*sys.argv[1:5])
