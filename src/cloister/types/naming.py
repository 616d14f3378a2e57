"""Names of processes, as `ps` shows them: forks of one program have one command line. Linux only; elsewhere nothing."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

_PR_SET_NAME: Final = 15
_LONGEST: Final = 15  # the kernel cuts what is longer


def name_process(name: str) -> None:
    """Names this thread, which is the process's name if it is the first one, `cl-NAME`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"cl-{name}".encode()[:_LONGEST])
