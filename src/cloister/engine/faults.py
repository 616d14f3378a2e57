"""Exceptions as an operator may see them: kind and place, never the text, which could repeat what a user sent (rule 12)."""

from __future__ import annotations

import traceback


def describe(error: BaseException) -> str:
    """Returns such as "ValueError at inputs.py:42 in gather", and the name of a module that is missing, which is no content."""
    kind = type(error).__name__
    if isinstance(error, ModuleNotFoundError) and error.name:
        kind = f"{kind} of {error.name}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return kind
    last = frames[-1]
    return f"{kind} at {last.filename.rpartition('/')[2]}:{last.lineno} in {last.name}"
