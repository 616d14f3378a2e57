"""Batches: what a client asks for, what became of it, and the lines of its input."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import Field

from cloister.server.errors import invalid
from cloister.server.files.shelf import Kept
from cloister.server.parse import check_fields, parse_json
from cloister.server.schemas import MAX_METADATA, MetadataText, Strict
from cloister.types.errors import InvalidRequestError

WINDOW_S: Final = 24 * 3600
"""How long a batch may take; lines that were not answered until then are told so."""
MAX_LINES: Final = 50_000
MAX_MISTAKES: Final = 20
"""Lines at fault that are named."""
ENDED: Final = frozenset({"failed", "completed", "expired", "cancelled"})

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
Status = Literal["in_progress", "failed", "completed", "expired", "cancelling", "cancelled"]


class BatchBody(Strict):
    """Body of /v1/batches."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, MetadataText], Field(max_length=MAX_METADATA)] | None = None


class BatchLine(Strict):
    """A line of a batch's input: a request, and the client's name for it."""

    custom_id: Annotated[str, Field(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class Mistake(msgspec.Struct):
    """What is wrong with an input."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(Kept, kw_only=True):
    """A batch and how far it came.

    Attributes:
        key: digest of the API key that it was made with, hex; None without keys.
        output_id, error_id: of the files that its answers and its errors go to.
        ended_at: when it came to its status, if that is an end.
        has_output, has_errors: the files are there.
    """

    endpoint: str
    input_file_id: str
    completes_by: int
    key: str | None
    output_id: str
    error_id: str
    status: Status = "in_progress"
    metadata: dict[str, str] | None = None
    cancelling_at: int | None = None
    ended_at: int | None = None
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    has_output: bool = False
    has_errors: bool = False
    mistakes: list[Mistake] = msgspec.field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch. Its text says nothing of content."""

    custom_id: str
    body: bytes

    def __repr__(self) -> str:
        return f"Line(num_bytes={len(self.body)})"


def read_lines(content: bytes, endpoint: str) -> tuple[list[Line], list[Mistake]]:
    """Returns the requests of an input, and what is wrong with it; with any mistake, none of it may run."""
    lines: list[Line] = []
    mistakes: list[Mistake] = []
    seen: set[str] = set()
    for number, raw in enumerate(content.split(b"\n"), 1):
        if not raw.strip():
            continue
        if len(mistakes) >= MAX_MISTAKES:
            break
        if len(lines) >= MAX_LINES:
            mistakes.append(Mistake("too_many_lines", f"A batch may have {MAX_LINES} lines; make several.", number))
            break
        try:
            lines.append(_read_line(raw, endpoint, seen))
        except InvalidRequestError as error:
            mistakes.append(Mistake(error.code, error.message, number, error.param))
    if not lines and not mistakes:
        mistakes.append(Mistake("empty_file", "The input has no line; write one request a line."))
    return lines, mistakes


def _read_line(raw: bytes, endpoint: str, seen: set[str]) -> Line:
    read = parse_json(raw)
    if not isinstance(read, dict):
        raise invalid("A line must be a JSON object.", code="invalid_json_line")
    line = check_fields(read, BatchLine)
    if line.url != endpoint:
        raise invalid(f"`url` must be the batch's endpoint, `{endpoint}`.", "url", "mismatched_endpoint")
    if line.custom_id in seen:
        raise invalid("Two lines have the same `custom_id`; give each its own.", "custom_id", "duplicate_custom_id")
    if line.body.get("stream"):
        raise invalid("`body.stream` must be false: answers of a batch come whole.", "body.stream", "invalid_value")
    seen.add(line.custom_id)
    return Line(line.custom_id, json.dumps(line.body, ensure_ascii=False).encode())


def describe_batch(batch: Batch) -> dict[str, Any]:
    """Returns a batch as the OpenAI API shows it."""
    ends: Mapping[str, int | None] = {status: batch.ended_at if batch.status == status else None for status in ENDED}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": batch.mistakes} if batch.mistakes else None,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": batch.status,
        "output_file_id": batch.output_id if batch.has_output else None,
        "error_file_id": batch.error_id if batch.has_errors else None,
        "created_at": batch.created_at,
        "in_progress_at": batch.created_at if batch.num_lines else None,
        "expires_at": batch.completes_by,
        "finalizing_at": batch.ended_at if batch.status == "completed" else None,
        "completed_at": ends["completed"],
        "failed_at": ends["failed"],
        "expired_at": ends["expired"],
        "cancelling_at": batch.cancelling_at,
        "cancelled_at": ends["cancelled"],
        "request_counts": {"total": batch.num_lines, "completed": batch.num_completed, "failed": batch.num_failed},
        "metadata": batch.metadata,
    }


def done_ids(records: Sequence[bytes]) -> set[str]:
    """Returns the names of the lines that have an answer or an error."""
    return {msgspec.json.decode(record, type=_Done).custom_id for record in records}


class _Done(msgspec.Struct):
    custom_id: str
