"""Measures inside the interpreter: `hooks` (debuggers, profilers), `tracebacks`, `faulthandler`, `signals`.

An audit hook (PEP 578) cannot be removed, and refuses unwanted events in every thread.
"""

from __future__ import annotations

import ctypes.util
import faulthandler
import signal
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Final

from cloister.trust.hardening.measure import Missing, Needs

REFUSED_EVENTS: Final = frozenset(
    {
        *("sys.settrace", "sys.setprofile", "sys.monitoring.register_callback", "builtins.breakpoint", "pdb.Pdb"),
        *("sys.remote_exec", "cpython.remote_debugger_script", "code.interact", "cpython.run_interactivehook"),
        *("os.exec", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen", "pty.spawn"),
        *("gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys._current_frames", "sys._current_exceptions"),
    }
)
"""Audit events of debuggers, profilers and shells (docs.python.org/library/audit_events)."""

QUIET_SIGNALS: Final = ("SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGPROF", "SIGVTALRM", "SIGALRM", "SIGIO", "SIGPWR", "SIGTRAP")
"""Signals that often trigger a dump, a profile or more logging; here they are ignored."""

OWN_FRAMES: Final = 8


class RefusedHook(PermissionError):
    """Raised for an action that is forbidden in a sealed node; libraries that try a program first then use their fallback."""


class Hooks:
    name = "hooks"
    stops = "debuggers, profilers, shells and programs from inside the interpreter"

    def apply(self, needs: Needs) -> str:
        if sys.gettrace() is not None or sys.getprofile() is not None:
            raise Missing("a debugger or profiler is attached already", "start the node without it")
        if not _is_refusing():
            sys.addaudithook(_refuse)
        ctypes.util.find_library = _find_nothing  # it would run ldconfig and a compiler
        try:
            sys.settrace(None)
        except RefusedHook:
            return f"{len(REFUSED_EVENTS)} events refused"
        raise Missing("the audit hook does not answer", "use CPython")

    def probe(self) -> str:
        return f"{len(REFUSED_EVENTS)} events can be refused"


class Tracebacks:
    """An exception's text may contain user content; its type and code locations do not."""

    name = "tracebacks"
    stops = "content in reports of uncaught exceptions"

    def apply(self, needs: Needs) -> str:
        sys.excepthook = _write_exception
        threading.excepthook = lambda args: _write_exception(args.exc_type, args.exc_value, args.exc_traceback)
        sys.unraisablehook = lambda args: _write_exception(args.exc_type, args.exc_value, args.exc_traceback)
        return "kind and places, no text and no values"

    def probe(self) -> str:
        return "can be shortened"


class Faulthandler:
    name = "faulthandler"
    stops = "stacks of threads on a crash or a signal"

    def apply(self, needs: Needs) -> str:
        faulthandler.disable()
        for name in ("enable", "register", "dump_traceback", "dump_traceback_later"):
            setattr(faulthandler, name, _do_nothing)
        if faulthandler.is_enabled():
            raise Missing("it stays on", "start without -X faulthandler")
        return "off; its functions do nothing"

    def probe(self) -> str:
        return "can be off"


class Signals:
    name = "signals"
    stops = "signals that ask for more of a log, a dump or a profile"

    def apply(self, needs: Needs) -> str:
        numbers = [getattr(signal, name) for name in QUIET_SIGNALS if hasattr(signal, name)]
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        return f"{len(numbers)} ignored"

    def probe(self) -> str:
        return "can be ignored"


def _refuse(event: str, _: tuple[object, ...]) -> None:
    if event in REFUSED_EVENTS:
        raise RefusedHook(f"{event} is refused in a sealed node")


def _is_refusing() -> bool:
    try:
        sys.audit("builtins.breakpoint")
    except RefusedHook:
        return True
    return False


def _write_exception(kind: type[BaseException], _: BaseException | None, trace: TracebackType | None) -> None:
    places: list[str] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append(f"{Path(code.co_filename).name}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    text = f"{kind.__name__} at {' < '.join(reversed(places[-OWN_FRAMES:])) or 'no known place'}\n"
    if sys.stderr is not None:
        sys.stderr.write(text)


def _find_nothing(name: str) -> str | None:  # noqa: ARG001
    """Replaces the search for a library by programs, which cannot be executed."""
    return None


def _do_nothing(*_: object, **__: object) -> None:
    """Replaces functions that would write stacks."""
