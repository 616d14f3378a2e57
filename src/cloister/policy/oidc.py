"""Users of an OpenID issuer: which of its tokens are accepted, and the rights of their holders. `server.oidc` checks
signatures.

A token names a person. All other code sees a pseudonym: HMAC-SHA256 (RFC 2104) under a key that this process draws at start and
never stores. So logs, figures and files of two starts cannot be linked, nor matched against a list of names.
"""

from __future__ import annotations

import hmac
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import msgspec

from cloister.policy.credentials import MAX_PRIORITY, MIN_PRIORITY
from cloister.policy.profile import is_loopback
from cloister.policy.quotas import NO_LIMITS, KeyQuota
from cloister.types.errors import AuthenticationError, ConfigError, PolicyError

MAX_SKEW_S: Final = 600.0
_TYPES: Final = frozenset({"jwt", "at+jwt", "application/at+jwt"})
"""`typ` of an access token (RFC 9068, 2.1) and of tokens older than that."""
_KEY_BYTES: Final = 32
_MAX_CLAIM_CHARS: Final = 1024
_MOST_SECONDS: Final = 1e15
"""A larger time claim is invalid, as are NaN and infinity, which compare as false."""
_PATH: Final = re.compile(r"[^.\s]+(\.[^.\s]+)*")

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]


class TokenLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of every user; None is no limit (`policy.quotas`)."""

    requests_per_minute: PositiveInt | None = None
    concurrent_requests: PositiveInt | None = None
    tokens_per_day: PositiveInt | None = None


class OidcConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The file of the setting `oidc`, TOML.

    Attributes:
        issuer: URL, as in `iss` of its tokens; its keys are found by discovery.
        audience: required `aud` of a token: this service.
        roles_claim: claim that lists roles, such as `realm_access.roles`; a list, or one space-separated string.
        required_role: holders without it are refused; unset, no role is required.
        operator_role: holders may change what the server runs.
        tenant_claim: tokens with the same value of this claim share prefixes and a fair share.
        priority: class of all users; smaller is more urgent.
        clock_skew_s: permitted difference between the issuer's clock and this machine's.
        ca_file: trusted certificates in PEM for the issuer; unset, those of the system.
        limits: quotas of each user.
    """

    issuer: str
    audience: str
    roles_claim: str = "roles"
    required_role: str | None = None
    operator_role: str | None = None
    tenant_claim: str = "sub"
    priority: Annotated[int, msgspec.Meta(ge=MIN_PRIORITY, le=MAX_PRIORITY)] = 0
    clock_skew_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_SKEW_S)] = 60.0
    ca_file: str | None = None
    limits: TokenLimits = TokenLimits()

    def __post_init__(self) -> None:
        if not may_be_fetched(self.issuer) or self.issuer.endswith("/.well-known/openid-configuration"):
            raise ValueError("`issuer` is no https URL (http is taken on this machine only)")
        if not self.audience:
            raise ValueError("`audience` is empty")
        if not all(map(_PATH.fullmatch, (self.roles_claim, self.tenant_claim))):
            raise ValueError("a claim is no name, or names with dots between")


class AccessTokenError(AuthenticationError):
    """A token that is not accepted (RFC 6750, 3.1)."""

    code = "invalid_token"


@dataclass(frozen=True, slots=True)
class Person:
    """The holder of a token, under pseudonyms.

    Attributes:
        account: pseudonym for quotas.
        tenant: pseudonym for the fair share.
        salt: of the tenant's scope.
    """

    account: bytes = field(repr=False)
    tenant: str = field(repr=False)
    salt: bytes = field(repr=False)
    priority: int = 0
    limits: KeyQuota = NO_LIMITS
    is_operator: bool = False


