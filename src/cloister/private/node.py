"""A node: opens requests sealed to it, runs each on the server's application, and seals the response flush by flush. It never
learns the client's identity. A sealed node runs this in the short-lived worker process of one request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloister.private.gateway import NODE_PATH
from cloister.private.http_io import (
    BODY_TIMEOUT_S,
    MAX_REQUEST_BYTES,
    Body,
    GoneError,
    Outgoing,
    check_date,
    find_header,
    media_type,
    run_while_there,
)
from cloister.private.nodes import EVIDENCE_PATH, KEYS_PATH
from cloister.private.peers import check_gateway
from cloister.private.problems import ProblemError, problem_of
from cloister.private.sealed_reply import AnswerEnding, SealedReply
from cloister.private.serving import File, Lifespan, Post, handlers
from cloister.private.shaping import ReplyWriter, open_reply
from cloister.private.unsealing import Opened, Unsealer, open_request
from cloister.server.calls import OUTPUT_BUDGET
from cloister.server.images import SIZE_CLASS_HOLDS
from cloister.server.load_shedding import BODY_CEILING_BYTES, BodyBudget
from cloister.server.unread_replies import UNREAD_BYTES, UnreadReplies, attach_reply
from cloister.trust.receipts import ReceiptError
from cloister.trust.sealing import (
    FORMS,
    KEYS_MEDIA_TYPE,
    LARGEST_BUCKET_BYTES,
    Fields,
    HttpRequest,
    MessageError,
    OhttpContext,
    ResponseHead,
    UnsealError,
    decode_request,
    find_field,
)
from cloister.trust.shape import FRAMES, FRAMING_FIELD, FRAMINGS, TrafficShape, shape_for_request
from cloister.trust.tokens.redeem import BUDGET_FIELD, differs, parse_budget
from cloister.types.errors import CloisterError, PolicyError

OPEN_PATHS: Final = "/v1/"
"""Path prefixes available to sealed requests; metrics, the web page and health are not."""
_CONNECTION_FIELDS: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"content-length"}
)
"""Connection-specific fields, which binary HTTP forbids (RFC 9292, section 3.6), and the length, which is implied."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeConfig:
    """Settings of a node.

    Attributes:
        shape: traffic shape of its responses; None sends them unshaped.
        gateway_secret: secret that a gateway must present; None accepts any request that opens.
        evidence: returns the evidence document for the current key; None while there is none.
        profile: privacy profile of the node; receipts name it.
        body_ceiling_bytes: limit on the bytes of all concurrent requests, each counted from its first byte to the end of its
            response.
        unread_bytes: most bytes of outputs of the engine that wait for the clients of all responses; one may have all of them.
    """

    shape: TrafficShape | None = None
    gateway_secret: str | None = field(default=None, repr=False)
    evidence: Callable[[], bytes | None] = lambda: None
    profile: str = "private"
    max_request_bytes: int = MAX_REQUEST_BYTES
    body_timeout_s: float = BODY_TIMEOUT_S
    body_ceiling_bytes: int = BODY_CEILING_BYTES
    unread_bytes: int = UNREAD_BYTES


