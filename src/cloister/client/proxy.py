"""A local proxy for programs that cannot seal: accepts HTTP on loopback, and sends sealed requests. It logs no request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator

import anyio
import httpx
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cloister.client.attempts import ANSWER_DEADLINE_S, SHOULD_RETRY
from cloister.client.session import Session
from cloister.client.transport import AsyncSealedTransport
from cloister.server.errors import OriginError, error_body, error_headers
from cloister.server.middleware.auth import LocalHostMiddleware
from cloister.trust.attestation import Findings, Outcome
from cloister.trust.sealing import LARGEST_BUCKET_BYTES
from cloister.types.errors import CloisterError, DeadlineError, RequestTooLargeError

BODY_S = 60.0
"""Timeout for receiving a request's body."""

Tell = Callable[[str], None]
_MARKS = {Outcome.PROVED: "proved", Outcome.NOT_PROVED: "NOT PROVED", Outcome.FAILED: "REFUSED"}


class BrokenOffError(CloisterError):
    """The connection closed before an answer began."""

    code = "answer_broke_off"
    status = 502


class Proxy:
    """The ASGI application.

    Requests from web pages are refused, whatever their origin: any page could spend tokens, and identify its visitors by
    timing.

    Args:
        tell: called with lines about what was verified, at every new epoch.
    """

    def __init__(self, session: Session, transport: AsyncSealedTransport, tell: Tell) -> None:
        self._session = session
        self._transport = transport
        self._tell = tell
        self._told = session.believed.epoch.epoch if session.believed else None

    async def verify(self) -> None:
        """Fetches and verifies everything that a request needs, and reports it.

        Raises:
            SealedError: something is refused or cannot be reached.
        """
        try:
            ready = await self._transport.prepare()
            self._session.give_back(ready)
        finally:
            self._tell_epoch()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            response = await self._answer(Request(scope, receive))
        except ClientDisconnect:
            return
        except CloisterError as error:
            response = _refuse(error)
        except httpx.TimeoutException:
            response = _refuse(DeadlineError("The answer did not come in time."))
        except httpx.TransportError:
            response = _refuse(BrokenOffError("The answer broke off before it began; ask again."))
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        if _is_of_page(request.headers):
            raise OriginError
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        asked = httpx.Request(
            request.method,
            f"http://cloister{target}",
            headers=_end_to_end(request.headers.raw),
            content=await _read(request),
            extensions={"timeout": {"read": ANSWER_DEADLINE_S}},
        )
        try:
            answer = await self._ask(asked, request.receive)
        finally:
            self._tell_once()
        response = StreamingResponse(_stream(answer), answer.status_code)
        response.raw_headers = [(name, value) for name, value in answer.headers.raw if name.lower() != b"content-length"]
        return response

    async def _ask(self, asked: httpx.Request, receive: Receive) -> httpx.Response:
        """Returns an answer as soon as it begins; if the client leaves before, nothing is computed for it any more.

        Raises:
            ClientDisconnect: it has left.
            CloisterError, httpx.TransportError: as the transport.
        """
        answer: httpx.Response | None = None
        failure: Exception | None = None
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                group.cancel_scope.cancel()

            group.start_soon(watch)
            try:
                answer = await self._transport.handle_async_request(asked)
            except Exception as error:  # the group would wrap it
                failure = error
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if answer is None:
            raise ClientDisconnect
        return answer

    def _tell_once(self) -> None:
        if self._tell_epoch() and (refusal := describe_refusal(self._session)):
            self._tell(refusal)

    def _tell_epoch(self) -> bool:
        """Tells of an epoch that is new. Returns whether it is."""
        believed = self._session.believed
        if believed is None or believed.epoch.epoch == self._told:
            return False
        self._told = believed.epoch.epoch
        for line in tell_epoch(self._session):
            self._tell(line)
        return True


def proxy_app(proxy: Proxy) -> ASGIApp:
    """Returns the application with protection against DNS rebinding."""
    return LocalHostMiddleware(proxy)


async def _stream(answer: httpx.Response) -> AsyncIterator[bytes]:
    assert isinstance(answer.stream, httpx.AsyncByteStream)
    try:
        async for data in answer.stream:
            yield data
    finally:
        with anyio.CancelScope(shield=True):
            await answer.stream.aclose()


async def _read(request: Request) -> bytes:
    body = bytearray()
    try:
        with anyio.fail_after(BODY_S):
            async for piece in request.stream():
                body += piece
                if len(body) > LARGEST_BUCKET_BYTES:
                    raise RequestTooLargeError(f"a sealed request holds {LARGEST_BUCKET_BYTES // 2**20} MiB; make it shorter")
    except TimeoutError:
        raise DeadlineError(f"the request's body took longer than {BODY_S:.0f} s") from None
    return bytes(body)


def _is_of_page(headers: Headers) -> bool:
    """Whether a web page caused the request. Requests for images, scripts and links have no `Origin`, but Fetch Metadata or, in
    older browsers, `Referer`.
    """
    return "origin" in headers or "referer" in headers or headers.get("sec-fetch-site", "none") != "none"


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name not in (b"host", b"content-length", b"transfer-encoding")]


def _refuse(error: CloisterError) -> Response:
    headers = {**error_headers(error), SHOULD_RETRY.decode(): "false"}
    return Response(error_body(error), error.status, headers, "application/json")


# Formats what was verified for users: one line for the epoch, and the steps of each node. Pure.
def tell_epoch(session: Session) -> Iterator[str]:
    """Yields lines about the session's verified epoch, and about each of its nodes."""
    believed = session.believed
    if believed is None:
        return
    epoch = believed.epoch
    yield (
        f"Epoch {epoch.epoch}: {len(epoch.nodes)} nodes, release {believed.release.version} ({epoch.release[:16]}), "
        f"profile {epoch.profile}; in the log at size {believed.checkpoint.size}, cosigned by enough witnesses."
    )
    membership = believed.membership
    capacity = membership.capacity
    yield f"Membership {membership.number}, signed by a release key: {len(membership.members)} nodes, capacity {capacity}."
    present = {node.member for node in epoch.nodes}
    for member in membership.members:
        if member.name not in present:
            yield f"No node of {member.name}, drawn with chance {member.capacity}/{capacity}: such a draw fails"
    for node in epoch.nodes:
        findings = session.findings[node.node_id]
        yield f"Node {node.node_id[:16]} ({node.member}), drawn with chance {node.capacity}/{capacity}: {_sum_up(findings)}"
        for step in findings:
            yield f"  {_MARKS[step.outcome]}: {step.text.removeprefix('NOT PROVED: ')}"


def describe_refusal(session: Session) -> str | None:
    """Returns that no request can be sent, and what to do; None if a node is accepted."""
    if session.believed is None or any(findings.accepted for findings in session.findings.values()):
        return None
    return (
        "No node is acceptable: every request will be refused, and nothing is sent. The lines with REFUSED say why, and which "
        "option, if any, accepts it; then start this again."
    )


def _sum_up(findings: Findings) -> str:
    if not findings.accepted:
        return "REFUSED; nothing is sent to it"
    if not findings.proved:
        return f"accepted; NOT PROVED: {len(findings.of(Outcome.NOT_PROVED))} of {len(findings)} steps"
    return "accepted; every requirement is proved"
