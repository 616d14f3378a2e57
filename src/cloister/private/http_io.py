"""HTTP input and output of the sealed programs: a body that streams in, a reply that streams out, a limit on each wait."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Coroutine
from email.utils import formatdate, parsedate_to_datetime
from typing import Any, Final

from starlette.types import Receive, Scope, Send

from cloister.private.problems import DATE_TYPE, ProblemError
from cloister.private.shaping import WRITE_TIMEOUT_S
from cloister.server.load_shedding import BodyBudget, BodyPace, ShedError, client_network, receive_piece
from cloister.trust.sealing import Fields, find_field

BODY_TIMEOUT_S: Final = 60.0
"""How long a whole request body may take to arrive."""
MAX_REQUEST_BYTES: Final = 17 * 2**20
"""The largest bucket, sealed twice, with its heads."""
TIDY_S: Final = 5.0
"""How long the work of a request may go on when all of its reply is sent."""
_LENGTH: Final = re.compile(r"[0-9]{1,18}")

_logger = logging.getLogger(__name__)


class GoneError(Exception):
    """Whoever sent the request has closed the connection."""


class Body:
    """The body of a request, read once, piece by piece.

    Args:
        budget: of the process, to which the body is charged until `close`; None has no ceiling beside `limit_bytes`.

    Attributes:
        is_read: set when all of it has been read, or never will be.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        limit_bytes: int,
        timeout_s: float = BODY_TIMEOUT_S,
        budget: BodyBudget | None = None,
    ) -> None:
        self._receive = receive
        self._charge = (budget or BodyBudget(limit_bytes)).open(client_network(scope))
        self._limit_bytes = limit_bytes
        self._timeout_s = timeout_s
        self._declared = find_header(scope, b"content-length")
        self.is_read = asyncio.Event()

    @property
    def declared_bytes(self) -> int | None:
        """The length that the head declares, if it does."""
        return int(self._declared) if self._declared is not None and _LENGTH.fullmatch(self._declared) else None

    def check_size(self) -> None:
        """Raises `ProblemError` 413 if the head already says that it is too long."""
        if (self.declared_bytes or 0) > self._limit_bytes:
            raise self._too_large()

    def close(self) -> None:
        """Gives the budget back what the body still holds of it."""
        self._charge.close()

    async def pieces(self, *, keeps: bool, first_bytes: int = 0) -> AsyncIterator[bytes]:
        """Yields what arrives.

        Args:
            first_bytes: the first piece has as many, or is the whole body.
            keeps: whether all of it stays in memory; otherwise a piece is handed on before the next one is asked for.

        Raises:
            ProblemError: it is too long (413), too slow (408), or gave way to others (503).
            GoneError: the connection was closed.
        """
        num_bytes, more, first = 0, True, bytearray()
        pace = BodyPace(asyncio.get_running_loop().time(), self._timeout_s)
        while more:
            try:
                message = await receive_piece(self._receive, self._charge, pace)
            except TimeoutError:
                title = f"The request came too slowly, or did not arrive within {self._timeout_s:g} s."
                raise ProblemError(408, title, in_clear=True) from None
            except ShedError:
                raise _no_room() from None
            if message["type"] == "http.disconnect":
                self.is_read.set()
                raise GoneError
            piece, more = message.get("body", b""), message.get("more_body", False)
            num_bytes += len(piece)
            if num_bytes > self._limit_bytes:
                raise self._too_large()
            self._charge.is_whole = not more  # before it is charged, so that its last piece does not make it give way
            self._charge.add(len(piece))
            if self._charge.is_shed:
                raise _no_room()
            if not more:
                self.is_read.set()
            if num_bytes < first_bytes and more:
                first += piece
                continue
            if first:
                piece, first = bytes(first) + piece, bytearray()
            if piece:
                yield piece
            if not keeps:
                self._charge.give_back(len(piece))

    def _too_large(self) -> ProblemError:
        title = f"The request is longer than the {self._limit_bytes:,} bytes that are taken here."
        return ProblemError(413, title, in_clear=True)


