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
    """The circle inside which cached state may be reused.

    Attributes:
        kind: how wide the circle is.
        salt: bytes that no other scope has; for a tenant derived from its credential, for a request random.
        lifetime_s: how long state may stay that nobody in the circle uses; None for as long as there is room.
        owner: seed of the wider scope whose share of the cache it uses up; empty for a share of its own.
    """

    kind: ScopeKind
    salt: bytes
    lifetime_s: float | None = None
    owner: bytes = b""

    def __repr__(self) -> str:
        return f"Scope({self.kind.value})"  # the salt is a secret of the credential: not for logs or tracebacks

    @property
    def seed(self) -> bytes:
        """32 bytes that start every prefix-key chain of this scope."""
        return hashlib.sha256(b"cloister/scope/1\0" + self.kind.encode() + b"\0" + self.salt).digest()


SESSION_LIFETIME_S = 300.0
"""How long the state of a session may wait for its next request."""
PUBLIC_SCOPE = Scope(ScopeKind.PUBLIC, b"")
"""Everybody's: prefixes that the release brings, and nothing that came from a request."""
LOCAL_SCOPE = Scope(ScopeKind.LOCAL, b"")
"""The one scope of a loopback server without API keys, and of `LLM`."""
