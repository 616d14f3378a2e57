"""Authentication by API key or token (RFC 6750, section 2.1), before a byte of the body is read; and the Host check."""

from __future__ import annotations

import ipaddress

from starlette.types import ASGIApp, Receive, Scope, Send

from cloister.policy.gate import SESSION_HEADER, Admission, Gate
from cloister.server.errors import HostError
from cloister.server.middleware.failures import send_error
from cloister.server.oidc import TokenVerifier, looks_like_token
from cloister.types.errors import CloisterError

# Bearer credentials (RFC 6750, section 2.1).


def read_bearer(authorization: str) -> str | None:
    """Returns the credential in the value of an Authorization header; None for another scheme."""
    scheme, _, credential = authorization.partition(" ")
    return credential.strip() if scheme.lower() == "bearer" else None


OPEN_PATHS = frozenset({"/", "/docs", "/health", "/openapi.json", "/ping", "/v1/policy"})
OPEN_FOLDER = "/page/"


class AuthenticationMiddleware:
    """Stores the gate's admission in the request's state, or replies 401; 400 or 403 for an invalid or forbidden session."""

    def __init__(self, app: ASGIApp, gate: Gate, verifier: TokenVerifier | None = None) -> None:
        self._app = app
        self._gate = gate
        self._verifier = verifier

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_open(scope["path"]):
            try:
                admission = self._gate.with_session(await self._admit(presented_key(scope)), _session(scope))
            except CloisterError as error:
                await send_error(send, error)
                return
            scope.setdefault("state", {})["admission"] = admission
        await self._app(scope, receive, send)

    async def _admit(self, credential: str | None) -> Admission:
        if self._verifier is not None and credential is not None and looks_like_token(credential):
            return self._gate.admit_person(await self._verifier.admit(credential))
        return self._gate.admit(credential)


def is_open(path: str) -> bool:
    """Whether a route is unauthenticated: health, the page, the reference, and the policy, which clients read before they use a
    key."""
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def presented_key(scope: Scope) -> str | None:
    """Returns the key of the one Authorization header, else of the one `x-api-key`, as Anthropic's clients send it.

    None if there is neither, or the first is not a Bearer credential.
    """
    given = _values(scope, b"authorization")
    if not given:
        keys = _values(scope, b"x-api-key")
        return keys[0].strip() if len(keys) == 1 else None
    if len(given) > 1:
        return None
    return read_bearer(given[0])


def _session(scope: Scope) -> str | None:
    """Returns the secret of the request's session; two of them are an error."""
    given = _values(scope, SESSION_HEADER.encode())
    return ",".join(given) if given else None


def _values(scope: Scope, wanted: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]


# The Host check against DNS rebinding: a web page must not reach a keyless local server under its own name.


class LocalHostMiddleware:
    """Answers 403 unless the Host header is an IP address or localhost: rebinding needs a name."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not all(_is_local(value) for name, value in scope["headers"] if name == b"host"):
            error = HostError("This server takes requests to localhost or an IP address only; set API keys to serve a name.")
            await send_error(send, error)
            return
        await self._app(scope, receive, send)


def _is_local(host: bytes) -> bool:
    name = host.decode("latin-1").lower()
    name = name[1 : name.find("]")] if name.startswith("[") else name.partition(":")[0]
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