async def join_pieces(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yields a piece that was taken already, and those after it."""
    if first:
        yield first
    async for piece in rest:
        yield piece


def _no_room() -> ProblemError:
    fields = ((b"retry-after", b"2"),)
    return ProblemError(503, "There is no memory for the request now; try again in a moment.", fields=fields, in_clear=True)


class Outgoing:
    """The reply, in order: `begin`, any number of `write`, `finish`. One that is left unfinished closes the connection.

    Attributes:
        has_begun: whether the head is on its way, so that no other reply can take its place.
        is_finished: whether all of it is.
        num_bytes: of the body, so far.
    """

    def __init__(self, send: Send, write_timeout_s: float = WRITE_TIMEOUT_S) -> None:
        self._send = send
        self._write_timeout_s = write_timeout_s
        self.has_begun = False
        self.is_finished = False
        self.num_bytes = 0

    async def begin(self, status: int, fields: Fields) -> None:
        """Sends the head."""
        self.has_begun = True
        await self._pass({"type": "http.response.start", "status": status, "headers": list(fields)})

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Sends a piece of the body."""
        self.num_bytes += len(data)
        self.is_finished = last
        await self._pass({"type": "http.response.body", "body": data, "more_body": not last})

    async def refuse(self, problem: ProblemError) -> None:
        """Sends a whole refusal."""
        body = problem.body
        await self.begin(problem.status, (*problem.headers, (b"content-length", b"%d" % len(body))))
        await self.write(body, last=True)

    async def _pass(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self._send(message)
        except (TimeoutError, OSError):
            raise GoneError from None


async def run_while_there(work: Coroutine[Any, Any, None], body: Body, out: Outgoing, receive: Receive) -> None:
    """Runs the work of one request, and cancels it when the one who asked hangs up.

    Args:
        out: what the work answers with.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_wait_until_gone(body, out, receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in (gone, task):
            each.cancel()
        await asyncio.wait([gone, task])
        body.close()
    if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, GoneError):
        # by its kind alone: what an exception says may be content
        _logger.error("a request ended with a mistake of this program (%s)", type(error).__name__)


async def _wait_until_gone(body: Body, out: Outgoing, receive: Receive) -> None:
    await body.is_read.wait()
    while (await receive())["type"] != "http.disconnect":
        pass
    if out.is_finished:  # the server below says so after each reply; giving back a connection may take a moment still
        await asyncio.sleep(TIDY_S)


def find_header(scope: Scope, wanted: bytes) -> str | None:
    """Returns the value of a request's header; None if it has none, or more than one."""
    values = [value for name, value in scope["headers"] if name == wanted]
    return values[0].decode("latin-1").strip() if len(values) == 1 else None


def media_type(scope: Scope) -> str:
    """Returns the media type of the request without parameters, in lower case; empty if there is none."""
    return (find_header(scope, b"content-type") or "").partition(";")[0].strip().lower()


DATE_WINDOW_S: Final = 300.0
"""By how much a request's date may differ from the receiver's clock, either way."""
REPLAY_WINDOW_S: Final = 2 * DATE_WINDOW_S
"""How long a request can be accepted, hence is remembered: dated ahead by a window, sent again up to the other end."""


def check_date(fields: Fields, now_s: float, *, is_needed: bool) -> None:
    """Checks the date among a request's fields.

    Args:
        now_s: Unix seconds.
        is_needed: whether a request without a date is refused.

    Raises:
        ProblemError: it is outside of the window; the refusal carries the receiver's date, for one try with that.
        MessageError: there are several.
    """
    given = find_field(fields, b"date")
    if given is None and not is_needed:
        return
    date_s = _parse(given or "")
    if date_s is None or abs(now_s - date_s) > DATE_WINDOW_S:
        own = formatdate(now_s, usegmt=True).encode()
        raise ProblemError(400, "date field in request outside of acceptable range", kind=DATE_TYPE, fields=((b"date", own),))


def _parse(value: str) -> float | None:
    try:
        return parsedate_to_datetime(value).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
