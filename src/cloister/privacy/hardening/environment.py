"""Measure `environment`: no variable reaches a node but those of a short list, so that none loads code or makes it talk.

The launcher executes itself again with `measured`: nothing of the old environment was there when the interpreter started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cloister.privacy.hardening import kernel
from cloister.privacy.hardening.measure import Missing, Needs
from cloister.types.allocator import OVERWRITING

KEPT: Final = ("HOME", "PATH", "TZ", "TERM", "COLUMNS", "NO_COLOR", "HF_HOME", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
"""Variables that pass. None of them names code to load; PATH finds no program, as none can be executed."""
FIXED: Final[Mapping[str, str]] = {
    "LANG": "C.UTF-8",
    "LC_CTYPE": "C.UTF-8",
    "HF_HUB_OFFLINE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    **OVERWRITING,
}
"""Variables that every process of a node has."""
FLAGS: Final = ("-P", "-s", "-B")
"""Of the interpreter: no current directory and no user's packages on the import path, no byte code written."""
PRELOAD_FILE: Final = "/etc/ld.so.preload"
REMEDY: Final = "start the node by its launcher: python -P -m cloister.privacy.hardening MODULE"


class Environment:
    name = "environment"
    stops = "LD_PRELOAD, LD_AUDIT, PYTHONPATH, PYTHONSTARTUP, PYTHONBREAKPOINT, PYTHONINSPECT and all else that is not listed"

    def apply(self, needs: Needs) -> str:
        strange = sorted(set(os.environ) - set(KEPT) - set(FIXED))
        changed = sorted(name for name, value in FIXED.items() if os.environ.get(name) != value)
        if strange or changed:
            raise Missing(f"variables that are not measured: {', '.join((strange + changed)[:8])}", REMEDY)
        return f"{len(os.environ)} variables; {self.probe()}"

    def probe(self) -> str:
        preloaded = kernel.read_text(PRELOAD_FILE)
        if preloaded is not None and preloaded.strip():
            raise Missing(f"{PRELOAD_FILE} loads a library into every process", "empty it")
        if sys.flags.inspect or sys.flags.interactive:
            raise Missing("the interpreter was started to be inspected", "start it without -i")
        return "nothing is loaded in advance"


def measured(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment that a node starts with, from the one that it was started in."""
    return {**{name: environ[name] for name in KEPT if name in environ}, **FIXED}


def is_measured(environ: Mapping[str, str]) -> bool:
    """True if this interpreter was started with a measured environment and the flags of a node."""
    flags = sys.flags
    has_flags = flags.safe_path and flags.no_user_site == 1 and flags.dont_write_bytecode == 1
    has_others = flags.verbose or flags.inspect or sys._xoptions  # such as -X tracemalloc
    return dict(environ) == measured(environ) and has_flags and not has_others


def restart_command(arguments: tuple[str, ...]) -> list[str]:
    """Returns the command that starts the launcher again, with the flags of a node."""
    return [str(Path(sys.executable)), *FLAGS, "-m", "cloister.privacy.hardening", *arguments]
