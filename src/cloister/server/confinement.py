"""Bounds and confines the process that reads one file of a user. It starts for each file, so few modules are imported here."""

from __future__ import annotations

import importlib
import os
import resource
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
"""Extension modules that pypdf loads on demand for some fonts, which a locked-down process cannot do."""
CHANGING_RIGHTS: Final = (
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat"),
    *("setxattr", "lsetxattr", "fsetxattr", "setxattrat", "removexattr", "lremovexattr", "fremovexattr", "removexattrat"),
)
"""Not covered by Landlock."""
DISTURBING: Final = (
    *("kill", "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_open", "pidfd_send_signal"),
    *("setpriority", "ioprio_set", "sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler"),
)
"""Actions on other processes of the same user."""


class Disturbing:
    """Filter for actions that a sealed node's processes need but this one does not."""

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
"""In the order of application; `Closing` once everything is loaded."""


def bound_resources(cpu_s: int, memory_bytes: int) -> None:
    """Bounds processor time and address space of this process, which writes no files and yields to others."""
    os.nice(10)  # answers have priority
    for kind, bound in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
    ):
        # processes of a sealed node have no core files already, and may not set a limit again
        if resource.getrlimit(kind) != (bound, bound):
            resource.setrlimit(kind, (bound, bound))


def confine(parent: int) -> bool:
    """Irrevocably applies every available measure to this process, before it sees a byte of the file.

    Landlock removes access to files and TCP; system call filters remove sockets, programs, processes, signals, generated code
    and files opened for writing. The process cannot be traced, leaves no core dump, ends with the server, and is the first
    victim of the OOM killer. So a file that exploits the parser gains little. Call it once the parser is loaded.

    Args:
        parent: pid of the process with which it ends.

    Returns:
        Whether all measures are in force.
    """
    for name in LATE:
        with suppress(ImportError):
            importlib.import_module(name)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory is short, this process is killed, not the engine
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
    yield Rule("tgkill", (Condition(0, pid, equal=False),))  # abort(3) sends a signal to its own process
    yield Rule("prlimit64", (Condition(0, 0, equal=False),))
