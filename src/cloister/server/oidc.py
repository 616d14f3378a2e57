"""Verifies access tokens of an OpenID issuer: keys by discovery, signatures (RFC 7515, 7517, 7519, 9068).

Nothing of a token is kept, logged or included in errors.
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cloister.policy.oidc import AccessTokenError, People, Person, may_be_fetched
from cloister.types.errors import ConfigError, EngineError
from cloister.types.extras import install_command

if TYPE_CHECKING:
    import httpx
    from joserfc.jwk import KeySet
    from joserfc.jws import JWSRegistry

ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519")
"""Signatures with a public key: neither `none` nor a secret that both sides have (RFC 8725, 3.1)."""
FETCH_TIMEOUT_S: Final = 5.0
MAX_FETCH_BYTES: Final = 256 * 1024
MAX_TOKEN_CHARS: Final = 16 * 1024
REFRESH_S: Final = 900.0
"""Refresh interval of keys: a revoked key is refused after this time."""
KEEP_S: Final = 6 * 3600.0
"""How long keys stay valid if the issuer does not answer."""
RETRY_S: Final = 10.0
"""Minimum interval between requests to the issuer, whatever keys tokens name: unauthenticated clients must not make this server
flood it."""
STALE_RETRY_S: Final = 60.0
"""The same while the current keys are old, but still usable."""
MAX_HEADER_BYTES: Final = 4096
MIN_RSA_CHARS: Final = 342
"""Length of a 2048-bit modulus in base64url without padding (RFC 7518, 6.3.1.1)."""
_PUBLIC: Final = frozenset({"RSA", "EC", "OKP"})

_logger = logging.getLogger(__name__)


class IssuerError(EngineError):
    """The issuer's keys cannot be fetched; users cannot be authenticated until it answers."""

    code = "issuer_unavailable"


@dataclass(frozen=True, slots=True)
class _Keys:
    keys: KeySet
    ids: frozenset[str]
    fetched_s: float


class TokenVerifier:
    """Verifies access tokens of one issuer.

    Args:
        people: returns the rights of a verified token's holder.
        monotonic: seconds of a clock that is never set back.

    Raises:
        ConfigError: the extra `oidc` is not installed, or the file of certificates cannot be used.
    """

    def __init__(self, people: People, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        check_extra()
        self._registry = _registry()
        self._people = people
        self._issuer = people.config.issuer
        self._monotonic = monotonic
        self._tls = _trust(people.config.ca_file)
        self._keys: _Keys | None = None
        self._tried_s = -math.inf
        self._fetching = asyncio.Lock()

    async def admit(self, token: str) -> Person:
        """Returns the holder of a token.

        Raises:
            TokenError: it is not a valid token of the issuer for this server.
            PolicyError: its holder may not use this server.
            IssuerError: the issuer's keys cannot be read.
        """
        from joserfc import jws, jwt
        from joserfc.errors import JoseError

        broken = AccessTokenError("the issuer did not sign this token; sign in again")
        if len(token) > MAX_TOKEN_CHARS or not token.isascii():
            raise broken
        try:
            header = jws.extract_compact(token.encode(), registry=self._registry).headers()
        except (JoseError, ValueError, TypeError, RecursionError):
            raise broken from None
        key_id = header.get("kid")
        keys = await self._current(key_id if isinstance(key_id, str) else None)
        try:
            read = jwt.decode(token, keys.keys, registry=self._registry)
        except (JoseError, ValueError, TypeError, RecursionError):  # its text may contain parts of the token
            raise broken from None
        return self._people.admit(read.header, read.claims, time.time())

    async def _current(self, key_id: str | None) -> _Keys:
        """Returns the issuer's keys: fetched again if they are old, or if a token names an unknown one."""
        if self._lacks(key_id):  # concurrent callers wait for keys that are being fetched
            async with self._fetching:
                if self._lacks(key_id) and self._since(self._tried_s) >= RETRY_S:
                    await self._refresh()
        elif self._is_stale() and not self._fetching.locked():
            async with self._fetching:
                await self._refresh()
        if self._keys is None or self._since(self._keys.fetched_s) > KEEP_S:
            raise IssuerError("the issuer of tokens cannot be reached; try again in a moment")
        return self._keys

    def _lacks(self, key_id: str | None) -> bool:
        keys = self._keys
        return keys is None or self._since(keys.fetched_s) > KEEP_S or (key_id is not None and key_id not in keys.ids)

    def _is_stale(self) -> bool:
        old = self._keys is not None and self._since(self._keys.fetched_s) >= REFRESH_S
        return old and self._since(self._tried_s) >= STALE_RETRY_S

    def _since(self, time_s: float) -> float:
        return self._monotonic() - time_s

    async def _refresh(self) -> None:
        import httpx  # servers without an issuer start without it

        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S), self._client() as client:
                described = await _fetch(client, self._issuer.rstrip("/") + "/.well-known/openid-configuration")
                if described.get("issuer") != self._issuer:  # OpenID Connect Discovery 1.0, 4.3
                    raise ValueError("its description is another issuer's")
                address = described.get("jwks_uri")
                if not isinstance(address, str) or not may_be_fetched(address):
                    raise ValueError("its description has no https address of keys")
                keys = _import_keys(await _fetch(client, address))
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            reason = str(error) if type(error) is ValueError else type(error).__name__
            _logger.warning("the keys of the OpenID issuer cannot be read: %s", reason)
        else:
            self._keys = _Keys(keys, frozenset(key.kid for key in keys if key.kid), self._monotonic())
        finally:
            self._tried_s = self._monotonic()

    def _client(self) -> httpx.AsyncClient:
        import httpx

        # No proxy or netrc from the environment: only the settings define the source of keys.
        return httpx.AsyncClient(timeout=FETCH_TIMEOUT_S, trust_env=False, verify=self._tls)


