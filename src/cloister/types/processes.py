"""Process names as shown by `ps`, and an allocator that overwrites freed memory. Linux only; no effect elsewhere."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from typing import Final

_PR_SET_NAME: Final = 15
_LONGEST: Final = 15  # the kernel truncates longer names


def name_process(name: str) -> None:
    """Names this thread, which is the process's name if it is the first one, `cl-NAME`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"cl-{name}".encode()[:_LONGEST])


# Environment variables for an allocator that overwrites freed memory, set before a process starts. Pure data.
#
# glibc fills freed chunks with a byte (`perturb`), but not those in its thread cache, so that is disabled; CPython's own pools
# would keep old content, so every object comes from malloc. Measured in docs/decisions/0009.


OVERWRITING: Final[Mapping[str, str]] = {
    "PYTHONMALLOC": "malloc",
    "GLIBC_TUNABLES": "glibc.malloc.perturb=85:glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0",
}
"""Environment of a process that handles content."""
FORGETFUL_PROFILES: Final = frozenset({"private", "paranoid"})
"""Profiles under which no content of a request may remain in memory after it."""


def overwrites(profile: str | None) -> bool:
    """Whether processes under a profile overwrite freed memory."""
    return profile in FORGETFUL_PROFILES
