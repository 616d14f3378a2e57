"""What is written when the server itself makes a mistake: where and what kind, never the words of an exception."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path
from typing import Final

from cloister.server.errors import INTERNAL
from cloister.types.errors import CloisterError

LOGGER: Final = logging.getLogger("cloister.server")


def log_failure(error: BaseException) -> None:
    """Logs the kind of an unexpected exception and the places it passed. Its text could hold what a user sent."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    LOGGER.error("unexpected %s at %s", type(error).__name__, places or "no known place")


def told(error: Exception) -> CloisterError:
    """Returns what a client is told: errors meant for it as they are, every other one as the server's mistake, logged."""
    if isinstance(error, CloisterError) and error.status != CloisterError.status:
        return error
    log_failure(error)
    return INTERNAL