def check_extra() -> None:
    """Raises ConfigError if the token verification extra is not installed."""
    try:
        import joserfc  # noqa: F401
    except ImportError:
        raise ConfigError(f"tokens of an issuer need an extra: {install_command('oidc')}", param="oidc") from None


def _registry() -> JWSRegistry:
    """Returns a checked header: unknown fields are allowed unless `crit` lists them (RFC 7515, 4.1.11)."""
    from joserfc.jws import JWSRegistry

    registry = JWSRegistry(algorithms=ALGORITHMS, strict_check_header=False)
    registry.max_header_length = MAX_HEADER_BYTES
    return registry


def looks_like_token(credential: str) -> bool:
    """Whether a credential has the form of a signed token (RFC 7515, 7.1); an API key has no dots."""
    return credential.count(".") == 2


def _trust(ca_file: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=None if ca_file is None else str(Path(ca_file).expanduser()))
    except (OSError, ssl.SSLError):
        raise ConfigError("`ca_file` of the setting oidc is not a file of certificates in PEM", param="oidc") from None


async def _fetch(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    async with client.stream("GET", url, headers={"accept": "application/json"}) as reply:
        if reply.status_code != 200:
            raise ValueError(f"it answers with status {reply.status_code}")
        body = b""
        async for part in reply.aiter_bytes():
            body += part
            if len(body) > MAX_FETCH_BYTES:
                raise ValueError(f"its answer has more than {MAX_FETCH_BYTES} bytes")
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError:
        raise ValueError("its answer is not a JSON object") from None


def _import_keys(document: dict[str, Any]) -> KeySet:
    """Returns the keys of a JWK set (RFC 7517) that can verify a signature; others are skipped."""
    from joserfc.errors import JoseError
    from joserfc.jwk import JWKRegistry, KeySet

    listed = document.get("keys")
    keys = []
    for data in listed if isinstance(listed, list) else ():
        if not isinstance(data, dict) or data.get("kty") not in _PUBLIC or data.get("use", "sig") != "sig":
            continue
        if data["kty"] == "RSA" and len(str(data.get("n"))) < MIN_RSA_CHARS:
            continue
        try:
            keys.append(JWKRegistry.import_key({name: value for name, value in data.items() if name != "key_ops"}))
        except (JoseError, ValueError, TypeError, KeyError):
            continue
    if not keys:
        raise ValueError("it has no key that verifies signatures")
    return KeySet(keys)
