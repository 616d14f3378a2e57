"""The relay: learns the client's address and the request's length, but no content. It forwards sealed requests to one gateway
and one issuer, and returns their replies.

It stores nothing and logs no request. Of what a client sends it forwards only the sealed bytes and their media type.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from cloister.private.http_io import (
    BODY_TIMEOUT_S,
    MAX_REQUEST_BYTES,
    Body,
    Outgoing,
    join_pieces,
    media_type,
    run_while_there,
)
from cloister.private.problems import ProblemError
from cloister.private.serving import HealthEndpoint, Post, handlers
from cloister.private.upstream import Upstream, UpstreamResponse
from cloister.server.load_shedding import BODY_CEILING_BYTES, BodyBudget
from cloister.trust.sealing import CHUNKED, FORMS, Fields
from cloister.trust.tokens.purchase import PURCHASE_BYTES, PURCHASE_PATH, STATEMENT_PATH
from cloister.trust.tokens.purchase import REQUEST_TYPE as PURCHASE_TYPE

PASSED_FIELDS: Final = ("cache-control", "incremental", "retry-after")
"""Header fields of the gateway's reply that are forwarded with the content type; they are the same for every client."""
ISSUER_TIMEOUT_S: Final = 25.0
"""Read timeout for an issuer, which signs a batch in a fraction of a second; clients wait 30 s."""
FIRST_BYTES: Final = 32 * 1024
"""A connection to the gateway is opened once this much of a body, or all of it, has arrived: slow clients hold none."""
_PUBLIC_PATH: Final = re.compile(r"/\.well-known/[A-Za-z0-9_-]+(?:/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")


@dataclass(frozen=True)
class RelayConfig:
    """Settings of a relay.

    Attributes:
        gateway_url: where it forwards requests, without a trailing slash.
        secret: authenticates this relay to the gateway.
        max_request_bytes: maximum length of a request.
        body_timeout_s: timeout for receiving a request.
        issuer_url: where it forwards token purchases, without a trailing slash; empty to refuse them.
        body_ceiling_bytes: limit on the bytes of all concurrent requests that are held in memory.
    """

    gateway_url: str
    secret: str
    max_request_bytes: int = MAX_REQUEST_BYTES
    body_timeout_s: float = BODY_TIMEOUT_S
    issuer_url: str = ""
    body_ceiling_bytes: int = BODY_CEILING_BYTES

    def __repr__(self) -> str:
        return f"RelayConfig({self.gateway_url!r})"


def relay_app(config: RelayConfig, upstream: Upstream, issuer: Upstream | None = None) -> Starlette:
    """Returns the ASGI application of a relay: `POST /`, `GET /.well-known/...` and `GET /health`; and `POST /issuer`.

    Args:
        upstream: HTTP client for the gateway.
        issuer: HTTP client for the issuer; None refuses token purchases.
    """
    budget = BodyBudget(max(config.body_ceiling_bytes, config.max_request_bytes))
    routes = [
        Route("/", Post(_Carrier(config, upstream, _gateway_target(config), budget))),
        Route("/health", HealthEndpoint()),
        Route("/.well-known/{path:path}", _PublicFiles(config.gateway_url, upstream)),
    ]
    if issuer is not None:
        routes[:0] = [
            Route("/issuer", Post(_Carrier(config, issuer, _issuer_target(config), budget))),
            Route(STATEMENT_PATH, _PublicFiles(config.issuer_url, issuer)),
        ]
    return Starlette(routes=routes, lifespan=_closing(upstream, issuer), exception_handlers=handlers())


@dataclass(frozen=True)
class _Target:
    """The fixed target of sealed requests to one path.

    Attributes:
        headers: header fields that are sent in addition to content type and length.
        types: media types of the requests that are forwarded.
    """

    url: str
    headers: Mapping[str, str] = field(repr=False)
    types: Collection[str]
    max_request_bytes: int


def _gateway_target(config: RelayConfig) -> _Target:
    headers = {"authorization": f"Bearer {config.secret}"}
    return _Target(f"{config.gateway_url}/", headers, FORMS, config.max_request_bytes)


def _issuer_target(config: RelayConfig) -> _Target:
    return _Target(config.issuer_url + PURCHASE_PATH, {}, (PURCHASE_TYPE,), 2 * PURCHASE_BYTES)


def _closing(*upstreams: Upstream | None) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        for upstream in upstreams:
            if upstream is not None:
                await upstream.close()

    return lifespan


class _Carrier:
    def __init__(self, config: RelayConfig, upstream: Upstream, target: _Target, budget: BodyBudget) -> None:
        self._config = config
        self._upstream = upstream
        self._target = target
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = Body(scope, receive, self._target.max_request_bytes, self._config.body_timeout_s, self._budget)
        out = Outgoing(send)
        await run_while_there(self._carry(scope, body, out), body, out, receive)

    async def _carry(self, scope: Scope, body: Body, out: Outgoing) -> None:
        try:
            body.check_size()
            kind = media_type(scope)
            if kind not in self._target.types:
                raise ProblemError(415, f"Send a sealed request, as {' or '.join(self._target.types)}.")
            headers = {"content-type": kind, **self._target.headers}
            if kind == CHUNKED.request_type:
                headers["incremental"] = "?1"
            if body.declared_bytes is not None:
                headers["content-length"] = str(body.declared_bytes)
            pieces = body.pieces(keeps=False, first_bytes=FIRST_BYTES)
            first = await anext(pieces, b"")
            sealed = join_pieces(first, pieces)
            async with self._upstream.ask("POST", self._target.url, headers, sealed) as answer:
                if answer.status == 401:  # a client presents its token to the gateway only in the sealed part
                    raise ProblemError(502, "The gateway does not know this relay; its operator has to give both one secret.")
                await _pass_on(answer, out)
        except ProblemError as problem:
            if not out.has_begun:
                await out.refuse(problem)
            # else: leave the reply unfinished, so that the client detects that it was cut off


class _PublicFiles:
    """Forwards the public files too, so that no client reveals its address to the gateway."""

    def __init__(self, url: str, upstream: Upstream) -> None:
        self._url = url
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
            async with self._upstream.ask("GET", self._url + path, {}) as answer:
                await _pass_on(answer, out)
        except ProblemError as problem:
            if not out.has_begun:
                await out.refuse(problem)


async def _pass_on(answer: UpstreamResponse, out: Outgoing) -> None:
    await out.begin(answer.status, _fields_of(answer))
    async for piece in answer.pieces:
        await out.write(piece)
    await out.write(b"", last=True)


def _fields_of(answer: UpstreamResponse) -> Fields:
    names = [name for name in PASSED_FIELDS if name in answer.fields]
    kind = answer.fields.get("content-type")
    first = ((b"content-type", kind.encode("latin-1")),) if kind is not None else ()
    length = answer.fields.get("content-length")
    sized = ((b"content-length", length.encode("latin-1")),) if length is not None else ()
    return (*first, *sized, *((name.encode(), answer.fields[name].encode("latin-1")) for name in names))