class People:
    """Reads the claims of verified tokens."""

    def __init__(self, config: OidcConfig) -> None:
        self.config = config
        self._key = os.urandom(_KEY_BYTES)
        self._limits = KeyQuota(**msgspec.structs.asdict(config.limits))

    def admit(self, header: Mapping[str, Any], claims: Mapping[str, Any], now_s: float) -> Person:
        """Returns the holder of a token whose signature was verified (RFC 7519, 4.1; RFC 9068, 4).

        Args:
            now_s: seconds since 1970-01-01 UTC.

        Raises:
            TokenError: the token is not for this service, or not valid now.
            PolicyError: its holder lacks the required role.
        """
        config = self.config
        kind = header.get("typ", "JWT")
        if not isinstance(kind, str) or kind.lower() not in _TYPES:
            raise AccessTokenError("this is no access token; send the one that the issuer gave for this service")
        if claims.get("iss") != config.issuer:
            raise AccessTokenError("this token is another issuer's; sign in at the one of this server")
        audience = claims.get("aud")
        if config.audience not in (audience if isinstance(audience, list) else [audience]):
            raise AccessTokenError("this token is for another service; ask the issuer for one whose audience is this server")
        self._check_times(claims, now_s)
        subject, tenant = _text(claims, "sub"), _text(claims, config.tenant_claim)
        roles = _roles(claims, config.roles_claim)
        if config.required_role is not None and config.required_role not in roles:
            raise PolicyError("this token lacks the role that the server requires; ask its operator which")
        return Person(
            account=self._pseudonym("account", subject),
            tenant=self._pseudonym("tenant", tenant).hex(),
            salt=self._pseudonym("scope", tenant),
            priority=config.priority,
            limits=self._limits,
            is_operator=config.operator_role is not None and config.operator_role in roles,
        )

    def _check_times(self, claims: Mapping[str, Any], now_s: float) -> None:
        skew_s = self.config.clock_skew_s
        for name, is_needed in (("exp", True), ("nbf", False), ("iat", False)):
            value = claims.get(name)
            if value is None and not is_needed:
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < _MOST_SECONDS:
                raise AccessTokenError("this token does not say until when it is valid; ask the issuer for another one")
            if name == "exp" and now_s >= value + skew_s:
                raise AccessTokenError("this token has expired; sign in again")
            if name != "exp" and now_s < value - skew_s:
                raise AccessTokenError("this token is not valid yet; check the clocks of the issuer and of this server")

    def _pseudonym(self, purpose: str, value: str) -> bytes:
        words = f"cloister/oidc/{purpose}/1\0{self.config.issuer}\0{value}"
        return hmac.digest(self._key, words.encode("utf-8", "surrogatepass"), "sha256")


def read_oidc(path: Path) -> OidcConfig:
    """Reads the file of the setting `oidc`.

    Raises:
        ConfigError: the file cannot be read or used; the message says what to change.
    """
    path = path.expanduser()
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), OidcConfig)
    except OSError as error:
        raise ConfigError(f"cannot read the file {path} of the setting oidc: {error.strerror}", param="oidc") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"the file {path} of the setting oidc cannot be used: {error}", param="oidc") from None


def may_be_fetched(url: str) -> bool:
    """Whether responses from a URL cannot be changed in transit: it uses TLS, or is on this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    return (
        bool(host) and not parts.username and (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host or "")))
    )


def _claim(claims: Mapping[str, Any], path: str) -> object:
    if path in claims:  # some issuers use URLs with dots as claim names
        return claims[path]
    found: object = claims
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _text(claims: Mapping[str, Any], path: str) -> str:
    value = _claim(claims, path)
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_CLAIM_CHARS:
        raise AccessTokenError("this token lacks a claim that the server needs to distinguish users; ask its operator which")
    return value


def _roles(claims: Mapping[str, Any], path: str) -> frozenset[str]:
    value = _claim(claims, path)
    if isinstance(value, str):
        return frozenset(value.split())
    return frozenset(role for role in value if isinstance(role, str)) if isinstance(value, list) else frozenset()
