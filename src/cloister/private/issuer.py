"""The issuer: serves its key directory, and issues tokens to holders of an API key (RFC 9578, sections 4 and 6).

Token requests arrive sealed through a relay (`POST /ohttp`) or directly from a client (`POST /token-request`). The issuer
learns an API key, a time and a number of tokens, but nothing about the tokens. It logs no request.
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
    """One issuer key.

    Attributes:
        url: URL of its issuer.
        token_key: SPKI, as in the epoch file.
        not_before, not_after: period in which it signs, Unix seconds.
        taken_until: when its tokens expire, Unix seconds.
        budget: number of output tokens that one blind token pays for.
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
    """Reads the file; one list may hold keys of several issuers.

    Raises:
        ConfigError: the file cannot be read, or has no key.
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
    """Returns the keys that a gateway at `gateway_url` accepts."""
    return tuple(
        AcceptedKey(key.token_key, challenge_between(key.url, gateway_url), key.taken_until, key.budget) for key in keys
    )


def list_issuers(keys: tuple[ShownKey, ...], now_s: float) -> tuple[IssuerEntry, ...]:
    """Returns the keys for the epoch file: those that sign, and those whose tokens are still accepted."""
    return tuple(
        IssuerEntry(key.url, key.token_key, key.not_before, key.not_after, key.signature, key.budget)
        for key in keys
        if key.not_before <= now_s < key.taken_until
    )


def check_signed(keys: tuple[ShownKey, ...], issuer: IssuerIdentity | None, now_s: float) -> None:
    """Checks that clients whose trust file names this issuer would buy tokens under these keys.

    Args:
        issuer: None skips the check.

    Raises:
        ConfigError: the issuer is not among them, or did not sign one of them.
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
    """Returns an issuer's keys, each signed with the identity key that clients know."""
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
"""Timeout for a request body."""
DIRECTORY_AGE_S: Final = 3600
"""Cache lifetime of a directory; far shorter than the day for which a new key is published before it signs."""
STATEMENT_LIFE_S: Final = int(GATEWAY_KEY_OVERLAP_S)
"""How long a client may use a key configuration; the key opens requests for as long."""
_MAX_BODY: Final = 8 + MAX_BATCH * REQUEST_BYTES

_logger = logging.getLogger(__name__)


class UnsupportedTypeError(InvalidRequestError):
    """The body's media type is not that of a token request."""

    code = "unsupported_media_type"
    status = 415


class UnprocessableError(InvalidRequestError):
    """The issuer cannot answer the body (RFC 9578, section 6.2)."""

    code = "unprocessable_token_request"
    status = 422


class IssuerFaultError(CloisterError):
    """The issuer cannot work: its keys cannot be read, or a signature failed verification and was withheld."""


def issuer_app(
    issuer: Issuer, url: str, identity: PrivateKey, now: Callable[[], float] = time.time, *, num_cpus: int = 1
) -> Starlette:
    """Returns the ASGI application of an issuer, which clients identify by `url` and the verifier key of `identity`.

    Args:
        num_cpus: number of requests that are signed concurrently.
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
        """Rotates keys on time without requests: a private key must not outlive its epoch while the issuer is idle."""
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
        with contextlib.suppress(CloisterError):  # the next request gets the error; the next rotation retries
            await asyncio.to_thread(issuer.current_keys)


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, CloisterError)
    if isinstance(error, ConfigError):  # the text names local files, for the operator only
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
