"""TLS: the server's certificate, with errors that name the file at fault; and a fair queue of handshakes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Final

from cloister.server.reload import WatchedFiles
from cloister.types.config import ServerConfig
from cloister.types.errors import ConfigError


class Certificate:
    """A certificate and its key, read from files. TLS 1.2 at least; no client certificates.

    Attributes:
        context: SSL context of connections.

    Raises:
        ConfigError: a file is missing or invalid, or they do not match.
    """

    def __init__(self, certfile: Path, keyfile: Path | None = None) -> None:
        self._certfile = certfile.expanduser()
        self._keyfile = keyfile.expanduser() if keyfile is not None else None
        self.context = self._load()

    @classmethod
    def of(cls, config: ServerConfig) -> Certificate | None:
        """Returns the certificate from the settings, None for plain HTTP.

        Raises:
            ConfigError: it cannot be used, or there is a key without a certificate.
        """
        if config.certfile is None:
            if config.keyfile is not None:
                raise ConfigError("keyfile is the key of a certificate; set certfile too", param="keyfile")
            return None
        return cls(Path(config.certfile), Path(config.keyfile) if config.keyfile is not None else None)

    def source(self) -> WatchedFiles:
        """Returns it as a reloadable source."""
        paths = (self._certfile,) if self._keyfile is None else (self._certfile, self._keyfile)
        return WatchedFiles("certificate and its key", paths, self.renew)

    def renew(self) -> None:
        """Reads the files again, for connections from now on.

        Raises:
            ConfigError: they cannot be used; the previous certificate stays in use.
        """
        self._load()  # loaded into a separate context first, so that a bad file leaves the current one unchanged
        self._read_into(self.context)

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._read_into(context)
        return context

    def _read_into(self, context: ssl.SSLContext) -> None:
        _check_readable(self._certfile, "certfile")
        if self._keyfile is not None:
            _check_readable(self._keyfile, "keyfile")
        # The function keeps OpenSSL from asking for a passphrase on an unattended terminal.
        try:
            context.load_cert_chain(self._certfile, self._keyfile, password=lambda: b"")
        except ssl.SSLError as error:
            raise self._explain(error) from None

    def _explain(self, error: ssl.SSLError) -> ConfigError:
        key = self._keyfile or self._certfile
        if "KEY_VALUES_MISMATCH" in str(error):
            return ConfigError(
                f"the key in {key} does not belong to the certificate in {self._certfile}; use the key it was made with",
                param="keyfile",
            )
        if b"BEGIN CERTIFICATE" not in self._certfile.read_bytes():
            return ConfigError(f"certfile {self._certfile} has no certificate; it must be in PEM", param="certfile")
        data = key.read_bytes()
        if b"PRIVATE KEY-----" not in data:
            return ConfigError(f"there is no private key in {key}; name its file, in PEM, with keyfile", param="keyfile")
        if b"ENCRYPTED" in data:
            return ConfigError(
                f"the private key in {key} has a passphrase; write it without one with: openssl pkey -in {key} -out KEY",
                param="keyfile",
            )
        return ConfigError(
            f"TLS cannot be set up with {self._certfile} and {key}: {error.reason or 'unknown reason'}; check both files",
            param="certfile",
        )


def _check_readable(path: Path, setting: str) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(
            f"{setting} {path} cannot be read: {(error.strerror or 'unknown reason').lower()}; "
            f"give --{setting} a PEM file that the server's user may read",
            param=setting,
        ) from None


# The queue of TLS handshakes: one at a time, round-robin over networks, within a bounded share of the event loop.
#
# Answering a ClientHello costs a key exchange and a signature, the most expensive computation that an unauthenticated client
# can cause with one packet. asyncio answers all that have arrived before it serves any other connection. Here a handshake waits
# until its ClientHello has arrived, and networks take turns, however many handshakes wait from one of them.


HANDSHAKE_RECORD: Final = 22
"""ContentType of a TLS record (RFC 8446, section 5.1)."""
RECORD_HEAD_BYTES: Final = 5
MAX_HELLO_BYTES: Final = RECORD_HEAD_BYTES + 2**14
"""Maximum bytes before the server's answer: one record. A client sends nothing else before that."""
MAX_SHARE: Final = 0.2
"""Share of the event loop's time for answers to ClientHellos: with P-256 about 400 a second."""
COST_WEIGHT: Final = 0.1
"""Weight of the newest answer in the mean from which pauses are computed."""


def is_hello_whole(data: bytes | bytearray) -> bool:
    """Whether the first record of a connection has arrived.

    Raises:
        ValueError: it is not a handshake, or is longer than a client may send before the server's answer.
    """
    if data[:1] not in (b"", bytes((HANDSHAKE_RECORD,))):
        raise ValueError("this is no TLS handshake")
    if len(data) > MAX_HELLO_BYTES:
        raise ValueError("this is longer than a ClientHello")
    return len(data) >= RECORD_HEAD_BYTES and len(data) - RECORD_HEAD_BYTES >= int.from_bytes(data[3:5])


class HandshakeQueue:
    """Starts ready handshakes one at a time, with pauses: answers take at most a fifth of the event loop's time.

    Networks take turns; inside one, the newest is first. Under overload, first come, first served would answer clients that
    have given up; the newest is still waiting.

    Attributes:
        tls: SSL context of handshakes.
    """

    def __init__(self, tls: ssl.SSLContext) -> None:
        self.tls = tls
        self._networks: dict[str, dict[Hashable, Callable[[], None]]] = {}  # the next network first
        self._cost_s = 0.0
        self._next_s = 0.0
        self._is_running = False

    def enter(self, connection: Hashable, network: str, begin: Callable[[], None]) -> None:
        """Calls `begin` when it is this connection's turn. Call it on the event loop."""
        self._networks.setdefault(network, {})[connection] = begin
        if not self._is_running:
            self._is_running = True
            asyncio.get_running_loop().call_soon(self._run)

    def leave(self, connection: Hashable, network: str) -> None:
        """Removes a connection; unknown ones are ignored."""
        waiting = self._networks.get(network, {})
        waiting.pop(connection, None)
        if not waiting:
            self._networks.pop(network, None)

    def note_cost(self, cost_s: float) -> None:
        """Records the event loop time of an answer, which is longer with RSA or on a busy machine."""
        self._cost_s += COST_WEIGHT * (cost_s - self._cost_s)

    def _run(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._networks:
            self._is_running = False
            return
        now_s = loop.time()
        if now_s >= self._next_s:
            self._next_s = now_s + self._cost_s / MAX_SHARE
            self._begin_one()
        loop.call_at(self._next_s, self._run)

    def _begin_one(self) -> None:
        network = next(iter(self._networks))
        waiting = self._networks.pop(network)
        _, begin = waiting.popitem()
        if waiting:
            self._networks[network] = waiting  # after all others
        begin()
