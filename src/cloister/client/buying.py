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
from cloister.privacy.transparency.epoch import Epoch

WHO = "the issuer"
MOST_KEYS = 2
"""Of one issuer in an epoch: the one that signs, and for a day the one before it."""


def buy_tokens(epoch: Epoch, url: str, api_key: str, count: int = BATCH) -> Step[list[Token]]:
    """Fetches a batch from the issuer that the trust file names, under the key that the epoch file says signs.

    No other issuer is asked, whatever the epoch names: the gateway writes the epoch, and would learn API keys and addresses.
    And no other key is used: one that only some clients were given would mark their tokens.

    Args:
        url: of the issuer.

    Raises:
        NoTokensError: it gives none; the message says why.
    """
    if not url:
        raise NoTokensError("The trust file names no issuer to buy tokens of: write it with `cloister log trust --issuer URL`.")
    key = signing_key(epoch, url)
    reply: Reply = yield Ask(WHO, url.rstrip("/") + DIRECTORY_PATH)
    try:
        path, directory = decode_directory(reply.body)
    except MalformedTokenError:
        raise NoTokensError(f"The issuer at {url} shows no directory of keys ({reply.status}); check its address.") from None
    if key not in {shown.encoded_key for shown in directory}:
        raise NoTokensError(
            f"The issuer at {url} does not sign with the key that the epoch file names; wait for the next epoch."
        )
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


def signing_key(epoch: Epoch, url: str) -> bytes:
    """Returns the key under which everybody buys in this epoch: the issuer's newest that signed when it began.

    Raises:
        NoTokensError: the epoch does not name this issuer, or leaves open which of its keys signs.
    """
    keys = sorted((entry.not_before, entry.token_key) for entry in epoch.issuers if entry.url == url)
    if not keys:
        raise NoTokensError(f"The epoch does not name the issuer of the trust file, {url}; ask who runs the gateway why.")
    if len(keys) > MOST_KEYS or len({not_before for not_before, _ in keys}) != len(keys):
        raise NoTokensError(
            f"The epoch names {len(keys)} keys of the issuer at {url}: more than one that signs and one before it, or two of "
            "one age. They would mark tokens, so none is bought."
        )
    signing = [token_key for not_before, token_key in keys if not_before <= epoch.not_before]
    if not signing:
        raise NoTokensError(f"No key of the issuer at {url} signs yet in this epoch; wait for the next one.")
    return signing[-1]


def _within(url: str, path: str) -> str:
    """Returns the address of token requests; the API key goes to no other host than the one that the epoch names."""
    target = urljoin(url.rstrip("/") + "/", path)
    if urlsplit(target)[:2] != urlsplit(url)[:2]:
        raise NoTokensError(f"The directory of the issuer at {url} leads to another host; the API key is not sent there.")
    return target
