"""Bearer credentials (RFC 6750, section 2.1)."""

from __future__ import annotations


def read_bearer(authorization: str) -> str | None:
    """Returns the credential in the value of an Authorization header; None if its scheme is another one."""
    scheme, _, credential = authorization.partition(" ")
    return credential.strip() if scheme.lower() == "bearer" else None
