"""Requests that the server sends to itself, with the same routes, limits and counts as external ones."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, NoReturn

from starlette.types import ASGIApp, Message

from cloister.policy.gate import Admission
from cloister.server.errors import OverloadedError
from cloister.server.load_shedding import BODY_CHARGE, BodyBudget, BodyCharge, client_network, find_owner
from cloister.server.reading_queue import NUM_BODY_BYTES


@dataclass(frozen=True, slots=True)
class RouteReply:
    """A route's reply. Its repr omits content."""

    status: int
    headers: dict[str, str]
    body: bytes

    def __repr__(self) -> str:
        return f"RouteReply(status={self.status})"


async def post(app: ASGIApp, path: str, body: bytes, admission: Admission, budget: BodyBudget) -> RouteReply:
    """Posts JSON to a route of this server on behalf of a user. Cancelling it cancels the request.

    Args:
        budget: memory that the body is charged to, and what the server keeps and it names (`kept_content`). Without memory for
            it the reply has status 503.
    """
    charge = budget.open(client_network({"client": None}), find_owner(admission))
    try:
        charge.add(len(body))
        if charge.is_shed:
            return RouteReply(OverloadedError.status, {}, b"")
        charge.is_whole = True
        return await _post(app, path, body, admission, charge)
    finally:
        charge.close()


async def _post(app: ASGIApp, path: str, body: bytes, admission: Admission, charge: BodyCharge) -> RouteReply:
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
        "state": {"admission": admission, NUM_BODY_BYTES: len(body), BODY_CHARGE: charge},
    }
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        return messages.pop() if messages else await _never()

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    start, *rest = sent
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in start.get("headers", ())}
    return RouteReply(start["status"], headers, b"".join(message.get("body", b"") for message in rest))


async def _never() -> NoReturn:
    """Waits until cancelled: the requester never disconnects while the server runs."""
    await asyncio.Event().wait()
    raise AssertionError
