"""The issuer's program: its directory, and token requests for who has an API key (RFC 9578, sections 4 and 6).

They come sealed through a relay (`POST /ohttp`), or from a client that shows its address (`POST /token-request`). The issuer
sees an API key, a time and a number of tokens; of the tokens nothing. It writes no line about any request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from cloister.private.purchases import SealedPurchases
from cloister.server.errors import error_body, error_headers
from cloister.server.middleware.auth import read_bearer
from cloister.trust.sealing import GATEWAY_KEY_OVERLAP_S
from cloister.trust.tokens import AcceptedKey, BlindSignatureError, Issuer, IssuerKey, MalformedTokenError, TokenRequest
from cloister.trust.tokens.challenge import challenge_between
from cloister.trust.tokens.issuance import (
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
from cloister.trust.tokens.issuer import REFRESH_S
from cloister.trust.tokens.purchase import PURCHASE_PATH, REQUEST_PATH, STATEMENT_PATH
from cloister.trust.transparency.epoch import Budget, IssuerEntry
from cloister.trust.transparency.issuer_keys import IssuerIdentity, IssuerStatement, sign_entry, sign_statement
from cloister.trust.transparency.note import PrivateKey
from cloister.types.errors import CloisterError, ConfigError, DeadlineError, InvalidRequestError, RequestTooLargeError


class ShownKey(Struct, frozen=True):
    """One key.

    Attributes:
        url: of its issuer.
        token_key: SPKI, as in the epoch file.
        not_before, not_after: Unix seconds from which it signs, and at which it ends.
        taken_until: Unix seconds at which its tokens end.
        budget: output tokens that one of its tokens pays for.
        signature: the issuer's, as in the epoch file.
    """

    url: Annotated[str, Meta(pattern=r"^https?://[!-~]+\Z")]
    token_key: bytes
    not_before: int
    taken_until: int
    budget: Budget
    not_after: int = 0
    signature: bytes = b""


def read_issuer_keys(path: Path) -> tuple[ShownKey, ...]:
    """Reads the file; keys of several issuers may stand in one list.

    Raises:
        ConfigError: it cannot be read, or has no key.
    """
    try:
        keys = msgspec.json.decode(path.expanduser().read_bytes(), type=tuple[ShownKey, ...])
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; write it with: cloister issuer --show-keys") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not what cloister issuer --show-keys prints: {error}") from None
    if not keys:
        raise ConfigError(f"{path} has no key, so no token could be taken")
    return keys


def accept_keys(keys: tuple[ShownKey, ...], gateway_url: str) -> tuple[AcceptedKey, ...]:
    """Returns what a gateway at `gateway_url` takes."""
    return tuple(
        AcceptedKey(key.token_key, challenge_between(key.url, gateway_url), key.taken_until, key.budget) for key in keys
    )


def list_issuers(keys: tuple[ShownKey, ...], now_s: float) -> tuple[IssuerEntry, ...]:
    """Returns what stands in the epoch file: every key that signs, or signed and whose tokens are taken still."""
    return tuple(
        IssuerEntry(key.url, key.token_key, key.not_before, key.not_after, key.signature, key.budget)
        for key in keys
        if key.not_before <= now_s < key.taken_until
    )


def check_signed(keys: tuple[ShownKey, ...], issuer: IssuerIdentity | None, now_s: float) -> None:
    """Makes sure that clients with this issuer in their trust file would buy under the keys.

    Args:
        issuer: None checks nothing.

    Raises:
        ConfigError: it is not among them, or did not sign one.
    """
    if issuer is None:
        return
    entries = [entry for entry in list_issuers(keys, now_s) if entry.url == issuer.url]
    if not entries or not all(map(issuer.has_signed, entries)):
        raise ConfigError(
            f"clients would buy no token: the issuer of the trust file, {issuer.url}, did not sign the keys in the file of "
            "issuer keys; write it anew with: cloister issuer --url URL --key FILE --show-keys",
            param="issuer_keys",
        )


def sign_keys(keys: Iterable[IssuerKey], url: str, identity: PrivateKey) -> tuple[IssuerEntry, ...]:
    """Returns an issuer's keys as it states them, each signed with the key that clients know it by."""
    entries = (IssuerEntry(url, key.encoded, key.issues_from, key.issues_until, budget=key.budget) for key in keys)
    return tuple(sign_entry(entry, identity) for entry in entries)


