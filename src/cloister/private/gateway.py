"""The gateway: learns the target node and that a request was paid for, but neither the client's identity nor any content.

Order of checks: size, relay, key, replay, HPKE, token, spending; then it forwards the body, sealed to a node, to that node.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import httpx
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import Receive, Scope, Send

from cloister.private.http_io import (
    BODY_TIMEOUT_S,
    MAX_REQUEST_BYTES,
    Body,
    GoneError,
    Outgoing,
    check_date,
    media_type,
    run_while_there,
)
from cloister.private.nodes import NodeBook
from cloister.private.peers import check_peer
from cloister.private.problems import ProblemError, problem_of
from cloister.private.sealed_reply import SealedReply
from cloister.private.serving import File, HealthEndpoint, Lifespan, LogFiles, Post, handlers
from cloister.private.unsealing import Opened, Unsealer, open_request, read_head, read_parts
from cloister.private.upstream import Upstream, UpstreamResponse
from cloister.server.load_shedding import BODY_CEILING_BYTES, BodyBudget
from cloister.trust.sealing import (
    FORMS,
    KEYS_MEDIA_TYPE,
    WHOLE,
    Content,
    Fields,
    Part,
    RequestHead,
    ResponseHead,
    find_field,
)
from cloister.trust.tokens import AcceptedKey
from cloister.trust.tokens.redeem import BUDGET_FIELD, Redeemer
from cloister.types.errors import CloisterError

NODE_PATH: Final = "/ohttp"
_TARGET: Final = re.compile(r"/nodes/([0-9a-f]{64})")


class Epochs(Protocol):
    """Source of the epoch file and the log.

    Attributes:
        log: directory of the log, whose files are public.
    """

    log: Path

    async def read(self) -> bytes | None:
        """Returns the epoch file; None while there is none."""


@dataclass(frozen=True)
class GatewayConfig:
    """Settings of a gateway.

    Attributes:
        url: its public URL without a trailing slash; a request for another host is refused.
        relay_secrets: secrets of the accepted relays, at least one.
        node_secret: authenticates this gateway to the nodes; None if they require no secret.
        body_ceiling_bytes: limit on the bytes of all concurrent requests that are held in memory.
    """

    url: str
    relay_secrets: tuple[str, ...] = field(repr=False)
    node_secret: str | None = field(default=None, repr=False)
    max_request_bytes: int = MAX_REQUEST_BYTES
    body_timeout_s: float = BODY_TIMEOUT_S
    body_ceiling_bytes: int = BODY_CEILING_BYTES


def gateway_app(
    config: GatewayConfig,
    unsealer: Unsealer,
    tokens: Redeemer,
    nodes: NodeBook,
    upstream: Upstream,
    lifespan: Lifespan,
    epochs: Epochs | None = None,
    now: Callable[[], float] = time.time,
) -> Starlette:
    """Returns the ASGI application of a gateway.

    Args:
        upstream: HTTP client for the nodes.
        epochs: None if another program serves epoch and log.
        now: returns Unix seconds, against which a request's date is checked.
    """
    routes: list[BaseRoute] = [
        Route("/", Post(_Gateway(config, unsealer, tokens, nodes, upstream, now))),
        Route("/health", HealthEndpoint()),
        Route("/.well-known/ohttp-gateway", File(unsealer.publish, KEYS_MEDIA_TYPE)),
        Route("/.well-known/cloister/evidence/{digest}", _Evidence(nodes)),
    ]
    if epochs is not None:
        routes += [
            Route("/.well-known/cloister/epoch", File(epochs.read, "application/json")),
            Mount("/.well-known/cloister/log", LogFiles(epochs.log)),
        ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers())


class _Gateway:
    def __init__(
        self,
        config: GatewayConfig,
        unsealer: Unsealer,
        tokens: Redeemer,
        nodes: NodeBook,
        upstream: Upstream,
        now: Callable[[], float],
    ) -> None:
        self._config = config
        self._unsealer = unsealer
        self._tokens = tokens
        self._nodes = nodes
        self._upstream = upstream
        self._now = now
        self._budget = BodyBudget(max(config.body_ceiling_bytes, config.max_request_bytes))
        self._authority = _plain_authority(config.url.partition("://")[2].partition("/")[0])
        self._prefix = httpx.URL(config.url).path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = Body(scope, receive, self._config.max_request_bytes, self._config.body_timeout_s, self._budget)
        out = Outgoing(send)
        await run_while_there(self._answer(scope, body, out), body, out, receive)

    async def _answer(self, scope: Scope, body: Body, out: Outgoing) -> None:
        """Replies in the clear until the request is opened, sealed afterwards."""
        reply: SealedReply | None = None
        try:
            body.check_size()
            check_peer(scope, self._config.relay_secrets, "This gateway takes requests of its relays only.")
            opened = await self._open(scope, body)
            parts = read_parts(opened.plaintext)
            head = await _first(parts, opened, out)
            reply = SealedReply(opened.exchange, out)
            await self._forward(head, _contents(parts, body), reply)
        except CloisterError as error:
            if out.has_begun:
                return  # leaves the reply unfinished: the client detects the missing final chunk
            await _refuse(problem_of(error), reply, out)

    async def _open(self, scope: Scope, body: Body) -> Opened:
        form = FORMS.get(media_type(scope))
        if form is None:
            raise ProblemError(415, f"Send a sealed request, as {' or '.join(FORMS)}.")
        return await open_request(self._unsealer, form, body.pieces(keeps=form is WHOLE))

    async def _forward(self, head: RequestHead, contents: AsyncIterator[bytes], reply: SealedReply) -> None:
        node_id = self._check_target(head)
        check_date(head.fields, self._now(), is_needed=True)
        kind = find_field(head.fields, b"content-type") or ""
        if kind not in FORMS:
            raise ProblemError(415, f"Seal the request to the node, as {' or '.join(FORMS)}.")
        url = await self._nodes.find(node_id)
        if url is None:
            raise ProblemError(404, "No node of that name is here; take the current epoch file and draw again.")
        paid = await self._spend(find_field(head.fields, b"authorization"))
        headers = {"content-type": kind, BUDGET_FIELD: str(paid.budget)}
        if self._config.node_secret is not None:
            headers["authorization"] = f"Bearer {self._config.node_secret}"
        async with self._upstream.ask("POST", url + NODE_PATH, headers, contents) as answer:
            await _pass_on(answer, FORMS[kind].response_type, reply)

    def _check_target(self, head: RequestHead) -> str:
        if _plain_authority(head.authority) != self._authority:
            raise ProblemError(421, "The request is for another gateway; take this one's name from the epoch file.")
        target = _TARGET.fullmatch(head.path.removeprefix(self._prefix))
        if target is None or head.method != "POST":
            raise ProblemError(404, "Requests are POST to /nodes/ and the name of a node.")
        if find_field(head.fields, b"expect") is not None:  # RFC 9458, section 5.1
            raise ProblemError(417, "A sealed request cannot wait for 100 (Continue).")
        return target[1]

    async def _spend(self, authorization: str | None) -> AcceptedKey:
        try:
            return await asyncio.to_thread(self._tokens.redeem, authorization)  # it may wait for a store
        except CloisterError as error:
            fields: Fields = ((b"www-authenticate", self._tokens.ask().encode()),) if error.status == 401 else ()
            raise ProblemError(error.status, error.message, fields=fields) from None


class _Evidence:
    def __init__(self, nodes: NodeBook) -> None:
        self._nodes = nodes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def find() -> bytes | None:
            return self._nodes.find_evidence(scope["path_params"]["digest"])

        await File(find, "application/json")(scope, receive, send)


def _plain_authority(authority: str) -> str:
    """Returns host and port in one form for comparison: some clients omit the default port."""
    return authority.lower().removesuffix(":443").removesuffix(":80")


async def _first(parts: AsyncIterator[Part], opened: Opened, out: Outgoing) -> RequestHead:
    """Returns the head. The request opened, so the client gets an error in the head as a sealed reply."""
    try:
        head = await read_head(parts)
        if head is not None:
            return head
        problem = ProblemError(400, "The sealed message is a response; send a request.")
    except CloisterError as error:
        if error.code != "invalid_binary_http":
            raise
        problem = problem_of(error)
    await SealedReply(opened.exchange, out).refuse(problem)
    raise GoneError


async def _refuse(problem: ProblemError, reply: SealedReply | None, out: Outgoing) -> None:
    # A later chunk that does not open gets the same reply as a first one: in the clear, with the same bytes.
    if reply is None or problem.in_clear:
        await out.refuse(problem)
    else:
        await reply.refuse(problem)


async def _contents(parts: AsyncIterator[Part], body: Body) -> AsyncIterator[bytes]:
    async for part in parts:
        if isinstance(part, Content):
            yield part.data
    body.close()  # it was forwarded to the node; keep no copy


async def _pass_on(answer: UpstreamResponse, expected: str, reply: SealedReply) -> None:
    if answer.status != 200 or answer.media_type != expected:
        # 503 may be temporary; every other status becomes a node failure, which another draw may avoid
        status = 503 if answer.status == 503 else 502
        raise ProblemError(status, f"The node refused the request ({answer.status}); draw again.")
    fields: Fields = ((b"content-type", expected.encode()),)
    await reply.emit(reply.writer.head(ResponseHead(200, fields)), False)
    async for piece in answer.pieces:
        await reply.emit(reply.writer.content(piece), False)
    await reply.emit(reply.writer.end(), True)
