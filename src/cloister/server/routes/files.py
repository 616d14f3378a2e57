"""`/v1/files` and `/v1/batches`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cloister.policy.gate import Admission
from cloister.server.errors import OverloadedError, invalid
from cloister.server.files.batches import ENDED, WINDOW_S, Batch, BatchBody, describe_batch, read_lines
from cloister.server.files.service import FileService, FormPart, read_form, require
from cloister.server.files.store import LIFETIME_S, Owner, StoredFile, page
from cloister.server.kept_content import charge_kept
from cloister.server.parse import check_fields, parse_body
from cloister.server.route_table import RouteTable
from cloister.server.schemas import Strict
from cloister.server.state import ServerState, admission_of, json_response, state_of
from cloister.types.errors import QueueFullError, RateLimitError

router = RouteTable()

MAX_NAME: Final = 255
LEAST_LIFETIME_S: Final = 3600
READ_BYTES: Final = 64 * 2**10
"""Bytes of a file that are read at once, or one line that is longer: a turn of the threads for each short line takes 70 times
as long as reading it."""
READ_TIMEOUT_S: Final = 300.0
"""How long the next bytes of a file that is being sent may wait for a turn of the threads; then its connection ends."""
TURN_RETRY_S: Final = 1.0
"""Pause before such bytes ask again for a place in a queue that is full."""


class UploadForm(Strict):
    """Parts of the form of /v1/files."""

    file: Annotated[str, Field(json_schema_extra={"format": "binary"})]
    purpose: Literal["batch"]
    expires_after_anchor: Annotated[Literal["created_at"] | None, Field(alias="expires_after[anchor]")] = None
    expires_after_seconds: Annotated[str | None, Field(alias="expires_after[seconds]", pattern="^[0-9]{1,9}$")] = None


class FileObject(msgspec.Struct, frozen=True):
    """Description of a file."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class FileList(msgspec.Struct, frozen=True):
    """Reply of /v1/files."""

    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class DeletedFile(msgspec.Struct, frozen=True):
    """Reply to a DELETE."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


@router.post("/v1/files")
async def upload_file(request: Request) -> Response:
    """Keeps a file."""
    state, files, owner = opened(request)
    content_type = request.headers.get("content-type", "")
    return json_response(await state.off_the_loop(_keep, files, owner, content_type, await request.body()))


@router.get("/v1/files")
async def list_files(request: Request) -> Response:
    """Lists the requester's files, newest first."""
    _, files, owner = opened(request)
    found = files.store.shelf.of(owner)
    if (purpose := request.query_params.get("purpose")) is not None:
        found = [stored for stored in found if stored.purpose == purpose]
    if request.query_params.get("order") == "asc":
        found.reverse()
    shown, more = page(found, read_limit(request, 10_000), request.query_params.get("after"))
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    return json_response(FileList([_describe(stored) for stored in shown], first, last, more))


@router.get("/v1/files/{file_id}")
async def retrieve_file(request: Request, file_id: str) -> Response:
    """Describes a file."""
    _, files, owner = opened(request)
    return json_response(_describe(files.store.shelf.find(file_id, owner)))


@router.get("/v1/files/{file_id}/content")
async def read_file(request: Request, file_id: str) -> Response:
    """Returns the content of a file."""
    state, files, owner = opened(request)
    stored = files.store.shelf.find(file_id, owner)
    pieces = files.store.read(stored, owner)
    first = await state.off_the_loop(_gather, pieces)
    return StoredContent(first, partial(_read_on, state, pieces), stored.bytes)


def _gather(pieces: Iterator[bytes]) -> bytes:
    """Returns the next pieces of a file together, `READ_BYTES` or a little more; empty at the end."""
    gathered, num_bytes = [], 0
    for piece in pieces:
        gathered.append(piece)
        num_bytes += len(piece)
        if num_bytes >= READ_BYTES:
            break
    return b"".join(gathered)


async def _read_on(state: ServerState, pieces: Iterator[bytes]) -> bytes:
    """Returns the next pieces of a file whose reply has begun, which cannot be refused any more: it waits for its turn.

    Raises:
        OverloadedError: it did not get one within `READ_TIMEOUT_S`.
    """
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            while True:
                with suppress(QueueFullError):
                    return await state.threads.run(state.tenant, 0, partial(_gather, pieces))
                await asyncio.sleep(TURN_RETRY_S)
    except TimeoutError:
        raise OverloadedError("The server is too busy to read the file; try again in a moment.") from None


class StoredContent(Response):
    """A reply whose body is read while it is sent, as it may be larger than all memory for replies.

    What is found to be damaged behind the first piece ends the connection before the length that the head states.

    Args:
        first: its first piece, which was read before anything is sent, so that an error gets its status.
        read: returns the next piece; empty at the end.
        num_bytes: of all pieces.
    """

    def __init__(self, first: bytes, read: Callable[[], Awaitable[bytes]], num_bytes: int) -> None:
        self.status_code = 200
        self.media_type = "application/octet-stream"
        self.background = None
        self.init_headers({"content-length": str(num_bytes)})
        self._first, self._read = first, read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        piece, self._first = self._first, b""
        while piece:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            piece = await self._read()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@router.delete("/v1/files/{file_id}")
