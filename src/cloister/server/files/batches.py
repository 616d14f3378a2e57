"""Batches: requests, status and input lines, and a runner that processes them with lower priority than interactive requests."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import Field
from starlette.types import ASGIApp

from cloister.policy.gate import Admission, Gate
from cloister.server.errors import invalid
from cloister.server.files.internal_requests import RouteReply, post
from cloister.server.files.store import FileStore, Kept, Owner, Shelf
from cloister.server.load_shedding import BodyBudget
from cloister.server.parse import IgnoredFields, check_fields, noting, parse_json
from cloister.server.schemas import MAX_METADATA, MetadataText, Strict
from cloister.types.errors import CloisterError, InvalidRequestError, NotFoundError
from cloister.types.logs import describe

WINDOW_S: Final = 24 * 3600
"""Deadline of a batch; lines without an answer by then get an error."""
MAX_LINES: Final = 50_000
MAX_MISTAKES: Final = 20
"""Maximum number of invalid lines that are reported."""
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
    """An error in an input."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(Kept, kw_only=True):
    """A batch and its progress.

    Attributes:
        key: digest of its API key, hex; None without keys.
        output_id, error_id: ids of the files for its answers and errors.
        ended_at: time of its final status.
        has_output, has_errors: whether the files exist.
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
    """One request of a batch. Its repr omits content."""

    custom_id: str
    body: bytes

    def __repr__(self) -> str:
        return f"Line(num_bytes={len(self.body)})"


def read_lines(content: bytes, endpoint: str) -> tuple[list[Line], list[Mistake]]:
    """Returns the requests of an input, and its errors; with any error, none of it may run."""
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
    """Returns a batch in the format of the OpenAI API."""
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


def done_ids(records: Iterable[bytes]) -> set[str]:
    """Returns the names of the lines that have an answer or an error."""
    return {msgspec.json.decode(record, type=_Done).custom_id for record in records}


class _Done(msgspec.Struct):
    custom_id: str


# Runs batches a few lines at a time, with lower priority than interactive requests, and resumes after a restart.


SIDE_BY_SIDE: Final = 4
"""Lines of one batch that are processed concurrently."""
MAX_RUNNING: Final = 2
"""Concurrent batches of one owner; the owner's others wait."""
RETRY_S: Final = 1.0
MOST_RETRY_S: Final = 30.0
SWEEP_S: Final = 600.0
_TRY_AGAIN: Final = frozenset({429, 503})

_logger = logging.getLogger(__name__)


