"""A listener that lets in a few connections in each turn of the event loop.

asyncio accepts as many as its backlog in one go, a tenth of a millisecond each, and serves nobody who has a connection
meanwhile.
"""

from __future__ import annotations

import socket
from typing import Final

import uvicorn

from cloister.server.connection import Connection

BACKLOG: Final = 2048
"""Connections that the kernel holds until they are accepted."""
ACCEPTS_AT_ONCE: Final = 8
"""In each turn of the event loop; also uvicorn's `backlog`, which it hands to asyncio."""


class PacedServer(uvicorn.Server):
    """uvicorn whose sockets have the kernel's backlog and not that of asyncio; its config needs `backlog=ACCEPTS_AT_ONCE`."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # asyncio has just set it to its own; a second call changes nothing else (listen(2))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops accepting, waits for requests that run, and drops what is left: handshakes, of which uvicorn does not know."""
        await super().shutdown(sockets)
        protocol = self.config.http_protocol_class
        if issubclass(protocol, Connection) and protocol.table is not None:
            protocol.table.close()
