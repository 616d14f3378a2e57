"""HTTP input and output of the sealed programs: streamed bodies, streamed replies, a timeout on each wait."""

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
from cloister.server.connection import PIECE_BYTES
from cloister.server.load_shedding import BodyBudget, BodyPace, ShedError, client_network, receive_piece
from cloister.trust.sealing import Fields, find_field

BODY_TIMEOUT_S: Final = 60.0
"""Timeout for a whole request body."""
MAX_REQUEST_BYTES: Final = 17 * 2**20
"""The largest padding bucket, sealed twice, with headers."""
TIDY_S: Final = 5.0
"""How long a request's handler may run after its whole reply was sent."""
_LENGTH: Final = re.compile(r"[0-9]{1,18}")

_logger = logging.getLogger(__name__)


class GoneError(Exception):
    """The client has closed the connection."""


class Body:
    """The body of a request, read once, piece by piece.

    Args:
        budget: memory budget of the process, charged until `close`; None applies only `limit_bytes`.

    Attributes:
        is_read: set when the body was read completely, or reading has failed.
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
        """The declared content length; None if there is none."""
        return int(self._declared) if self._declared is not None and _LENGTH.fullmatch(self._declared) else None

    def check_size(self) -> None:
        """Raises `ProblemError` 413 if the declared length is too long."""
        if (self.declared_bytes or 0) > self._limit_bytes:
            raise self._too_large()

    def close(self) -> None:
        """Returns the body's remaining charge to the budget."""
        self._charge.close()

    async def pieces(self, *, keeps: bool, first_bytes: int = 0) -> AsyncIterator[bytes]:
        """Yields the body piece by piece.

        Args:
            first_bytes: minimum size of the first piece, unless the whole body is shorter.
            keeps: whether the caller keeps the whole body in memory; otherwise each piece is consumed before the next is read.

        Raises:
            ProblemError: the body is too long (413), too slow (408), or was evicted under memory pressure (503).
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
            self._charge.is_whole = not more  # set before the charge, so that the last piece cannot evict its own body
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
    """Yields a piece that was read already, then the rest."""
    if first:
        yield first
    async for piece in rest:
        yield piece


def _no_room() -> ProblemError:
    fields = ((b"retry-after", b"2"),)
    return ProblemError(503, "There is no memory for the request now; try again in a moment.", fields=fields, in_clear=True)


class Outgoing:
    """A reply: call `begin`, any number of `write`, then `finish`. An unfinished reply closes the connection.

    Attributes:
        has_begun: whether the head was sent, so that no other reply can replace it.
        is_finished: whether the whole reply was sent.
        num_bytes: bytes of the body sent so far.
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
        """Sends a piece of the body, in parts that each have the whole timeout to be read."""
        self.num_bytes += len(data)
        self.is_finished = last
        for start in range(0, len(data) - PIECE_BYTES, PIECE_BYTES):
            await self._pass({"type": "http.response.body", "body": data[start : start + PIECE_BYTES], "more_body": True})
        rest = data[(max(len(data), 1) - 1) // PIECE_BYTES * PIECE_BYTES :]
        await self._pass({"type": "http.response.body", "body": rest, "more_body": not last})

    async def refuse(self, problem: ProblemError) -> None:
        """Sends a complete refusal."""
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
    """Runs the handler of one request, and cancels it when the client disconnects.

    Args:
        out: the handler's reply.
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
        # log only the type: an exception's text may contain content
        _logger.error("a request ended with an internal error (%s)", type(error).__name__)


async def _wait_until_gone(body: Body, out: Outgoing, receive: Receive) -> None:
    await body.is_read.wait()
    while (await receive())["type"] != "http.disconnect":
        pass
    if out.is_finished:  # the ASGI server reports this after each reply too; releasing a connection may still take a moment
        await asyncio.sleep(TIDY_S)


def find_header(scope: Scope, wanted: bytes) -> str | None:
    """Returns the value of a request's header; None if it has none, or more than one."""
    values = [value for name, value in scope["headers"] if name == wanted]
    return values[0].decode("latin-1").strip() if len(values) == 1 else None


def media_type(scope: Scope) -> str:
    """Returns the media type of the request without parameters, in lower case; empty if there is none."""
    return (find_header(scope, b"content-type") or "").partition(";")[0].strip().lower()


DATE_WINDOW_S: Final = 300.0
"""Largest difference between a request's date and the receiver's clock, in either direction."""
REPLAY_WINDOW_S: Final = 2 * DATE_WINDOW_S
"""How long a request can be accepted and so must be remembered: one window ahead of its date to one window after."""


def check_date(fields: Fields, now_s: float, *, is_needed: bool) -> None:
    """Checks a request's date field.

    Args:
        now_s: Unix seconds.
        is_needed: whether to refuse a request without a date.

    Raises:
        ProblemError: the date is outside the window; the refusal carries the receiver's date for one retry.
        MessageError: there are several date fields.
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
