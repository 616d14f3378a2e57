"""The issuer's program: its directory, and `POST /token-request` for who has an API key (RFC 9578, sections 4 and 6).

It sees an API key, an address, a time and a number of tokens; of the tokens nothing. It writes no line about any request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from typing import Final

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from cloister.privacy.tokens import BlindSignatureError, Issuer, MalformedTokenError, TokenRequest
from cloister.privacy.tokens.issuance import (
    BATCH_REQUEST_TYPE,
    BATCH_RESPONSE_TYPE,
    DIRECTORY_PATH,
    DIRECTORY_TYPE,
    MAX_BATCH,
    REQUEST_BYTES,
    REQUEST_TYPE,
    RESPONSE_TYPE,
    decode_batch,
    encode_answers,
)
from cloister.privacy.tokens.issuer import REFRESH_S
from cloister.server.errors import error_body, error_headers
from cloister.types.errors import CloisterError, ConfigError, DeadlineError, InvalidRequestError, RequestTooLargeError

REQUEST_PATH: Final = "/token-request"
BODY_S: Final = 10.0
"""How long a request's body may take."""
DIRECTORY_AGE_S: Final = 3600
"""For how long a directory may be cached; far less than the day that the next key is shown before it signs."""
_MAX_BODY: Final = 8 + MAX_BATCH * REQUEST_BYTES

_logger = logging.getLogger(__name__)


class UnsupportedTypeError(InvalidRequestError):
    """The body is of a type that is no token request."""

    code = "unsupported_media_type"
    status = 415


class UnprocessableError(InvalidRequestError):
    """The body is no request that this issuer can answer (RFC 9578, section 6.2)."""

    code = "unprocessable_token_request"
    status = 422


class IssuerFaultError(CloisterError):
    """The issuer cannot work: its keys cannot be read, or a signature came out wrong and was kept back."""


def issuer_app(issuer: Issuer, url: str) -> Starlette:
    """Returns the ASGI application of an issuer that clients reach at `url`."""
    slots = asyncio.Semaphore(os.cpu_count() or 1)

    async def directory(_: Request) -> Response:
        body = await asyncio.to_thread(issuer.directory, url.rstrip("/") + REQUEST_PATH)
        return Response(body, media_type=DIRECTORY_TYPE, headers={"cache-control": f"max-age={DIRECTORY_AGE_S}"})

    async def token_request(request: Request) -> Response:
        content_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if content_type not in (REQUEST_TYPE, BATCH_REQUEST_TYPE):
            raise UnsupportedTypeError(f"send one token request as {REQUEST_TYPE}, several as {BATCH_REQUEST_TYPE}")
        is_batch = content_type == BATCH_REQUEST_TYPE
        body = await _read(request)
        try:
            requests = decode_batch(body) if is_batch else [TokenRequest.decode(body)]
        except MalformedTokenError as error:
            raise UnprocessableError(f"this is no token request: {error}") from None
        async with slots:
            try:
                signatures = await asyncio.to_thread(issuer.issue, _bearer(request), requests)
            except BlindSignatureError as error:
                raise IssuerFaultError(str(error)) from None
            except InvalidRequestError as error:
                raise UnprocessableError(error.message) from None
        answer = encode_answers(signatures) if is_batch else signatures[0]
        return Response(
            answer, media_type=BATCH_RESPONSE_TYPE if is_batch else RESPONSE_TYPE, headers={"cache-control": "no-store"}
        )

    @contextlib.asynccontextmanager
    async def turning(_: Starlette) -> AsyncIterator[None]:
        """Turns keys on time where nobody asks: a private key must not outlive its epoch in a quiet night."""
        await asyncio.to_thread(issuer.current_keys)
        task = asyncio.create_task(_turn_forever(issuer))
        yield
        task.cancel()
        await asyncio.wait([task])

    routes = [Route(DIRECTORY_PATH, directory, methods=["GET"]), Route(REQUEST_PATH, token_request, methods=["POST"])]
    return Starlette(routes=routes, lifespan=turning, exception_handlers={CloisterError: _refuse})


async def _turn_forever(issuer: Issuer) -> None:
    while True:
        await asyncio.sleep(REFRESH_S)
        with contextlib.suppress(CloisterError):  # said to whoever asks next; the next turn tries again
            await asyncio.to_thread(issuer.current_keys)


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, CloisterError)
    if isinstance(error, ConfigError):  # it names files of this machine, for its operator to read
        _logger.error("the issuer cannot work: %s", error.message)
        error = IssuerFaultError("the issuer cannot work; its operator finds the reason in the log")
    return Response(error_body(error), error.status, media_type="application/json", headers=error_headers(error))


async def _read(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                body += piece
                if len(body) > _MAX_BODY:
                    raise RequestTooLargeError(f"a batch has {MAX_BATCH} token requests at most")
    except TimeoutError:
        raise DeadlineError(f"the request's body took longer than {BODY_S:.0f} s") from None
    except ClientDisconnect:
        raise UnprocessableError("the body ended early") from None
    return bytes(body)


def _bearer(request: Request) -> str | None:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None
