"""How one program of the private cloud knows another: by a shared secret, sent as a bearer token (RFC 6750)."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from starlette.types import Scope

from cloister.sealed.exchange import find_header
from cloister.sealed.problems import ProblemError
from cloister.server.middleware.auth import read_bearer


def check_peer(scope: Scope, secrets: Iterable[str], refusal: str) -> None:
    """Checks that a request shows one of some secrets, in the same time whichever it is.

    Raises:
        ProblemError: 401 with the text of `refusal`; it shows none of them.
    """
    given = (read_bearer(find_header(scope, b"authorization") or "") or "").encode("latin-1")
    known = [hmac.compare_digest(given, secret.encode()) for secret in secrets]
    if not any(known):
        raise ProblemError(401, refusal, fields=((b"www-authenticate", b"Bearer"),))


def check_gateway(scope: Scope, secret: str | None) -> None:
    """Checks that a request to a node comes from its gateway; without a secret everybody's may come.

    Raises:
        ProblemError: 401; it does not.
    """
    if secret is not None:
        check_peer(scope, [secret], "This node takes requests of its gateway only.")
