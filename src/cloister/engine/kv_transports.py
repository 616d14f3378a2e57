"""Where engines listen for each other: a Unix socket on one machine, TCP between machines."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from typing import Final, Protocol

from cloister.types.errors import ConfigError
from cloister.types.registry import Registry
from cloister.types.threat import Requirement, ThreatProfile

_BACKLOG: Final = 64
_CREDENTIALS: Final = struct.Struct("3i")
_WILDCARDS: Final = frozenset({"", "0.0.0.0", "::"})

_THREATS: Final = frozenset({Requirement.STATELESS, Requirement.ENFORCEABLE, Requirement.NON_TARGETABLE})
_AUTHENTICATED: Final = "only an engine that knows the secret of this front's engines gets anything, or is believed"


class KVTransport(Protocol):
    """How engines reach each other."""

    def listen(self, where: str) -> tuple[socket.socket, str]:
        """Returns a listening socket, and the endpoint that others connect to.

        Args:
            where: the setting, without the name of the transport.

        Raises:
            ConfigError: nothing can listen there.
        """
        ...

    def connect(self, where: str, timeout_s: float) -> socket.socket:
        """Connects to an endpoint, given without the name of the transport. Raises OSError if nothing listens there."""
        ...

    def admits(self, sock: socket.socket) -> bool:
        """Whether a peer may speak at all."""
        ...


KV_TRANSPORTS: Registry[KVTransport] = Registry("transport of KV")


_UNIX_THREAT: Final = ThreatProfile(
    row="pulling (cache fetched by a node)",
    threats=_THREATS,
    residue="KV in the buffers of a socket until it is read",
    where=("host memory",),
    attack="another process of this machine asks for KV, or offers some",
    mitigations=("only processes of the same user are heard", _AUTHENTICATED),
)
_TCP_THREAT: Final = ThreatProfile(
    row="pulling (cache fetched by a node)",
    threats=_THREATS,
    residue="KV in packets",
    where=("network",),
    attack="tap; another machine asks for KV, or offers some",
    mitigations=(_AUTHENTICATED, "not encrypted: off loopback only where the profile trusts the network"),
)


class UnixTransport:
    """Abstract names: they leave no file behind when a process dies."""

    def listen(self, where: str) -> tuple[socket.socket, str]:
        if where:
            raise ConfigError("kv_transfer unix takes no address; engines choose names of their own", param="kv_transfer")
        name = f"cloister-kv-{secrets.token_hex(16)}"
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(f"\0{name}")
        sock.listen(_BACKLOG)
        return sock, f"unix:{name}"

    def connect(self, where: str, timeout_s: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        with _closed_on_failure(sock):
            sock.settimeout(timeout_s)
            sock.connect(f"\0{where}")
        return sock

    def admits(self, sock: socket.socket) -> bool:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(raw)
        return bool(user == os.getuid())


class TcpTransport:
    """TCP: not encrypted."""

    def listen(self, where: str) -> tuple[socket.socket, str]:
        host, port = _split(where)
        if host in _WILDCARDS:
            raise ConfigError(
                f"kv_transfer tcp:{where} names no address that others can reach; give that of one interface",
                param="kv_transfer",
            )
        try:
            sock = socket.create_server((host, port), backlog=_BACKLOG, family=_family_of(host))
        except OSError as error:
            raise ConfigError(f"kv_transfer cannot listen on {host}:{port}: {error.strerror}", param="kv_transfer") from error
        shown = f"[{host}]" if ":" in host else host
        return sock, f"tcp://{shown}:{sock.getsockname()[1]}"

    def connect(self, where: str, timeout_s: float) -> socket.socket:
        sock = socket.create_connection(_split(where), timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def admits(self, sock: socket.socket) -> bool:
        return True


def _split(where: str) -> tuple[str, int]:
    """Reads "//HOST:PORT"."""
    host, _, port = where.removeprefix("//").rpartition(":")
    if not where.startswith("//") or not port.isdigit() or int(port) > 0xFFFF:
        raise ConfigError(f"kv_transfer tcp:{where} is no address; write tcp://HOST:0", param="kv_transfer")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _family_of(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


@contextlib.contextmanager
def _closed_on_failure(sock: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        sock.close()
        raise


KV_TRANSPORTS.register("unix", _UNIX_THREAT)(UnixTransport())
KV_TRANSPORTS.register("tcp", _TCP_THREAT)(TcpTransport())


def transport_of(setting: str) -> tuple[KVTransport, str]:
    """Returns the transport that a setting or an endpoint names, and the rest of it.

    Raises:
        ConfigError: there is no such transport.
    """
    name, _, where = setting.partition(":")
    return KV_TRANSPORTS.get(name), where


def has_fixed_port(setting: str) -> bool:
    """Whether a setting names a port, which only one engine could have. Raises ConfigError if it is no address."""
    name, _, where = setting.partition(":")
    return name == "tcp" and _split(where)[1] != 0


def leaves_machine(setting: str) -> bool:
    """Whether a setting lets other machines connect. Raises ConfigError if it is no address."""
    name, _, where = setting.partition(":")
    if name != "tcp":
        return False
    host, _ = _split(where)
    return host not in ("localhost", "::1") and not host.startswith("127.")