async def delete_file(request: Request, file_id: str) -> Response:
    """Removes a file."""
    state, files, owner = opened(request)
    await state.off_the_loop(files.store.remove, files.store.shelf.find(file_id, owner).id)
    return json_response(DeletedFile(file_id))


def opened(request: Request) -> tuple[ServerState, FileService, Owner]:
    """Returns the state, the store, and the owner whose files a request may access.

    Raises:
        PolicyError, NotFoundError: this server stores no files.
    """
    state = state_of(request)
    files = require(state.files, state.reader.gate)
    return state, files, files.owner(admission_of(request))


def read_limit(request: Request, most: int) -> int:
    """Returns the requested number of list entries."""
    given = request.query_params.get("limit", str(most))
    if not (given.isascii() and given.isdecimal() and len(given) < 6 and 1 <= int(given) <= most):
        raise invalid(f"`limit` must be a whole number from 1 to {most}.", "limit", "invalid_value")
    return int(given)


def _keep(files: FileService, owner: Owner, content_type: str, body: bytes) -> FileObject:
    parts = read_form(content_type, body)
    fields: dict[str, Any] = {name: _text(part) for name, part in parts.items() if name != "file"}
    if "file" in parts:
        fields["file"] = ""
    form = check_fields(fields, UploadForm)
    lifetime_s = LIFETIME_S if form.expires_after_seconds is None else int(form.expires_after_seconds)
    if not LEAST_LIFETIME_S <= lifetime_s <= LIFETIME_S:
        raise invalid(f"A file stays from {LEAST_LIFETIME_S} to {LIFETIME_S} seconds.", "expires_after", "invalid_value")
    part = parts["file"]
    return _describe(files.store.create(owner, (part.filename or "file")[:MAX_NAME], part.data, lifetime_s))


def _text(part: FormPart) -> str:
    if len(part.data) > MAX_NAME:
        raise invalid("A field of the form is too long; only `file` may be large.", code="invalid_form")
    return part.data.decode(errors="replace")


def _describe(stored: StoredFile) -> FileObject:
    return FileObject(stored.id, stored.bytes, stored.created_at, stored.expires_at, stored.filename, stored.purpose)


# `/v1/batches`: many requests in one file, answered at low priority.


MAX_OPEN: Final = 20
"""Batches of one owner that have not ended."""
RETRY_S: Final = 60.0


@router.post("/v1/batches")
async def create_batch(request: Request) -> Response:
    """Checks the lines of a file, and starts to answer them."""
    state, files, owner = opened(request)
    batch = await state.off_the_loop(_create, files, owner, admission_of(request), await request.body())
    return json_response(describe_batch(batch))


@router.get("/v1/batches")
async def list_batches(request: Request) -> Response:
    """Lists the requester's batches, newest first."""
    _, files, owner = opened(request)
    shown, more = page(files.batches.of(owner), read_limit(request, 100), request.query_params.get("after"))
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    listed = [describe_batch(batch) for batch in shown]
    return json_response({"object": "list", "data": listed, "first_id": first, "last_id": last, "has_more": more})


@router.get("/v1/batches/{batch_id}")
async def retrieve_batch(request: Request, batch_id: str) -> Response:
    """Shows the status of a batch."""
    _, files, owner = opened(request)
    return json_response(describe_batch(files.batches.find(batch_id, owner)))


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Cancels a batch; finished answers are kept."""
    _, files, owner = opened(request)
    batch = files.batches.find(batch_id, owner)
    await files.runner.cancel(batch)
    return json_response(describe_batch(batch))


def _create(files: FileService, owner: Owner, admission: Admission, raw: bytes) -> Batch:
    body = parse_body(raw, BatchBody)
    stored = files.store.shelf.find(body.input_file_id, owner)
    if stored.purpose != "batch":
        raise invalid("The file holds answers of a batch; name one that was uploaded.", "input_file_id", "invalid_value")
    charge_kept(stored.bytes)
    lines, mistakes = read_lines(files.store.content(stored, owner), body.endpoint)
    if sum(batch.status not in ENDED for batch in files.batches.of(owner)) >= MAX_OPEN:
        raise RateLimitError(f"{MAX_OPEN} batches have not ended; wait until one has ended.", retry_after_s=RETRY_S)
    now = files.batches.now()
    batch = Batch(
        id=files.batches.new_id(),
        owner=owner.tag,
        created_at=now,
        expires_at=now + LIFETIME_S,
        completes_by=now + WINDOW_S,
        endpoint=body.endpoint,
        input_file_id=stored.id,
        key=None if admission.key is None else admission.key.hex(),
        output_id=files.store.shelf.new_id(),
        error_id=files.store.shelf.new_id(),
        status="failed" if mistakes else "in_progress",
        ended_at=now if mistakes else None,
        metadata=body.metadata,
        num_lines=0 if mistakes else len(lines),
        mistakes=mistakes,
    )
    files.batches.put(batch)
    if batch.status == "in_progress":
        files.runner.start_from_thread(batch)
    return batch
