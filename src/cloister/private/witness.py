"""The ASGI app of a witness: one route, `POST /add-checkpoint` (C2SP tlog-witness)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from cloister.trust.transparency.witness import MAX_REQUEST_BYTES, Witness
from cloister.types.errors import CloisterError

BODY_DEADLINE_S = 10.0


def witness_app(witness: Witness, now: Callable[[], float] = time.time) -> Starlette:
    """Serves a witness.

    Args:
        witness: decides whether to cosign.
        now: returns Unix seconds.
    """

    async def add_checkpoint(request: Request) -> Response:
        try:
            async with asyncio.timeout(BODY_DEADLINE_S):
                body = await _read(request)
        except (TimeoutError, ClientDisconnect):
            return PlainTextResponse("the body did not come in time\n", 408)
        if body is None:
            return PlainTextResponse(f"the body has {MAX_REQUEST_BYTES:,} bytes at most\n", 413)
        try:
            answer = await asyncio.to_thread(witness.add_checkpoint, body, now())
        except CloisterError:
            return PlainTextResponse("the witness cannot keep its state, so it does not cosign\n", 503)
        return Response(answer.body, answer.status, media_type=answer.media_type)

    return Starlette(routes=[Route("/add-checkpoint", add_checkpoint, methods=["POST"])])


async def _read(request: Request) -> bytes | None:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_REQUEST_BYTES:
            return None
    return bytes(body)