def node_app(
    inner: ASGIApp, config: NodeConfig, unsealer: Unsealer, lifespan: Lifespan, now: Callable[[], float] = time.time
) -> Starlette:
    """Returns the ASGI application of a node: `POST /ohttp`, its keys, its evidence, and the health of the server inside.

    Args:
        inner: the server's application; it receives only opened requests and health checks.
        now: returns Unix seconds.
    """

    async def read_evidence() -> bytes | None:
        return config.evidence()

    routes = [
        Route(NODE_PATH, Post(_Node(inner, config, unsealer, now))),
        Route(KEYS_PATH, File(unsealer.publish, KEYS_MEDIA_TYPE)),
        Route(EVIDENCE_PATH, File(read_evidence, "application/json")),
        Route("/health", inner, methods=["GET"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers())


class _Node:
    def __init__(self, inner: ASGIApp, config: NodeConfig, unsealer: Unsealer, now: Callable[[], float]) -> None:
        self._inner = inner
        self._config = config
        self._unsealer = unsealer
        self._now = now
        self._budget = BodyBudget(max(config.body_ceiling_bytes, config.max_request_bytes))
        self._unread = UnreadReplies(config.unread_bytes, config.unread_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = Body(scope, receive, self._config.max_request_bytes, self._config.body_timeout_s, self._budget)
        out = Outgoing(send)
        await run_while_there(self._answer(scope, body, out), body, out, receive)

    async def _answer(self, scope: Scope, body: Body, out: Outgoing) -> None:
        try:
            body.check_size()
            check_gateway(scope, self._config.gateway_secret)
            opened, message = await self._open(scope, body)
            shape = shape_for_request(self._config.profile, self._config.shape, len(message))
            request, budget = _read_request(message), _read_budget(scope)
            _check_budget(request, budget)
        except CloisterError as error:
            await out.refuse(problem_of(error))
            return
        reply = SealedReply(opened.exchange, out)
        try:
            SIZE_CLASS_HOLDS.set(shape is not None and shape.least_frames > 0)
            async with open_reply(shape, reply.emit, framing=_framing_of(request)) as shaped:
                await self._serve(request, budget, opened.exchange, reply, shaped)
        except (TimeoutError, GoneError):
            return
        except Exception as error:
            # The response ends without a final chunk. Log only the exception's type: its text may contain content.
            _logger.error("a sealed answer was broken off (%s)", type(error).__name__)

    async def _open(self, scope: Scope, body: Body) -> tuple[Opened, bytes]:
        """Opens the whole request before it is processed, so that every failure gets the same reply."""
        form = FORMS.get(media_type(scope))
        if form is None:
            raise ProblemError(415, f"Send a sealed request, as {' or '.join(FORMS)}.")
        opened = await open_request(self._unsealer, form, body.pieces(keeps=True))
        message = bytearray()
        async for plaintext in opened.plaintext:
            message += plaintext
            if len(message) > LARGEST_BUCKET_BYTES:
                raise UnsealError  # no client of the format sends one; the sealed length was checked before
        return opened, bytes(message)

    async def _serve(
        self,
        request: HttpRequest | MessageError,
        budget: int | None,
        exchange: OhttpContext,
        reply: SealedReply,
        shaped: ReplyWriter,
    ) -> None:
        try:
            if isinstance(request, MessageError):
                raise request
            ending = AnswerEnding(self._unsealer, exchange, request, self._config.profile)
        except (MessageError, ReceiptError, PolicyError) as error:
            await _refuse(problem_of(error), reply, shaped)
            return
        try:
            _check_framing(request)
            check_date(request.head.fields, self._now(), is_needed=False)
            if not request.head.path.startswith(OPEN_PATHS):
                raise ProblemError(404, f"Only paths that begin with {OPEN_PATHS} can be asked sealed.")
        except (ProblemError, MessageError) as error:
            await _refuse(problem_of(error), reply, shaped, ending)
            return
        inner_scope = _scope_of(request)
        inner_scope["state"][OUTPUT_BUDGET] = budget
        try:
            await self._run(inner_scope, _receive_from(request.content), _send_to(reply, shaped, ending))
        except Exception as error:
            if reply.writer.has_head:
                raise
            _logger.error("the server inside failed before it answered (%s)", type(error).__name__)
            mistake = ProblemError(500, "The server made a mistake; please try again.")
            await _refuse(mistake, reply, shaped, ending)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the server's application.

        Raises:
            TimeoutError: too many outputs of the engine wait because the client does not read.
        """
        async with asyncio.timeout(None) as running:
            unread = self._unread.open("", lambda: running.reschedule(asyncio.get_running_loop().time()))
            attach_reply(scope, unread)
            try:
                await self._inner(scope, receive, send)
            finally:
                self._unread.close(unread)


def _read_request(message: bytes) -> HttpRequest | MessageError:
    """Returns the request, or the error in it; the error is sent in the traffic shape of every response."""
    try:
        request = decode_request(message)
        find_field(request.head.fields, BUDGET_FIELD.encode())  # raises if the field occurs twice
        return request
    except MessageError as error:
        return error


def _framing_of(request: HttpRequest | MessageError) -> str:
    """Returns the framing that the client requested; the default framing if the requested one does not exist."""
    if isinstance(request, MessageError):
        return FRAMES
    asked = dict(request.head.fields).get(FRAMING_FIELD, b"").decode("latin-1")
    return asked if asked in FRAMINGS else FRAMES


def _check_framing(request: HttpRequest) -> None:
    asked = find_field(request.head.fields, FRAMING_FIELD)
    if asked is not None and asked not in FRAMINGS:
        raise ProblemError(400, f"{FRAMING_FIELD.decode()} is one of {', '.join(FRAMINGS)}.")


async def _refuse(problem: ProblemError, reply: SealedReply, shaped: ReplyWriter, ending: AnswerEnding | None = None) -> None:
    await shaped.head(reply.writer.head(ResponseHead(problem.status, problem.headers)))
    content = reply.writer.content(ending.add(problem.body) if ending else problem.body)
    end = await ending.end(reply.writer, problem.status) if ending else reply.writer.end()
    await shaped.write(content + end, last=True)


def _read_budget(scope: Scope) -> int | None:
    """Returns the token budget that the gateway states; None if it states none."""
    return parse_budget(find_header(scope, BUDGET_FIELD.encode()))


def _check_budget(request: HttpRequest | MessageError, budget: int | None) -> None:
    """Refuses a request whose budget from the gateway differs from the one that the client sealed.

    The refusal is sent in the clear: a sealed one counts as a response of the node, so a gateway could steer clients away
    from a node by naming wrong budgets, without a loss that an audit detects.
    """
    if isinstance(request, HttpRequest) and differs(request.head.fields, budget):
        raise ProblemError(
            409, "The gateway names another token budget than the sealed request; nothing was run.", in_clear=True
        )


def _scope_of(request: HttpRequest) -> Scope:
    """The request as passed to the server's application: HTTP/1.1, without a client address."""
    head = request.head
    path, _, query = head.path.partition("?")
    fields = tuple(line for line in head.fields if line[0] not in _CONNECTION_FIELDS)
    if all(name != b"host" for name, _ in fields):
        fields = ((b"host", head.authority.encode()), *fields)
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": head.method,
        "scheme": head.scheme,
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [*fields, (b"content-length", b"%d" % len(request.content))],
        "client": None,
        "server": None,
        "state": {},
    }


def _receive_from(content: bytes) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()  # a disconnect cancels this whole task
        raise AssertionError("an event that nobody sets was set")

    return receive


def _send_to(reply: SealedReply, shaped: ReplyWriter, ending: AnswerEnding) -> Send:
    status = 0

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            fields: Fields = tuple(
                (name.lower(), value) for name, value in message.get("headers", ()) if name.lower() not in _CONNECTION_FIELDS
            )
            await shaped.head(reply.writer.head(ResponseHead(status, fields)))
        elif message["type"] == "http.response.body":
            content = reply.writer.content(ending.add(message.get("body", b"")))
            if message.get("more_body", False):
                await shaped.write(content)
            else:
                await shaped.write(content + await ending.end(reply.writer, status), last=True)

    return send
