"""The one challenge that issuer, gateway and client work out from the epoch file, each by itself. Pure."""

from __future__ import annotations

from urllib.parse import urlsplit

from cloister.privacy.tokens.challenge import TokenChallenge


def challenge_between(issuer_url: str, gateway_url: str) -> TokenChallenge:
    """Returns the challenge that tokens of an issuer answer at a gateway: both by host, in lower case, and port if it has one.

    A challenge that the gateway sent could be another one for each client, and mark its tokens; this one cannot.
    """
    return TokenChallenge(_host(issuer_url), (_host(gateway_url),))


def _host(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2].lower()
