"""Runs batches: a few lines at a time, behind requests that somebody waits for; goes on after a restart where it was."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import defaultdict
from contextlib import suppress
from typing import Any, Final

import msgspec
from starlette.types import ASGIApp

from cloister.engine.faults import describe
from cloister.privacy.gate import Admission, Gate
from cloister.server.files.batches import ENDED, Batch, Line, Mistake, Status, done_ids, read_lines
from cloister.server.files.inward import RouteReply, post
from cloister.server.files.shelf import Owner, Shelf
from cloister.server.files.store import FileStore
from cloister.server.ignored import IgnoredFields, noting
from cloister.types.errors import CloisterError, NotFoundError

SIDE_BY_SIDE: Final = 4
"""Lines of one batch that are answered at once."""
MAX_RUNNING: Final = 2
"""Batches of one owner that run at once; the owner's others wait for their turn."""
RETRY_S: Final = 1.0
MOST_RETRY_S: Final = 30.0
SWEEP_S: Final = 600.0
_TRY_AGAIN: Final = frozenset({429, 503})

_logger = logging.getLogger(__name__)


class BatchRunner:
    """The batches of one server. Used from its event loop.

    Args:
        app: takes requests that have their admission already.
    """

    def __init__(self, files: FileStore, batches: Shelf[Batch], gate: Gate, app: ASGIApp) -> None:
        self._files = files
        self._batches = batches
        self._gate = gate
        self._app = app
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._rooms: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(MAX_RUNNING))
        self._sweeper: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    def begin(self) -> None:
        """Goes on with batches that a server before this one did not end."""
        for batch in self._batches.all():
            if batch.status not in ENDED:
                self.start(batch)
        self._sweeper = asyncio.create_task(self._sweep(), name="files sweeper")

    def start(self, batch: Batch) -> None:
        """Runs a batch."""
        self._tasks[batch.id] = asyncio.create_task(self._run(batch), name="batch")
        self._tasks[batch.id].add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    def start_from_thread(self, batch: Batch) -> None:
        """As `start`, from any thread: a batch that was made runs, whoever still waits for the word of it."""
        self._loop.call_soon_threadsafe(self.start, batch)

    async def cancel(self, batch: Batch) -> None:
        """Ends a batch; what was answered stays."""
        if batch.status in ENDED:
            return
        batch.status, batch.cancelling_at = "cancelling", self._batches.now()
        if (task := self._tasks.get(batch.id)) is not None:
            task.cancel()
            await asyncio.wait([task])
        if batch.status == "cancelling":  # its task was not there, or had not begun
            await self._end(batch, self._owner_of(batch), "cancelled")

    async def close(self) -> None:
        """Stops; batches that run go on with the next server."""
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
        answered = done_ids(await asyncio.to_thread(self._files.lines, batch.output_id, owner))
        failed = done_ids(await asyncio.to_thread(self._files.lines, batch.error_id, owner))
        batch.num_completed, batch.num_failed = len(answered), len(failed)
        left = iter([line for line in lines if line.custom_id not in answered | failed])
        lock = asyncio.Lock()  # results are written one after the other
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
        with noting(IgnoredFields(is_strict=False)):  # they were taken when the batch was made
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
        """Asks until there is an answer, or an error that stays one; the batch's deadline ends it."""
        wait_s = RETRY_S
        while True:
            admission = self._admit(batch)
            if admission is None:
                raise NotFoundError("The API key of this batch is no longer known.", code="key_removed")
            reply = await post(self._app, batch.endpoint, line.body, admission)
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
        done = done_ids(await asyncio.to_thread(self._files.lines, batch.output_id, owner))
        done |= done_ids(await asyncio.to_thread(self._files.lines, batch.error_id, owner))
        told = {"code": "batch_expired", "message": "This request was not answered before the batch expired."}
        for line in lines:
            if line.custom_id not in done:
                await self._append(batch, owner, False, line, {"response": None, "error": told})

    async def _append(self, batch: Batch, owner: Owner, is_answer: bool, line: Line, result: dict[str, Any]) -> None:
        """Writes a line's one result. It counts when it is on the disk; a cancelled batch waits until it is."""
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
        """Makes files of the results and says how the batch ended. Where the disk refuses, the next server comes to the end."""
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
        records = self._files.lines(file_id, owner)
        if records:
            self._files.publish(owner, file_id, filename, sum(map(len, records)))
        return bool(records)

    def _admit(self, batch: Batch) -> Admission | None:
        return self._gate.readmit(None if batch.key is None else bytes.fromhex(batch.key))

    def _owner_of(self, batch: Batch) -> Owner | None:
        admission = self._admit(batch)
        if admission is None or admission.owner is None:
            return None
        return Owner.of(self._files.vault, admission.owner)