class BatchRunner:
    """The batches of one server. Used from its event loop.

    Args:
        app: application for requests that are already admitted.
        budget: memory that their bodies are charged to.
    """

    def __init__(self, files: FileStore, batches: Shelf[Batch], gate: Gate, app: ASGIApp, budget: BodyBudget) -> None:
        self._files = files
        self._batches = batches
        self._gate = gate
        self._app = app
        self._budget = budget
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._rooms: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(MAX_RUNNING))
        self._sweeper: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    def begin(self) -> None:
        """Resumes batches that an earlier server did not finish."""
        for batch in self._batches.all():
            if batch.status not in ENDED:
                self.start(batch)
        self._sweeper = asyncio.create_task(self._sweep(), name="files sweeper")

    def start(self, batch: Batch) -> None:
        """Runs a batch."""
        self._tasks[batch.id] = asyncio.create_task(self._run(batch), name="batch")
        self._tasks[batch.id].add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    def start_from_thread(self, batch: Batch) -> None:
        """Like `start`, from any thread: a stored batch runs even if its client has disconnected."""
        self._loop.call_soon_threadsafe(self.start, batch)

    async def cancel(self, batch: Batch) -> None:
        """Cancels a batch; finished answers are kept."""
        if batch.status in ENDED:
            return
        batch.status, batch.cancelling_at = "cancelling", self._batches.now()
        if (task := self._tasks.get(batch.id)) is not None:
            task.cancel()
            await asyncio.wait([task])
        if batch.status == "cancelling":  # its task did not exist, or had not begun
            await self._end(batch, self._owner_of(batch), "cancelled")

    async def close(self) -> None:
        """Stops; running batches resume on the next server."""
        tasks = [*self._tasks.values(), *([self._sweeper] if self._sweeper is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _sweep(self) -> None:
        while True:
            await asyncio.to_thread(self._files.sweep)
            for batch_id in self._batches.expired():
                await asyncio.to_thread(self._batches.remove, batch_id)
            await asyncio.sleep(SWEEP_S)

    async def _run(self, batch: Batch) -> None:
        owner = self._owner_of(batch)
        try:
            async with self._rooms[batch.owner]:
                status = "cancelled" if batch.status == "cancelling" else await self._answer_all(batch, owner)
        except asyncio.CancelledError:
            if batch.status != "cancelling":
                raise
            status = "cancelled"
        except CloisterError as error:
            batch.mistakes = [Mistake(error.code, error.message)]
            status = "failed"
        except Exception as error:
            _logger.error("a batch failed: %s", describe(error))
            batch.mistakes = [Mistake("internal_error", "The server made a mistake; it was logged without your data.")]
            status = "failed"
        await self._end(batch, owner, status)

    async def _answer_all(self, batch: Batch, owner: Owner | None) -> Status:
        admission = self._admit(batch)
        if admission is None or owner is None:
            raise NotFoundError("The API key of this batch is no longer known.", code="key_removed")
        lines = await asyncio.to_thread(self._read, batch, owner)
        answered = await asyncio.to_thread(self._read_done, batch.output_id, owner)
        failed = await asyncio.to_thread(self._read_done, batch.error_id, owner)
        batch.num_completed, batch.num_failed = len(answered), len(failed)
        left = iter([line for line in lines if line.custom_id not in answered | failed])
        lock = asyncio.Lock()  # results are written sequentially
        try:
            async with asyncio.timeout(max(0, batch.completes_by - self._batches.now())), asyncio.TaskGroup() as group:
                for _ in range(SIDE_BY_SIDE):
                    group.create_task(self._answer_some(batch, owner, left, lock))
        except TimeoutError:
            await self._tell_expired(batch, owner, lines)
            return "expired"
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        return "completed"

    def _read(self, batch: Batch, owner: Owner) -> list[Line]:
        stored = self._files.shelf.find(batch.input_file_id, owner)
        with noting(IgnoredFields(is_strict=False)):  # they were accepted when the batch was created
            lines, mistakes = read_lines(self._files.content(stored, owner), batch.endpoint)
        if mistakes:
            raise CloisterError(mistakes[0].message, code=mistakes[0].code)
        return lines

    async def _answer_some(self, batch: Batch, owner: Owner, left: Any, lock: asyncio.Lock) -> None:
        for line in left:
            reply = await self._answer(batch, line)
            async with lock:
                await self._write(batch, owner, line, reply)

    async def _answer(self, batch: Batch, line: Line) -> RouteReply:
        """Retries until there is an answer or a permanent error, up to the batch's deadline."""
        wait_s = RETRY_S
        while True:
            admission = self._admit(batch)
            if admission is None:
                raise NotFoundError("The API key of this batch is no longer known.", code="key_removed")
            reply = await post(self._app, batch.endpoint, line.body, admission, self._budget)
            if reply.status not in _TRY_AGAIN:
                return reply
            with suppress(ValueError):
                wait_s = max(wait_s, float(reply.headers.get("retry-after", "")))
            await asyncio.sleep(min(wait_s, MOST_RETRY_S))
            wait_s *= 2

    async def _write(self, batch: Batch, owner: Owner, line: Line, reply: RouteReply) -> None:
        is_answer = reply.status == 200
        response = {
            "status_code": reply.status,
            "request_id": reply.headers.get("x-request-id", ""),
            "body": msgspec.Raw(reply.body),
        }
        await self._append(batch, owner, is_answer, line, {"response": response, "error": None})

    async def _tell_expired(self, batch: Batch, owner: Owner, lines: list[Line]) -> None:
        done = await asyncio.to_thread(self._read_done, batch.output_id, owner)
        done |= await asyncio.to_thread(self._read_done, batch.error_id, owner)
        told = {"code": "batch_expired", "message": "This request was not answered before the batch expired."}
        for line in lines:
            if line.custom_id not in done:
                await self._append(batch, owner, False, line, {"response": None, "error": told})

    async def _append(self, batch: Batch, owner: Owner, is_answer: bool, line: Line, result: dict[str, Any]) -> None:
        """Writes a line's result. It counts once it is on the disk; a cancelled batch waits for that."""
        record = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": line.custom_id, **result}
        place = batch.num_completed if is_answer else batch.num_failed
        file_id = batch.output_id if is_answer else batch.error_id
        data = msgspec.json.encode(record)
        writing = asyncio.ensure_future(asyncio.to_thread(self._files.append, file_id, owner, place, data))
        try:
            await asyncio.shield(writing)
        finally:
            await asyncio.wait([writing])
            if not writing.cancelled() and writing.exception() is None:
                if is_answer:
                    batch.num_completed += 1
                else:
                    batch.num_failed += 1

    async def _end(self, batch: Batch, owner: Owner | None, status: Status) -> None:
        """Creates files of the results and sets the batch's final status. If the disk fails, the next server finishes it."""
        try:
            if owner is not None:
                batch.has_output = await asyncio.to_thread(self._publish, owner, batch.output_id, f"{batch.id}_output.jsonl")
                batch.has_errors = await asyncio.to_thread(self._publish, owner, batch.error_id, f"{batch.id}_error.jsonl")
            batch.status, batch.ended_at = status, self._batches.now()
            await asyncio.to_thread(self._batches.put, batch)
        except CloisterError as error:
            batch.status, batch.ended_at = "failed", self._batches.now()
            batch.mistakes = [Mistake(error.code, error.message)]

    def _publish(self, owner: Owner, file_id: str, filename: str) -> bool:
        num_bytes = sum(map(len, self._files.lines(file_id, owner)))
        if num_bytes:
            self._files.publish(owner, file_id, filename, num_bytes)
        return num_bytes > 0

    def _read_done(self, file_id: str, owner: Owner) -> set[str]:
        return done_ids(self._files.lines(file_id, owner))

    def _admit(self, batch: Batch) -> Admission | None:
        return self._gate.readmit(None if batch.key is None else bytes.fromhex(batch.key))

    def _owner_of(self, batch: Batch) -> Owner | None:
        admission = self._admit(batch)
        if admission is None or admission.owner is None:
            return None
        return Owner.of(self._files.vault, admission.owner)
