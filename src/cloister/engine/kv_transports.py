"""Where engines listen for each other, and how KV passes: through shared memory or a Unix socket on one machine, over mutual
TLS between machines; inside a sealed node over descriptors that its front hands out (`engine.kv_sealed_link`).

A setting names one transport or several, such as "shm,tls://HOST:0", and so does an endpoint; the connecting engine takes the
first one that it reaches. Names of Unix sockets are random, so on another machine nothing listens there, and connecting fails
at once.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

from cloister.engine.kv_frames import KVInbox, KVOutbox, StreamPath
from cloister.engine.kv_shared_memory import SharedInbox, SharedMemories, SharedOutbox
from cloister.engine.kv_unit import SEALED
from cloister.types.errors import ConfigError
from cloister.types.registry import Registry
from cloister.types.threat import Requirement, ThreatProfile

if TYPE_CHECKING:
    import ssl

_BACKLOG: Final = 64
_CREDENTIALS: Final = struct.Struct("3i")
_LEAST_TIMEOUT_S: Final = 0.001
"""A socket with a timeout of zero would not wait at all."""
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

    def accept(self, sock: socket.socket, timeout_s: float) -> socket.socket:
        """Returns an incoming connection once its peer is known and allowed. Closes it and raises OSError if the peer is not
        allowed, or takes too long to identify itself."""
        ...

    def open_inbox(self, where: str, part_bytes: int) -> KVInbox:
        """Returns where the contents of one pull arrive.

        Args:
            where: as of `connect`.
            part_bytes: contents of a part at most.

        Raises:
            OSError: there is no memory for it.
        """
        ...

    def open_outbox(self, sock: socket.socket, deadline_s: float) -> KVOutbox:
        """Returns where to put what an engine asked for. Raises KVLinkError or OSError if that engine does not say where in
        time."""
        ...

    def close(self) -> None:
        """Releases what it keeps between connections."""
        ...


KV_TRANSPORTS: Registry[Callable[[bytes], KVTransport]] = Registry("transport of KV")
"""They take the secret that all engines of one front share, and nobody else has."""


_UNIX_THREAT: Final = ThreatProfile(
    row="pulling (cache fetched by a node)",
    threats=_THREATS,
    residue="KV in the buffers of a socket until it is read",
    where=("host memory",),
    attack="another process of this machine asks for KV, or offers some",
    mitigations=("only processes of the same user are heard", _AUTHENTICATED),
)
_SHM_THREAT: Final = ThreatProfile(
    row="pulling (cache fetched by a node)",
    threats=_THREATS,
    residue="KV in memory of the engine that asks and its source, until the pull ends",
    where=("host memory",),
    attack="another process of this machine asks for KV, or offers some, or changes it while it is read",
    mitigations=(
        "the memory has no name, and only the two engines get it, over a socket on which only processes of the same user are"
        " heard; it is wiped, and used again for the same source only",
        "what is checked and used is a copy that the source cannot change",
        _AUTHENTICATED,
    ),
)
_MOONCAKE_THREAT: Final = ThreatProfile(
    row="pulling (cache fetched by a node)",
    threats=_THREATS,
    residue="ciphertext of KV in memory that everybody reads who reaches Mooncake's ports; its keys are gone with their pulls",
    where=("host memory",),
    attack="anybody who reaches a port of Mooncake, which listens on all addresses, reads or writes what it has registered, or"
    " sends it what its code does not expect",
    mitigations=(
        "only what is sealed with AES-256-GCM is registered, under a key for each pull, which passes over a socket on which"
        " only processes of the same user are heard; what is opened is a copy",
        _AUTHENTICATED,
    ),
)
_SEALED_THREAT: Final = ThreatProfile(
    row="disaggregated prefill/decode",
    threats=frozenset(),
    residue="ciphertext of KV in the buffers of a socket until it is read; the keys of a connection until it ends",
    where=("host memory",),
    attack="tap; another process asks for KV, or offers some; records are changed, repeated or left out",
    mitigations=(
        "engines of one sealed node only, which one statement attests",
        "AES-256-GCM under keys of each connection, in locked memory, which nobody can compute later",
        "a source gives the KV of a request that it has, or holds for the engine that goes on with it, and no other",
    ),
)
_TLS_THREAT: Final = ThreatProfile(
    row="pulling (cache fetched by a node)",
    threats=_THREATS,
    residue="KV in the buffers of a connection until they are used again",
    where=("host memory",),
    attack="tap; another machine asks for KV, or offers some",
    mitigations=("mutual TLS 1.3 under a key that is derived from that secret", _AUTHENTICATED),
)


class UnixTransport:
    """Abstract names: they leave no file behind when a process dies.

    Args:
        secret: as for every transport; here the peer's user decides whether it is allowed.
    """

    name: ClassVar = "unix"

    def __init__(self, secret: bytes) -> None:
        pass

    def listen(self, where: str) -> tuple[socket.socket, str]:
        if where:
            raise ConfigError(
                f"kv_transfer {self.name} takes no address; engines choose names of their own", param="kv_transfer"
            )
        name = f"cloister-kv-{secrets.token_hex(16)}"
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(f"\0{name}")
        sock.listen(_BACKLOG)
        return sock, f"{self.name}:{name}"

    def connect(self, where: str, timeout_s: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        with _closed_on_failure(sock):
            sock.settimeout(timeout_s)
            sock.connect(f"\0{where}")
            _check_user(sock)
        return sock

    def accept(self, sock: socket.socket, timeout_s: float) -> socket.socket:
        with _closed_on_failure(sock):
            _check_user(sock)
        return sock

    def open_inbox(self, where: str, part_bytes: int) -> KVInbox:
        return StreamPath()

    def open_outbox(self, sock: socket.socket, deadline_s: float) -> KVOutbox:
        return StreamPath()

    def close(self) -> None:
        """It keeps nothing."""


class SharedMemoryTransport(UnixTransport):
    """A Unix socket over which engines speak, and memory that they share for the contents."""

    name: ClassVar = "shm"

    def __init__(self, secret: bytes) -> None:
        super().__init__(secret)
        self._memories = SharedMemories()

    def open_inbox(self, where: str, part_bytes: int) -> KVInbox:
        return SharedInbox(self._memories, where, part_bytes)

    def open_outbox(self, sock: socket.socket, deadline_s: float) -> KVOutbox:
        return SharedOutbox(sock, deadline_s)

    def close(self) -> None:
        self._memories.close()


class MooncakeTransport(UnixTransport):
    """A Unix socket over which engines speak, and Mooncake's transfer engine for the contents, sealed.

    Raises:
        ConfigError: Mooncake is not installed, or does not start.
    """

    name: ClassVar = "mooncake"

    def __init__(self, secret: bytes) -> None:
        super().__init__(secret)
        from cloister.engine import kv_mooncake  # only where it is used: it imports cryptography

        self._module, self._mooncake = kv_mooncake, kv_mooncake.Mooncake.start()

    def open_inbox(self, where: str, part_bytes: int) -> KVInbox:
        return self._module.MooncakeInbox(self._mooncake, part_bytes)

    def open_outbox(self, sock: socket.socket, deadline_s: float) -> KVOutbox:
        return self._module.MooncakeOutbox(self._mooncake, sock, deadline_s)


class TlsTransport:
    """TCP under mutual TLS 1.3: both sides show the certificate that only engines of this front have.

    Args:
        secret: from which their key is derived.
    """

    def __init__(self, secret: bytes) -> None:
        from cloister.engine import identity  # only where it is used: it imports cryptography

        own = identity.Identity.derive(secret)
        self._is_peer, self._certificate = identity.is_peer, identity.read_peer(own.certificate)
        self._client, self._server = own.client_context(own.certificate), own.server_context(own.certificate)

    def listen(self, where: str) -> tuple[socket.socket, str]:
        host, port = _split(where)
        if host in _WILDCARDS:
            raise ConfigError(
                f"kv_transfer tls:{where} names no address that others can reach; give that of one interface",
                param="kv_transfer",
            )
        try:
            sock = socket.create_server((host, port), backlog=_BACKLOG, family=_family_of(host))
        except OSError as error:
            raise ConfigError(f"kv_transfer cannot listen on {host}:{port}: {error.strerror}", param="kv_transfer") from error
        return sock, f"tls://{_bracketed(host)}:{sock.getsockname()[1]}"

    def connect(self, where: str, timeout_s: float) -> socket.socket:
        give_up_s = time.monotonic() + timeout_s
        sock = socket.create_connection(_split(where), timeout_s)
        return self._shake_hands(sock, self._client, give_up_s - time.monotonic())

    def accept(self, sock: socket.socket, timeout_s: float) -> socket.socket:
        return self._shake_hands(sock, self._server, timeout_s)

    def open_inbox(self, where: str, part_bytes: int) -> KVInbox:
        return StreamPath()

    def open_outbox(self, sock: socket.socket, deadline_s: float) -> KVOutbox:
        return StreamPath()

    def close(self) -> None:
        """It keeps nothing."""

    def _shake_hands(self, sock: socket.socket, context: ssl.SSLContext, timeout_s: float) -> socket.socket:
        with _closed_on_failure(sock):
            sock.settimeout(max(timeout_s, _LEAST_TIMEOUT_S))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            secured = context.wrap_socket(sock, server_side=context is self._server)
        with _closed_on_failure(secured):
            if not self._is_peer(secured, self._certificate):
                raise ConnectionRefusedError("the other side showed another certificate than its engines have")
        return secured


def _check_user(sock: socket.socket) -> None:
    """Raises ConnectionRefusedError if the process at the other end of a Unix socket is another user's."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(raw)[1] != os.getuid():
        raise ConnectionRefusedError("a process of another user is at the other end")


