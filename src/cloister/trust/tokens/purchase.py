"""A token request and its response as sealed messages of constant length. No I/O, no clock.

Binary HTTP (RFC 9292) in oblivious HTTP (RFC 9458), sealed to a key that the issuer publishes, and padded with zeros to
`PURCHASE_BYTES`, so that the relay cannot distinguish a batch from a refusal, nor API keys of different lengths.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from cloister.trust.sealing import (
    WHOLE,
    HttpRequest,
    HttpResponse,
    KeyConfiguration,
    OhttpContext,
    RequestHead,
    ResponseHead,
    decode_response,
    encode_request,
    encode_response,
    find_field,
    open_response,
    seal_request,
    seal_response,
)
from cloister.trust.tokens.issuance import BATCH_REQUEST_TYPE

PURCHASE_BYTES: Final = 8192
"""Length of every request and reply before sealing; 28 tokens fit together with one of our API keys."""
PURCHASE_PATH: Final = "/ohttp"
"""The issuer's path for sealed requests; a relay uses another path."""
REQUEST_PATH: Final = "/token-request"
STATEMENT_PATH: Final = "/.well-known/cloister/issuer"
REQUEST_TYPE: Final = WHOLE.request_type
RESPONSE_TYPE: Final = WHOLE.response_type


def seal_purchase(
    keys: KeyConfiguration, issuer_url: str, api_key: str, batch: bytes, date: bytes
) -> tuple[bytes, OhttpContext]:
    """Seals a batch of token requests with the API key that pays for it.

    Args:
        batch: `Pending.encode()`.
        date: IMF-fixdate; the issuer compares it with its clock, so that old requests are not accepted again.

    Returns:
        The request for the relay, of constant length, and the exchange that opens the reply.

    Raises:
        ValueError: the batch does not fit.
        MessageError: the API key has characters that no header field may have.
        KeyConfigurationError: the key cannot be sealed to.
    """
    issuer = urlsplit(issuer_url)
    fields = (
        (b"authorization", b"Bearer " + api_key.encode()),
        (b"content-type", BATCH_REQUEST_TYPE.encode()),
        (b"date", date),
    )
    head = RequestHead("POST", issuer.scheme, issuer.netloc, issuer.path.rstrip("/") + REQUEST_PATH, fields)
    message = encode_request(HttpRequest(head, batch), padded_to=PURCHASE_BYTES)
    if len(message) > PURCHASE_BYTES:
        raise ValueError(f"API key and batch have more than the {PURCHASE_BYTES:,} bytes of a sealed purchase")
    return seal_request(keys, message)


def open_purchase_answer(exchange: OhttpContext, sealed: bytes) -> tuple[int, str, bytes]:
    """Returns status, media type and content of the issuer's answer.

    Raises:
        UnsealError: it is not the reply to this request, or it was changed.
        MessageError: it is not a response.
    """
    response = decode_response(open_response(exchange, sealed))
    return response.head.status, find_field(response.head.fields, b"content-type") or "", response.content


def seal_purchase_answer(exchange: OhttpContext, status: int, media_type: str, content: bytes) -> bytes:
    """Seals a reply, including refusals, to constant length."""
    head = ResponseHead(status, ((b"content-type", media_type.encode()),))
    return seal_response(exchange, encode_response(HttpResponse(head, content), padded_to=PURCHASE_BYTES))
