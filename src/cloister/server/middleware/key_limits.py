"""Rate limits of API keys: 429 before a byte of the body is read."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Receive, Scope, Send

from cloister.policy.gate import Admission
from cloister.server.calls import call_of
from cloister.server.middleware.failures import send_error
from cloister.types.errors import RateLimitError


class KeyLimitMiddleware:
    """Charges a request to its key. GET requests are free; tokens are charged when the prompt is known."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = call_of(scope) if scope["type"] == "http" else None
        admission = scope.get("state", {}).get("admission")
        if call is not None and isinstance(admission, Admission) and admission.account is not None:
            call.account = admission.account
            if scope["method"] == "POST":
                try:
                    call.charge = call.account.enter(time.monotonic())
                except RateLimitError as error:
                    await send_error(send, error)
                    return
        await self._app(scope, receive, send)
