"""Scopes: which requests may share state."""

from __future__ import annotations

import hashlib
from enum import StrEnum

import msgspec


class ScopeKind(StrEnum):
    """From narrow to wide. Nothing is shared between two scopes, whatever their kinds."""

    REQUEST = "request"
    SESSION = "session"
    TENANT = "tenant"
    LOCAL = "local"
    PUBLIC = "public"


class Scope(msgspec.Struct, frozen=True):
    """The scope inside which cached state may be reused.

    Attributes:
        kind: the width of the scope.
        salt: unique bytes; derived from the credential for a tenant, random for a request.
        lifetime_s: lifetime of unused state; None keeps it until it is evicted.
        owner: seed of the wider scope whose share of the cache is charged; empty for its own share.
    """

    kind: ScopeKind
    salt: bytes
    lifetime_s: float | None = None
    owner: bytes = b""

    def __repr__(self) -> str:
        return f"Scope({self.kind.value})"  # the salt is a secret of the credential: not for logs or tracebacks

    @property
    def seed(self) -> bytes:
        """The 32 bytes at the root of every prefix-key chain of this scope."""
        return hashlib.sha256(b"cloister/scope/1\0" + self.kind.encode() + b"\0" + self.salt).digest()

    def narrow(self, cache_salt: str) -> Scope:
        """Returns the scope of requests with the same `cache_salt` within this one, to whose share it is charged. A request
        that shares nothing anyway keeps its scope."""
        if self.kind is ScopeKind.REQUEST:
            return self
        salt = hashlib.sha256(b"cloister/cache-salt/1\0" + self.seed + cache_salt.encode()).digest()
        return Scope(self.kind, salt, self.lifetime_s, self.owner or self.seed)

    def blind(self, prompt_cache_key: str) -> bytes:
        """Returns what stands for a `prompt_cache_key` of this scope: no other scope has it, and nobody reads the key in it."""
        return hashlib.sha256(b"cloister/prompt-cache-key/1\0" + self.seed + prompt_cache_key.encode()).digest()


SESSION_LIFETIME_S = 300.0
"""Lifetime of a session's state after its last request."""
PERSON_LIFETIME_S = 3600.0
"""Lifetime of the state of an issuer's users after their last request. Their number is unknown when shares of the cache are
divided, so a share has to become free again."""
PUBLIC_SCOPE = Scope(ScopeKind.PUBLIC, b"")
"""The public scope: prefixes of the release only, nothing from requests."""
LOCAL_SCOPE = Scope(ScopeKind.LOCAL, b"")
"""The only scope of a loopback server without API keys, and of `LLM`."""
