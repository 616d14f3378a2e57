"""Tokens for an API key: the issuer learns who asks for how many, and never sees them again. No I/O; time is an argument."""

from __future__ import annotations

from urllib.parse import urljoin, urlsplit

from cloister.client.answer import read_message
from cloister.client.asking import Ask, Reply, Step
from cloister.client.errors import NoTokensError
from cloister.client.wallet import BATCH
from cloister.privacy.tokens import BlindSignatureError, MalformedTokenError, Token, decode_directory, request_tokens
from cloister.privacy.tokens.issuance import BATCH_REQUEST_TYPE, DIRECTORY_PATH
from cloister.privacy.tokens.names import challenge_between
from cloister.privacy.transparency.epoch import Epoch, IssuerEntry

WHO = "the issuer"
MOST_KEYS = 2
"""Of one issuer in an epoch: the one that signs, and for a day the one before it. Of more, an issuer could show each client
another one, and know its tokens by that."""


def buy_tokens(epoch: Epoch, api_key: str, now: float, count: int = BATCH) -> Step[list[Token]]:
    """Fetches a batch from the first issuer of the epoch that gives one.

    A key that is not in the epoch is never used: one that this client alone was shown would mark its tokens.

    Raises:
        NoTokensError: none gives any; the message is the last one's.
    """
    refusal = NoTokensError("The epoch names no issuer.")
    for url in dict.fromkeys(issuer.url for issuer in epoch.issuers):
        try:
            return (yield from _buy(url, [i for i in epoch.issuers if i.url == url], epoch, api_key, now, count))
        except NoTokensError as error:
            refusal = error
    raise refusal


def _buy(url: str, keys: list[IssuerEntry], epoch: Epoch, api_key: str, now: float, count: int) -> Step[list[Token]]:
    listed = {issuer.token_key for issuer in keys}
    if len(listed) > MOST_KEYS:
        raise NoTokensError(
            f"The epoch names {len(listed)} keys of the issuer at {url}; with more than {MOST_KEYS} they mark tokens."
        )
    reply: Reply = yield Ask(WHO, url.rstrip("/") + DIRECTORY_PATH)
    try:
        path, directory = decode_directory(reply.body)
    except MalformedTokenError:
        raise NoTokensError(f"The issuer at {url} shows no directory of keys ({reply.status}); check its address.") from None
    key = next((key.encoded_key for key in directory if key.not_before <= now and key.encoded_key in listed), None)
    if key is None:
        raise NoTokensError(f"The issuer at {url} signs with no key that the epoch file names; wait for the next epoch.")
    pending = request_tokens(key, challenge_between(url, epoch.gateway.url), count)
    headers = {"authorization": f"Bearer {api_key}", "content-type": BATCH_REQUEST_TYPE}
    reply = yield Ask(WHO, _within(url, path), "POST", headers, pending.encode())
    if reply.status != 200:
        message = read_message(reply.body) or "it gave no reason"
        raise NoTokensError(f"There is no token left, and the issuer gave none ({reply.status}): {message}")
    try:
        return pending.finish(reply.body)
    except (MalformedTokenError, BlindSignatureError) as error:
        raise NoTokensError(f"The issuer's tokens are none: {error}; do not use this issuer.") from None


def _within(url: str, path: str) -> str:
    """Returns the address of token requests; the API key goes to no other host than the one that the epoch names."""
    target = urljoin(url.rstrip("/") + "/", path)
    if urlsplit(target)[:2] != urlsplit(url)[:2]:
        raise NoTokensError(f"The directory of the issuer at {url} leads to another host; the API key is not sent there.")
    return target
