"""Exceptions as an operator may see them: kind and place, never the text, which could repeat what a user sent (rule 12)."""

from __future__ import annotations

import traceback


def describe(error: BaseException) -> str:
    """Returns such as "ValueError at inputs.py:42 in gather"."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return type(error).__name__
    last = frames[-1]
    return f"{type(error).__name__} at {last.filename.rpartition('/')[2]}:{last.lineno} in {last.name}"
