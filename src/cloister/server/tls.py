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
        context: what connections are made with.

    Raises:
        ConfigError: a file is missing or of another kind, or they do not belong together.
    """

    def __init__(self, certfile: Path, keyfile: Path | None = None) -> None:
        self._certfile = certfile.expanduser()
        self._keyfile = keyfile.expanduser() if keyfile is not None else None
        self.context = self._load()

    @classmethod
    def of(cls, config: ServerConfig) -> Certificate | None:
        """Returns the certificate that the settings name, None for plain HTTP.

        Raises:
            ConfigError: it cannot be used, or there is a key without a certificate.
        """
        if config.certfile is None:
            if config.keyfile is not None:
                raise ConfigError("keyfile is the key of a certificate; set certfile too", param="keyfile")
            return None
        return cls(Path(config.certfile), Path(config.keyfile) if config.keyfile is not None else None)

    def source(self) -> WatchedFiles:
        """Returns it as something to read again."""
        paths = (self._certfile,) if self._keyfile is None else (self._certfile, self._keyfile)
        return WatchedFiles("certificate and its key", paths, self.renew)

    def renew(self) -> None:
        """Reads the files again, for connections from now on.

        Raises:
            ConfigError: they cannot be used; the former certificate stays.
        """
        self._load()  # tried apart, so that a broken file leaves the context as it was
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
        # The function keeps OpenSSL from asking for a passphrase on a terminal that nobody watches.
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
            f"{setting} {path} cannot be read: {(error.strerror or 'unknown reason').lower()}", param=setting
        ) from None


# The queue of TLS handshakes: one at a time, round-robin over networks, within a bounded share of the event loop.
#
# Answering a ClientHello costs a key exchange and a signature, the most that a stranger can make a server compute for one
# packet. asyncio answers all that have arrived before it serves anybody else. Here a handshake waits until its hello is
# there, and the only one of a network comes next, however many wait from another.


HANDSHAKE_RECORD: Final = 22
"""ContentType of a TLS record (RFC 8446, section 5.1)."""
RECORD_HEAD_BYTES: Final = 5
MAX_HELLO_BYTES: Final = RECORD_HEAD_BYTES + 2**14
"""One record. A client has nothing else to say before it is answered."""
MAX_SHARE: Final = 0.2
"""Of the event loop's time, for answers to hellos: with P-256 some 400 a second."""
COST_WEIGHT: Final = 0.1
"""Of the newest answer in the mean that the pauses are made from."""


def is_hello_whole(data: bytes | bytearray) -> bool:
    """Whether the first record of a connection has arrived.

    Raises:
        ValueError: it is no handshake, or there is more than a client may send before it is answered.
    """
    if data[:1] not in (b"", bytes((HANDSHAKE_RECORD,))):
        raise ValueError("this is no TLS handshake")
    if len(data) > MAX_HELLO_BYTES:
        raise ValueError("this is longer than a ClientHello")
    return len(data) >= RECORD_HEAD_BYTES and len(data) - RECORD_HEAD_BYTES >= int.from_bytes(data[3:5])


class HandshakeQueue:
    """Begins handshakes that are ready, one at a time, with pauses: answers take a fifth of the event loop's time at most.

    Networks take turns. Inside one the newest comes first. If more arrive than can be answered, first come, first served would
    answer clients that have given up; the newest is still there.

    Attributes:
        tls: what handshakes are made with.
    """

    def __init__(self, tls: ssl.SSLContext) -> None:
        self.tls = tls
        self._networks: dict[str, dict[Hashable, Callable[[], None]]] = {}  # the next network first
        self._cost_s = 0.0
        self._next_s = 0.0
        self._is_running = False

    def enter(self, connection: Hashable, network: str, begin: Callable[[], None]) -> None:
        """Calls `begin` when it is this connection's turn; to be called on the event loop."""
        self._networks.setdefault(network, {})[connection] = begin
        if not self._is_running:
            self._is_running = True
            asyncio.get_running_loop().call_soon(self._run)

    def leave(self, connection: Hashable, network: str) -> None:
        """Forgets a connection; one that is not there is no mistake."""
        waiting = self._networks.get(network, {})
        waiting.pop(connection, None)
        if not waiting:
            self._networks.pop(network, None)

    def note_cost(self, cost_s: float) -> None:
        """Takes in how long the event loop was busy with an answer: longer with RSA, or on a machine that has other work."""
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
            self._networks[network] = waiting  # behind all others
        begin()
