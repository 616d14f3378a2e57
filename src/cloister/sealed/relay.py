"""The relay: knows who asks, and of what is asked only its length. Carries sealed requests to one gateway and answers back.

It keeps nothing, writes no line about a request, and passes on nothing that a client sends but the sealed bytes and their type.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from cloister.privacy.sealing import CHUNKED, FORMS, Fields
from cloister.sealed.exchange import BODY_TIMEOUT_S, MAX_REQUEST_BYTES, Body, Outgoing, join_pieces, media_type, run_while_there
from cloister.sealed.problems import ProblemError
from cloister.sealed.serving import Health, Lifespan, Post, handlers
from cloister.sealed.upstream import Answer, Upstream
from cloister.server.body_budget import BODY_CEILING_BYTES, BodyBudget

PASSED_FIELDS: Final = ("cache-control", "incremental", "retry-after")
"""Header fields of the gateway's answer that go on beside the content's type; they are the same for whoever asks."""
FIRST_BYTES: Final = 32 * 1024
"""A body takes a connection to the gateway when as much of it is there, or all: slow ones take none."""
_PUBLIC_PATH: Final = re.compile(r"/\.well-known/[A-Za-z0-9_-]+(?:/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")


@dataclass(frozen=True)
class RelayConfig:
    """What a relay is told.

    Attributes:
        gateway_url: where it carries everything, without a slash at the end.
        secret: shows the gateway that it is this relay.
        max_request_bytes: longest request.
        body_timeout_s: how long one may take to arrive.
        body_ceiling_bytes: of all requests at once, as far as they are in memory.
    """

    gateway_url: str
    secret: str
    max_request_bytes: int = MAX_REQUEST_BYTES
    body_timeout_s: float = BODY_TIMEOUT_S
    body_ceiling_bytes: int = BODY_CEILING_BYTES

    def __repr__(self) -> str:
        return f"RelayConfig({self.gateway_url!r})"


def relay_app(config: RelayConfig, upstream: Upstream) -> Starlette:
    """Returns the ASGI application of a relay: `POST /`, `GET /.well-known/...` and `GET /health`."""
    routes = [
        Route("/", Post(_Relay(config, upstream))),
        Route("/health", Health()),
        Route("/.well-known/{path:path}", _PublicFiles(config, upstream)),
    ]
    return Starlette(routes=routes, lifespan=Lifespan(upstream), exception_handlers=handlers())


class _Relay:
    def __init__(self, config: RelayConfig, upstream: Upstream) -> None:
        self._budget = BodyBudget(max(config.body_ceiling_bytes, config.max_request_bytes))
        self._config = config
        self._upstream = upstream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = Body(scope, receive, self._config.max_request_bytes, self._config.body_timeout_s, self._budget)
        out = Outgoing(send)
        await run_while_there(self._carry(scope, body, out), body, out, receive)

    async def _carry(self, scope: Scope, body: Body, out: Outgoing) -> None:
        try:
            body.check_size()
            kind = media_type(scope)
            if kind not in FORMS:
                raise ProblemError(415, f"Send a sealed request, as {' or '.join(FORMS)}.")
            headers = {"content-type": kind, "authorization": f"Bearer {self._config.secret}"}
            if kind == CHUNKED.request_type:
                headers["incremental"] = "?1"
            if body.declared_bytes is not None:
                headers["content-length"] = str(body.declared_bytes)
            pieces = body.pieces(keeps=False, first_bytes=FIRST_BYTES)
            first = await anext(pieces, b"")
            sealed = join_pieces(first, pieces)
            async with self._upstream.ask("POST", f"{self._config.gateway_url}/", headers, sealed) as answer:
                if answer.status == 401:  # a client shows its token to the gateway in the sealed part only
                    raise ProblemError(502, "The gateway does not know this relay; its operator has to give both one secret.")
                await _pass_on(answer, out)
        except ProblemError as problem:
            if not out.has_begun:
                await out.refuse(problem)
            # else: left unfinished, so that the client sees that the answer broke off


class _PublicFiles:
    """What is the same for every client comes through the relay too, so that none shows its address to the gateway."""

    def __init__(self, config: RelayConfig, upstream: Upstream) -> None:
        self._config = config
        self._upstream = upstream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = Body(scope, receive, 0)
        body.is_read.set()
        out = Outgoing(send)
        await run_while_there(self._carry(scope, out), body, out, receive)

    async def _carry(self, scope: Scope, out: Outgoing) -> None:
        try:
            if scope["method"] != "GET":
                raise ProblemError(405, "This path takes GET.", fields=((b"allow", b"GET"),))
            path = scope["path"]
            if not _PUBLIC_PATH.fullmatch(path):
                raise ProblemError(404, "There is no such file.")
            async with self._upstream.ask("GET", self._config.gateway_url + path, {}) as answer:
                await _pass_on(answer, out)
        except ProblemError as problem:
            if not out.has_begun:
                await out.refuse(problem)


async def _pass_on(answer: Answer, out: Outgoing) -> None:
    await out.begin(answer.status, _fields_of(answer))
    async for piece in answer.pieces:
        await out.write(piece)
    await out.write(b"", last=True)


def _fields_of(answer: Answer) -> Fields:
    names = [name for name in PASSED_FIELDS if name in answer.fields]
    kind = answer.fields.get("content-type")
    first = ((b"content-type", kind.encode("latin-1")),) if kind is not None else ()
    length = answer.fields.get("content-length")
    sized = ((b"content-length", length.encode("latin-1")),) if length is not None else ()
    return (*first, *sized, *((name.encode(), answer.fields[name].encode("latin-1")) for name in names))
