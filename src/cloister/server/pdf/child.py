"""The process that reads one PDF file: standard input to standard output, no files, no output on standard error."""

from __future__ import annotations

import importlib
import io
import logging
import os
import re
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from cloister.trust.hardening import Measure, Missing, Needs, kernel
from cloister.trust.hardening.dumps import CoreLimit, Dumpable
from cloister.trust.hardening.landlock import Landlock
from cloister.trust.hardening.privileges import Capabilities, NoNewPrivileges
from cloister.trust.hardening.seccomp import Closing, Condition, Rule, Seccomp, install


class PdfLimits(msgspec.Struct, frozen=True):
    """Limits for one file.

    Attributes:
        cpu_s: processor time, whole seconds.
        deadline_s: time limit until the answer.
        memory_bytes: address space of the process that reads.
        num_chars: maximum length of the text.
    """

    cpu_s: int = 20
    deadline_s: float = 30.0
    memory_bytes: int = 1 << 30
    num_pages: int = 500
    num_chars: int = 1 << 20


class PdfAnswer(msgspec.Struct, frozen=True):
    """The result of the process.

    Attributes:
        fault: why there is no text, as one of `pdf.reading.FAULTS`, or `unconfined`; empty if there is.
    """

    num_pages: int = 0
    text: str = ""
    fault: str = ""


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
        if resource.getrlimit(kind) != (bound, bound):  # a sealed node's processes have no core files, and may not say so again
            resource.setrlimit(kind, (bound, bound))


def confine(parent: int) -> bool:
    """Irrevocably applies every available measure to this process, before it sees a byte of the file.

    Landlock removes access to files and TCP; system call filters remove sockets, programs, processes, signals, generated code
    and files opened for writing. The process cannot be traced, leaves no core dump, ends with the server, and is the first
    victim of the OOM killer. So a file that exploits the parser gains little. Call it once pypdf is loaded.

    Args:
        parent: pid of the process with which it ends.

    Returns:
        Whether all measures are in force.
    """
    for name in LATE:
        with suppress(ImportError):
            importlib.import_module(name)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # not the engine, if memory does not suffice for both
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


UNSEEN: Final = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f"  # control characters, but for tabs and new lines
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # that turn the direction of text (Trojan Source, CVE-2021-42574)
    "\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e007f]"  # annotation characters, and tags, which can spell invisible text
)


def main() -> None:
    """Reads a file under the limits of the first argument, as JSON, and writes a `PdfAnswer`.

    The second argument is the process that started this one, the third is `strict` if every measure of `MEASURES` is required.
    """
    limits = msgspec.json.decode(sys.argv[1], type=PdfLimits)
    logging.disable()  # pypdf's warnings may contain content
    bound_resources(limits.cpu_s, limits.memory_bytes)
    import pypdf  # noqa: F401 (of an extra: a sealed node imports every module of the package and has no PDF reader)

    is_confined = confine(int(sys.argv[2]))
    answer = (
        PdfAnswer(fault="unconfined") if sys.argv[3] == "strict" and not is_confined else read(sys.stdin.buffer.read(), limits)
    )
    sys.stdout.buffer.write(msgspec.json.encode(answer))


def read(data: bytes, limits: PdfLimits) -> PdfAnswer:
    """Returns the text layer of a file, with an empty line between pages."""
    import pypdf

    try:
        document = pypdf.PdfReader(io.BytesIO(data))
        if document.is_encrypted and not document.decrypt(""):
            return PdfAnswer(fault="encrypted")
        num_pages = len(document.pages)
        if num_pages > limits.num_pages:
            return PdfAnswer(fault="pages")
        texts: list[str] = []
        for page in document.pages:
            texts.append(UNSEEN.sub("", page.extract_text()).strip())
            if sum(map(len, texts)) > limits.num_chars:
                return PdfAnswer(fault="long")
    except MemoryError:
        return PdfAnswer(fault="costly")
    except Exception:  # of many types; its message may contain content
        return PdfAnswer(fault="damaged")
    text = "\n\n".join(filter(None, texts)).encode(errors="replace").decode()
    return PdfAnswer(num_pages, text, "" if text.strip() else "no_text")


if __name__ == "__main__":
    main()
