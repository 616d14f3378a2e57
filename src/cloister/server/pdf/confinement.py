"""What the process that reads a PDF file gives up before it sees a byte of it: a file that captures the parser gains little.

Landlock takes files and TCP from it, system call filters take sockets, programs, processes, signals, generated code and files
opened for writing. It cannot be looked into, leaves no core, ends with the server, and is the first to go when memory is short.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from cloister.trust.hardening import Measure, Missing, Needs, kernel
from cloister.trust.hardening.dumps import CoreLimit, Dumpable
from cloister.trust.hardening.landlock import Landlock
from cloister.trust.hardening.privileges import Capabilities, NoNewPrivileges
from cloister.trust.hardening.seccomp import Closing, Condition, Rule, Seccomp, install

NEEDS: Final = Needs("pdf")
LATE: Final = ("_codecs_cn", "_codecs_hk", "_codecs_iso2022", "_codecs_jp", "_codecs_kr", "_codecs_tw", "_multibytecodec")
"""Extension modules that pypdf loads when a font asks for them, which a closed process cannot."""
CHANGING_RIGHTS: Final = (
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat"),
    *("setxattr", "lsetxattr", "fsetxattr", "setxattrat", "removexattr", "lremovexattr", "fremovexattr", "removexattrat"),
)
"""Landlock has no say in these."""
DISTURBING: Final = (
    *("kill", "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_open", "pidfd_send_signal"),
    *("setpriority", "ioprio_set", "sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler"),
)
"""What one process of a user may do to another."""


class Disturbing:
    """The filter for what a sealed node's processes may do and this one need not."""

    name = "disturbing"
    stops = "signals to other processes, changes of their priority and limits, changed rights of files"

    def apply(self, needs: Needs) -> str:
        return f"{install(_rules(os.getpid()))} instructions"

    def probe(self) -> str:
        return Seccomp().probe()


MEASURES: Final[tuple[Measure, ...]] = (
    CoreLimit(),
    Capabilities(),
    NoNewPrivileges(),
    Landlock(),
    Dumpable(),
    Disturbing(),
    Seccomp(),
    Closing(),
)
"""In the order of application; `Closing` when everything is loaded."""


def confine(parent: int) -> bool:
    """Applies every measure that this machine has to this process, for good. Call it when pypdf is loaded.

    Args:
        parent: the process to end with.

    Returns:
        Whether it has all of them.
    """
    for name in LATE:
        with suppress(ImportError):
            importlib.import_module(name)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # not the engine, if the two do not fit
    results = [_apply(measure) for measure in MEASURES]
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # after the capabilities: the kernel forgets it when they change
    if os.getppid() != parent:
        os._exit(1)
    return all(results)


def _apply(measure: Measure) -> bool:
    try:
        measure.apply(NEEDS)
    except (Missing, OSError):
        return False
    return True


def _rules(pid: int) -> Iterator[Rule]:
    yield from (Rule(name) for name in (*CHANGING_RIGHTS, *DISTURBING))
    yield Rule("tgkill", (Condition(0, pid, equal=False),))  # abort(3) sends it to its own process
    yield Rule("prlimit64", (Condition(0, 0, equal=False),))
