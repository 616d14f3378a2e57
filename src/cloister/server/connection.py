"""One client connection: uvicorn's, with a deadline for every wait and errors that OpenAI clients can read."""

from __future__ import annotations

import asyncio
from typing import Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from cloister.server.errors import error_body, invalid

REQUEST_TIMEOUT_S: Final = 20.0
"""How long a connection may go without a whole request head, or with the rest of a body that nobody reads any more."""
LINGER_S: Final = 2.0
"""How long a refused client may go on sending: closing at once would take back the reply before it was read."""


class Connection(H11Protocol):
    """Closes a connection that has had no request in work for `request_timeout_s`, whatever trickles in meanwhile."""

    request_timeout_s = REQUEST_TIMEOUT_S
    _patience: asyncio.TimerHandle | None = None
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_waiting()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if self._is_working():
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_working():
            self._start_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP. `msg` is uvicorn's; it says less than what is needed to find the mistake."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        body = error_body(invalid("This is not a valid HTTP/1.1 request; check its head.", code="invalid_http"))
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        reply = (h11.Response(status_code=400, headers=headers, reason=b"Bad Request"), h11.Data(body), h11.EndOfMessage())
        for event in reply:
            self.transport.write(self.conn.send(event) or b"")
        self._is_refused = True
        self._stop_waiting()
        self.transport.write_eof()
        self._patience = self.loop.call_later(LINGER_S, self.transport.close)

    def _is_working(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_waiting(self) -> None:
        self._stop_waiting()
        self._patience = self.loop.call_later(self.request_timeout_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        if not self._is_working():
            self.transport.close()