def format_keys(keys: Iterable[IssuerKey], url: str, identity: PrivateKey) -> bytes:
    """Returns the file's content, JSON."""
    keys = tuple(keys)
    shown = [
        ShownKey(entry.url, entry.token_key, entry.not_before, key.taken_until, key.budget, entry.not_after, entry.signature)
        for key, entry in zip(keys, sign_keys(keys, url, identity), strict=True)
    ]
    return msgspec.json.format(msgspec.json.encode(shown)) + b"\n"


BODY_S: Final = 10.0
"""How long a request's body may take."""
DIRECTORY_AGE_S: Final = 3600
"""For how long a directory may be cached; far less than the day that the next key is shown before it signs."""
STATEMENT_LIFE_S: Final = int(GATEWAY_KEY_OVERLAP_S)
"""For how long a client may seal to a key that it was shown; that key opens as long."""
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


def issuer_app(
    issuer: Issuer, url: str, identity: PrivateKey, now: Callable[[], float] = time.time, *, num_cpus: int = 1
) -> Starlette:
    """Returns the ASGI application of an issuer that clients know by `url` and by the verifier key of `identity`.

    Args:
        num_cpus: how many requests are signed at once.
    """
    url = url.rstrip("/")
    slots = asyncio.Semaphore(num_cpus)

    async def issue(content_type: str, authorization: str, body: bytes) -> tuple[str, bytes]:
        media_type = content_type.split(";")[0].strip().lower()
        if media_type not in (REQUEST_TYPE, BATCH_REQUEST_TYPE):
            raise UnsupportedTypeError(f"send one token request as {REQUEST_TYPE}, several as {BATCH_REQUEST_TYPE}")
        is_batch = media_type == BATCH_REQUEST_TYPE
        try:
            requests = decode_batch(body) if is_batch else [TokenRequest.decode(body)]
        except MalformedTokenError as error:
            raise UnprocessableError(f"this is no token request: {error}") from None
        async with slots:
            try:
                signatures = await asyncio.to_thread(issuer.issue, read_bearer(authorization), requests)
            except BlindSignatureError as error:
                raise IssuerFaultError(str(error)) from None
            except InvalidRequestError as error:
                raise UnprocessableError(error.message) from None
        return (BATCH_RESPONSE_TYPE, encode_answers(signatures)) if is_batch else (RESPONSE_TYPE, signatures[0])

    purchases = SealedPurchases(issue, _read, now)

    async def directory(_: Request) -> Response:
        body = await asyncio.to_thread(issuer.directory, url + REQUEST_PATH)
        return Response(body, media_type=DIRECTORY_TYPE, headers={"cache-control": f"max-age={DIRECTORY_AGE_S}"})

    async def statement(_: Request) -> Response:
        keys, begin = await asyncio.to_thread(issuer.current_keys), int(now())
        stated = IssuerStatement(
            url, await purchases.unsealer.publish(), begin, begin + STATEMENT_LIFE_S, sign_keys(keys, url, identity)
        )
        return Response(sign_statement(stated, identity), media_type="application/json", headers={"cache-control": "no-store"})

    async def token_request(request: Request) -> Response:
        content_type, authorization = (request.headers.get(name, "") for name in ("content-type", "authorization"))
        media_type, answer = await issue(content_type, authorization, await _read(request, _MAX_BODY))
        return Response(answer, media_type=media_type, headers={"cache-control": "no-store"})

    @contextlib.asynccontextmanager
    async def turning(_: Starlette) -> AsyncIterator[None]:
        """Turns keys on time where nobody asks: a private key must not outlive its epoch in a quiet night."""
        await asyncio.to_thread(issuer.current_keys)
        tasks = [asyncio.create_task(_turn_forever(issuer)), asyncio.create_task(purchases.unsealer.turn_forever())]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    routes = [
        Route(DIRECTORY_PATH, directory, methods=["GET"]),
        Route(STATEMENT_PATH, statement, methods=["GET"]),
        Route(REQUEST_PATH, token_request, methods=["POST"]),
        Route(PURCHASE_PATH, purchases.answer, methods=["POST"]),
    ]
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


async def _read(request: Request, most_bytes: int) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                body += piece
                if len(body) > most_bytes:
                    raise RequestTooLargeError(f"a token request has {most_bytes:,} bytes here at most")
    except TimeoutError:
        raise DeadlineError(f"the request's body took longer than {BODY_S:.0f} s") from None
    except ClientDisconnect:
        raise UnprocessableError("the body ended early") from None
    return bytes(body)
