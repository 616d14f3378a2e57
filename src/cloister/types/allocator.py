"""An allocator that overwrites what is freed, by variables that a process must be started with. Pure data.

glibc fills freed chunks with a byte (`perturb`), but not those that its thread cache takes, so there is no such cache;
CPython's own pools would keep what was in them, so every object comes from malloc. Measured in docs/decisions/0009.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

OVERWRITING: Final[Mapping[str, str]] = {
    "PYTHONMALLOC": "malloc",
    "GLIBC_TUNABLES": "glibc.malloc.perturb=85:glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0",
}
"""Environment of a process that handles content."""
FORGETFUL_PROFILES: Final = frozenset({"private", "paranoid"})
"""Profiles under which nothing of a request may outlive it in memory."""


def overwrites(profile: str | None) -> bool:
    """Whether processes under a profile overwrite what they free."""
    return profile in FORGETFUL_PROFILES
