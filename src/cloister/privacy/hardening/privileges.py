"""Measures `capabilities` and `no-new-privileges`: root in a node is nobody, and no program can make it more.

Sources: capabilities(7), capset(2), prctl(2).
"""

from __future__ import annotations

import ctypes
from typing import Final

from cloister.privacy.hardening import kernel
from cloister.privacy.hardening.measure import Missing, Needs
from cloister.privacy.hardening.syscalls import INTERFACES

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
    """Empties the bounding set where that is allowed (SETPCAP); where not, no-new-privileges keeps it from mattering."""
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
