"""`/v1/batches`: many requests in one file, answered when there is time."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cloister.privacy.gate import Admission
from cloister.server.files.batches import ENDED, WINDOW_S, Batch, BatchBody, describe_batch, read_lines
from cloister.server.files.service import FileService
from cloister.server.files.shelf import Owner, page
from cloister.server.files.store import LIFETIME_S
from cloister.server.parse import parse_body
from cloister.server.routes.files import opened, read_limit
from cloister.server.state import admission_of, json_response
from cloister.types.errors import RateLimitError

router = APIRouter()

MAX_OPEN: Final = 20
"""Batches of one owner that have not ended."""
RETRY_S: Final = 60.0


@router.post("/v1/batches")
async def create_batch(request: Request) -> Response:
    """Checks the lines of a file, and begins to answer them."""
    state, files, owner = opened(request)
    batch = await state.off_the_loop(_create, files, owner, admission_of(request), await request.body())
    return json_response(describe_batch(batch))


@router.get("/v1/batches")
async def list_batches(request: Request) -> Response:
    """Lists the batches of whoever asks, the newest first."""
    _, files, owner = opened(request)
    shown, more = page(files.batches.of(owner), read_limit(request, 100), request.query_params.get("after"))
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    listed = [describe_batch(batch) for batch in shown]
    return json_response({"object": "list", "data": listed, "first_id": first, "last_id": last, "has_more": more})


@router.get("/v1/batches/{batch_id}")
async def retrieve_batch(request: Request, batch_id: str) -> Response:
    """Says how far a batch is."""
    _, files, owner = opened(request)
    return json_response(describe_batch(files.batches.find(batch_id, owner)))


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Ends a batch; what was answered stays."""
    _, files, owner = opened(request)
    batch = files.batches.find(batch_id, owner)
    await files.runner.cancel(batch)
    return json_response(describe_batch(batch))


def _create(files: FileService, owner: Owner, admission: Admission, raw: bytes) -> Batch:
    body = parse_body(raw, BatchBody)
    stored = files.store.shelf.find(body.input_file_id, owner)
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
