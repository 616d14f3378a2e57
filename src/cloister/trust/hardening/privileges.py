"""Measures `capabilities`, `no-new-privileges` and `environment`: root gains nothing, and few variables reach a node.

Sources: capabilities(7), capset(2), prctl(2).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cloister.trust.hardening import kernel
from cloister.trust.hardening.kernel import INTERFACES
from cloister.trust.hardening.measure import Missing, Needs
from cloister.types.processes import OVERWRITING

VERSION_3: Final = 0x20080522
CAP_NET_BIND_SERVICE: Final = 10
FIRST_FREE_PORT: Final = 1024


class _Header(ctypes.Structure):
    """struct __user_cap_header_struct."""

    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    """Two struct __user_cap_data_struct: the low and the high half of each set."""

    _fields_ = tuple(
        (f"{which}_{half}", ctypes.c_uint32) for half in ("low", "high") for which in ("effective", "permitted", "inheritable")
    )


class Capabilities:
    name = "capabilities"
    stops = "what root may do: load modules, trace, mount, raw input and output"

    def apply(self, needs: Needs) -> str:
        keeps_ports = any(0 < port < FIRST_FREE_PORT for port in needs.listen) and _has(CAP_NET_BIND_SERVICE)
        kept = 1 << CAP_NET_BIND_SERVICE if keeps_ports else 0
        _drop_bounding()
        kernel.prctl(kernel.PR_CAP_AMBIENT, kernel.PR_CAP_AMBIENT_CLEAR_ALL)
        sets = _Sets(effective_low=kept, permitted_low=kept)
        kernel.call(INTERFACES[kernel.machine()].numbers["capset"], _Header(VERSION_3, 0), sets)
        if _permitted() != kept:
            raise Missing("the process keeps capabilities", "start it without capabilities (Docker: --cap-drop ALL)")
        return "none but NET_BIND_SERVICE" if kept else "none"

    def probe(self) -> str:
        return "can be dropped"


class NoNewPrivileges:
    name = "no-new-privileges"
    stops = "set-uid programs and file capabilities"

    def apply(self, needs: Needs) -> str:
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        if kernel.prctl(kernel.PR_GET_NO_NEW_PRIVS) != 1:
            raise Missing("the kernel did not take it", "run on Linux 3.5 or newer")
        return "set"

    def probe(self) -> str:
        return "can be set"


def _drop_bounding() -> None:
    """Empties the bounding set if permitted (SETPCAP); if not, no-new-privileges makes it irrelevant."""
    for capability in range(64):
        try:
            if kernel.prctl(kernel.PR_CAPBSET_READ, capability):
                kernel.prctl(kernel.PR_CAPBSET_DROP, capability)
        except OSError:
            return


def _permitted() -> int:
    lines = (kernel.read_text("/proc/self/status") or "").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("CapPrm:")), 16)


def _has(capability: int) -> bool:
    return bool(_permitted() >> capability & 1)


# Measure `environment`: only listed variables reach a node, so that none can load code or enable debug output.
#
# The launcher re-executes itself with `measured`, so the interpreter starts without the old environment.


KEPT: Final = ("HOME", "PATH", "TZ", "TERM", "COLUMNS", "NO_COLOR", "HF_HOME", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
"""Allowed variables. None of them names code to load; PATH is harmless, because no program can be executed."""
FIXED: Final[Mapping[str, str]] = {
    "LANG": "C.UTF-8",
    "LC_CTYPE": "C.UTF-8",
    "HF_HUB_OFFLINE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    **OVERWRITING,
}
"""Variables of every process of a node."""
FLAGS: Final = ("-P", "-s", "-B")
"""Interpreter flags: no current directory or user packages on the import path, no byte code written."""
PRELOAD_FILE: Final = "/etc/ld.so.preload"
REMEDY: Final = "start the node by its launcher: python -P -m cloister.trust.hardening MODULE"


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
    """Returns a node's environment, derived from the inherited one."""
    return {**{name: environ[name] for name in KEPT if name in environ}, **FIXED}


def is_measured(environ: Mapping[str, str]) -> bool:
    """True if this interpreter was started with a measured environment and the flags of a node."""
    flags = sys.flags
    has_flags = flags.safe_path and flags.no_user_site == 1 and flags.dont_write_bytecode == 1
    has_others = flags.verbose or flags.inspect or sys._xoptions  # such as -X tracemalloc
    return dict(environ) == measured(environ) and has_flags and not has_others


def restart_command(arguments: tuple[str, ...]) -> list[str]:
    """Returns the command to re-execute the launcher, with the flags of a node."""
    return [str(Path(sys.executable)), *FLAGS, "-m", "cloister.trust.hardening", *arguments]
