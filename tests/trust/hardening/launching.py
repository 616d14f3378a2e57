"""Starting real processes through the launcher, and attackers with fewer rights than root has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cloister.trust.hardening import kernel, probe

HERE = Path(__file__).parent
DROPPED = {"SYS_MODULE": 16, "SYS_RAWIO": 17, "SYS_PTRACE": 19, "SYS_ADMIN": 21, "PERFMON": 38, "BPF": 39}
"""Capabilities that root in an ordinary container does not have, by their numbers (include/uapi/linux/capability.h)."""
DEADLINE_S = 300.0


def launcher(script: str, *arguments: object, profile: str = "private", options: Sequence[str] = ()) -> list[str]:
    """The command that runs a script of this directory through the launcher; `timeit` is a module that runs code."""
    path = str(HERE / script)
    code = f"import sys, runpy; sys.argv = {[path, *map(str, arguments)]!r}; runpy.run_path({path!r}, run_name='__main__')"
    here = ("--read", str(HERE))
    launch = [sys.executable, "-P", "-m", "cloister.trust.hardening", "--profile", profile, *here, *options]
    return [*launch, "timeit", "-n", "1", "-r", "1", "-s", code, "pass"]


def run_launched(script: str, *arguments: object, profile: str = "private", options: Sequence[str] = ()) -> dict[str, Any]:
    """Runs a script to its end and returns the JSON that it printed."""
    command = launcher(script, *arguments, profile=profile, options=options)
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return told


@contextmanager
def living(
    command: Sequence[str], *, stripped: bool, cwd: Path | None = None
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Starts a process that prints a line of JSON and waits; ends it at the end."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        preexec_fn=drop if stripped else None,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise AssertionError(process.communicate()[1][-2000:])
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()


def drop() -> None:
    """Takes the capabilities from this process that its next program would get."""
    for number in DROPPED.values():
        if kernel.prctl(kernel.PR_CAPBSET_READ, number):
            kernel.prctl(kernel.PR_CAPBSET_DROP, number)


def capabilities() -> int:
    """The effective capabilities of this process, as a mask."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("CapEff:")), 16)


def why_not_hardened() -> str | None:
    """Returns which measures this machine cannot give; None if a hardened process can be started."""
    missing = [f"{result.measure}: {result.detail}" for result in probe() if not result.applied]
    return "; ".join(missing) or None


needs_measures = pytest.mark.skipif(why_not_hardened() is not None, reason=str(why_not_hardened()))


def why_not_root(*needed: str) -> str | None:
    """Returns why this machine cannot try it: who is not root, or lacks capabilities; None if it can."""
    if os.getuid() != 0:
        return "the attacker has to be uid 0"
    lacking = [name for name in needed if not capabilities() >> DROPPED[name] & 1]
    return f"this container's root lacks {', '.join(lacking)}" if lacking else None
