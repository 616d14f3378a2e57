"""A guard against DNS rebinding: a page in a browser must not reach a keyless local server under a name of its own."""

from __future__ import annotations

import ipaddress

from starlette.types import ASGIApp, Receive, Scope, Send

from cloister.server.errors import HostError
from cloister.server.middleware.failures import send_error


class LocalHostOnly:
    """Answers 403 unless the Host header is an IP address or localhost: names are what rebinding needs."""

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
