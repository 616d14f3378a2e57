"""API keys (RFC 6750, 2.1): everything but `/health` asks the gate before a byte of the body is read."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from cloister.privacy.gate import Gate
from cloister.server.middleware.failures import send_error
from cloister.types.errors import AuthenticationError

OPEN_PATHS = frozenset({"/health"})


class Authentication:
    """Puts the gate's admission into the request's state, or answers 401."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                admission = self._gate.admit(bearer_token(scope))
            except AuthenticationError as error:
                await send_error(send, error)
                return
            scope.setdefault("state", {})["admission"] = admission
        await self._app(scope, receive, send)


def bearer_token(scope: Scope) -> str | None:
    """Returns the token of the one Authorization header, or None when there is none or it is of another kind."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, token = values[0].decode("latin-1").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None