def _split(where: str) -> tuple[str, int]:
    """Reads "//HOST:PORT"."""
    host, _, port = where.removeprefix("//").rpartition(":")
    if not where.startswith("//") or not port.isdigit() or int(port) > 0xFFFF:
        raise ConfigError(f"kv_transfer tls:{where} is not an address; write tls://HOST:0", param="kv_transfer")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _family_of(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@contextlib.contextmanager
def _closed_on_failure(sock: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        sock.close()
        raise


KV_TRANSPORTS.register("shm", _SHM_THREAT)(SharedMemoryTransport)
KV_TRANSPORTS.register("unix", _UNIX_THREAT)(UnixTransport)
KV_TRANSPORTS.register("tls", _TLS_THREAT)(TlsTransport)
KV_TRANSPORTS.register("mooncake", _MOONCAKE_THREAT)(MooncakeTransport)


def _refuse_sealed(_: bytes) -> KVTransport:
    raise ConfigError(
        "kv_transfer sealed is between engines of a sealed node, which get descriptors for it; set it to shm",
        param="kv_transfer",
    )


KV_TRANSPORTS.register(SEALED, _SEALED_THREAT)(_refuse_sealed)


def parse_places(setting: str) -> list[tuple[str, str]]:
    """Returns the transports that a setting or an endpoint names, each with the part after the colon: where it listens."""
    parts = (part.partition(":") for part in setting.split(","))
    return [(name, where) for name, _, where in parts]


def lacks_address(setting: str) -> bool:
    """Whether a setting leaves out an address, for the machine on which an engine will run. Raises ConfigError if one is
    invalid."""
    return any(name == "tls" and (not where or not _split(where)[0]) for name, where in parse_places(setting))


def fill_address(setting: str, address: str) -> str:
    """Returns a setting with the address of its engine's machine filled in wherever it leaves one out."""
    own = f"tls://{_bracketed(address)}:0"
    return ",".join(own if part == "tls" else part for part in setting.split(","))


def has_fixed_port(setting: str) -> bool:
    """Whether a setting names a port, which only one engine could have. Raises ConfigError as `lacks_address`."""
    return any(name == "tls" and where and _split(where)[1] != 0 for name, where in parse_places(setting))
