"""Log formatting as text or JSON, with fields from one list and no free text from elsewhere.

Messages of this package contain no user content. Messages of other packages and texts of exceptions may, so only the template
of other packages' records is written, and of an exception only its type and its code locations.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TextIO

FIELDS: Final = (
    "request_id",
    "method",
    "route",
    "status",
    "duration_s",
    "queue_s",
    "first_token_s",
    "num_prompts",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_output_tokens",
    "num_preemptions",
    "finish_reasons",
    "replicas",
    "client",
)
"""Extra fields that a record may have; all others are omitted."""
OURS: Final = "cloister"
_PLACES: Final = re.compile(r"%(\(\w+\))?[-#0 +]*[\d*]*(\.[\d*]+)?[a-zA-Z]")
"""Placeholders in a template (printf-style formatting)."""


class _Formatter(logging.Formatter):
    """Selects the fields of a record that may be written.

    Args:
        replica: which replica's engine logs; None: this is none of several.
    """

    def __init__(self, replica: int | None = None) -> None:
        super().__init__()
        self._replica = replica

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
        }
        if self._replica is not None:
            fields["replica"] = self._replica
        fields.update((name, record.__dict__[name]) for name in FIELDS if name in record.__dict__)
        if record.exc_info and record.exc_info[1] is not None:
            fields["exception"] = _describe(record.exc_info[1])
        return self.write(fields)

    def write(self, fields: dict[str, object]) -> str:
        raise NotImplementedError


class JsonFormatter(_Formatter):
    """One JSON object in a line."""

    def write(self, fields: dict[str, object]) -> str:
        return json.dumps(fields, separators=(",", ":"), ensure_ascii=False)


class TextFormatter(_Formatter):
    """Time, level, logger and message, then the fields as `name=value`."""

    def write(self, fields: dict[str, object]) -> str:
        head = [str(fields.pop(name)) for name in ("time", "level", "logger", "message")]
        rest = [f"{name}={_as_text(value)}" for name, value in fields.items()]
        return " ".join([head[0], head[1].upper(), f"{head[2]}:", head[3], *rest])


FORMATS: Final = {"text": TextFormatter, "json": JsonFormatter}


def set_up_logging(log_format: str, stream: TextIO | None = None, *, replica: int | None = None) -> None:
    """Writes log records of this process to a stream (default: standard error): ours from INFO on, others from WARNING on.

    Args:
        log_format: a name in `FORMATS`.
        replica: every line names this replica; None: no line does.
    """
    logging.raiseExceptions = False  # a line that cannot be written must not bring the text of an exception to standard error
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(FORMATS[log_format](replica))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger(OURS).setLevel(logging.INFO)


def _message(record: logging.LogRecord) -> str:
    if record.name.partition(".")[0] == OURS:
        return record.getMessage()
    if record.args:
        return _PLACES.sub("…", str(record.msg))
    return f"a message from {Path(record.pathname).name}:{record.lineno}"


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    return f"{type(error).__name__} at {places or 'no known place'}"


def _as_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# Exceptions for operators: type and code location, never the text, which could contain user input.


def describe(error: BaseException) -> str:
    """Returns text such as "ValueError at inputs.py:42 in gather"; for a missing module also its name, which is no user
    content."""
    kind = type(error).__name__
    if isinstance(error, ModuleNotFoundError) and error.name:
        kind = f"{kind} of {error.name}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return kind
    last = frames[-1]
    return f"{kind} at {last.filename.rpartition('/')[2]}:{last.lineno} in {last.name}"
