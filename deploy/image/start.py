"""Starts the sealed node of an image, in the place of this program: the network, what only this machine has, then `serve`.

What is equal for all nodes is in the image and measured. What only this machine has comes from its second disk, a JSON
document that the host wrote and nobody measures: so it is read as a stranger's, and each field can only name what clients
check themselves or what withholds service. docs/image.md says of each why.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import ipaddress
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

DISK = Path("/dev/vdb")
MAX_BYTES = 32 * 2**20
MAX_CAPACITY = 1_000_000
RUN = Path("/run/cloister")
INTERFACE = "eth0"
PORT = 8000
ATTESTERS = ("software", "sev-snp", "tdx")
FIELDS = {"address", "router", "attester", "capacity", "files"}
FILES = {
    "release.json": ("release", "."),
    "manifest.json": (None, "."),
    "checkpoint": ("log-checkpoint", "checkpoint"),
    "member.key": ("member-key", "member.key"),
    "gateway.secret": ("gateway-secret", "gateway.secret"),
    "intel-collateral.json": ("intel-collateral", "intel-collateral.json"),
    "amd/vcek": ("amd-certificates", "amd"),
    "amd/ask": (None, "amd"),
    "amd/ark": (None, "amd"),
    "amd/crl": (None, "amd"),
}
"""Files that the disk may bring: the option of `serve` that each belongs to, and what that option names below RUN."""
REFRESHED = ("checkpoint", "intel-collateral.json", "amd/crl")
REFRESH_S = 60.0
SERVE = ("serve", "--sealed", "--profile", "private", "--model", "cloister-5m", "--port", str(PORT))
_SIOCADDRT, _SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x890B, 0x8914, 0x8916, 0x891C
_IFF_UP, _RTF_UP_GATEWAY = 0x1, 0x3


class ConfigurationError(Exception):
    """The second disk is not as it should be; the message says what to change."""


@dataclass(frozen=True)
class Configuration:
    """What only this machine has.

    Attributes:
        address: of the node, with the length of its network's prefix.
        router: towards other networks; None without any.
        attester: who vouches for the node.
        capacity: the node's share when clients draw.
        files: base64 by name.
    """

    address: ipaddress.IPv4Interface
    router: ipaddress.IPv4Address | None
    attester: str
    capacity: int
    files: dict[str, str]


def read_configuration(data: bytes) -> Configuration:
    """Reads the document.

    Args:
        data: JSON, and zeros behind it up to the end of the disk.

    Raises:
        ConfigurationError: it is none, or has a field that is not known or not of its kind.
    """
    try:
        given = json.loads(data.rstrip(b"\0").decode())
    except (ValueError, RecursionError):
        raise ConfigurationError("the second disk has no JSON document") from None
    if not isinstance(given, dict) or not set(given) <= FIELDS:
        raise ConfigurationError(f"the second disk's document has the fields {', '.join(sorted(FIELDS))} and no others")
    files, attester, capacity = given.get("files", {}), given.get("attester", "software"), given.get("capacity", 1)
    if not isinstance(files, dict) or not set(files) <= set(FILES) or not all(isinstance(one, str) for one in files.values()):
        raise ConfigurationError(f"the second disk's files are base64 by name, and no others than {', '.join(FILES)}")
    if attester not in ATTESTERS:
        raise ConfigurationError(f"the attester is one of {', '.join(ATTESTERS)}")
    if type(capacity) is not int or not 1 <= capacity <= MAX_CAPACITY:
        raise ConfigurationError(f"the capacity is a number from 1 to {MAX_CAPACITY}")
    try:
        address = ipaddress.IPv4Interface(str(given.get("address")))
        router = ipaddress.IPv4Address(str(given["router"])) if "router" in given else None
    except ValueError:
        raise ConfigurationError("the address is one like 10.0.0.5/24, and the router one like 10.0.0.1") from None
    return Configuration(address, router, attester, capacity, files)


def write_files(files: dict[str, str], folder: Path) -> list[str]:
    """Writes the disk's files, readable by the node alone, and returns the options of `serve` that name them.

    Raises:
        ConfigurationError: one is not base64.
    """
    options = []
    for name, encoded in files.items():
        content, path = _decode(name, encoded), folder / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_bytes(content)
        path.chmod(0o600)
        option, place = FILES[name]
        if option is not None:
            options += [f"--{option}", str(folder / place)]
    return options


def refresh(data: bytes, folder: Path) -> list[str]:
    """Writes those files anew that go out of date, if the disk has others than before; returns their names.

    Raises:
        ConfigurationError: the disk is not as it should be.
    """
    changed = []
    for name, encoded in read_configuration(data).files.items():
        content, path = _decode(name, encoded), folder / name
        if name in REFRESHED and path.exists() and path.read_bytes() != content:
            path.with_suffix(".new").write_bytes(content)
            path.with_suffix(".new").replace(path)
            changed.append(name)
    return changed


def refresh_forever(interval_s: float = REFRESH_S) -> NoReturn:
    """Looks at the disk again and again, without a capability. A host that spoils it only lets the node's evidence grow old."""
    from cloister.trust.hardening.measure import Needs
    from cloister.trust.hardening.privileges import Capabilities, NoNewPrivileges

    NoNewPrivileges().apply(Needs("refresher"))
    Capabilities().apply(Needs("refresher"))
    while True:
        time.sleep(interval_s)
        with contextlib.suppress(ConfigurationError, OSError):
            refresh(read_disk(), RUN)


def read_disk() -> bytes:
    """Returns what the disk has now: once nobody has it open, the kernel keeps nothing of it."""
    with DISK.open("rb") as disk:
        return disk.read(MAX_BYTES)


def set_up_network(given: Configuration, control: Callable[[int, bytes], object]) -> None:
    """Gives loopback and the first interface their addresses, and the way to everybody else.

    Args:
        given: address and router.
        control: does an ioctl on a socket (netdevice(7), `struct ifreq`; route(7), `struct rtentry`).
    """
    name = INTERFACE.encode()
    control(_SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))
    control(_SIOCSIFADDR, struct.pack("16s16s", name, _socket_address(given.address.ip)))
    control(_SIOCSIFNETMASK, struct.pack("16s16s", name, _socket_address(given.address.netmask)))
    control(_SIOCSIFFLAGS, struct.pack("16sH14x", name, _IFF_UP))
    if given.router is not None:
        anywhere, router = _socket_address(ipaddress.IPv4Address(0)), _socket_address(given.router)
        control(_SIOCADDRT, struct.pack("8x16s16s16sH62x", anywhere, router, anywhere, _RTF_UP_GATEWAY))


def make_command(given: Configuration, options: list[str]) -> list[str]:
    """Returns the program that this one becomes; `options` are those of `write_files`."""
    own = ["--host", str(given.address.ip), "--attester", given.attester, "--node-capacity", str(given.capacity)]
    return [sys.executable, "-I", "-B", "-m", "cloister.cli", *SERVE, *own, *options]


def _decode(name: str, encoded: str) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError:
        raise ConfigurationError(f"the file {name} is not base64") from None


def _socket_address(address: ipaddress.IPv4Address) -> bytes:
    return struct.pack("=HH4s8x", socket.AF_INET, 0, address.packed)


def leave_behind(work: Callable[[], NoReturn]) -> None:
    """Does `work` in a process of which PID 1 is the parent: this one becomes the node, which has no children but its own."""
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            work()
        os._exit(0)
    os.waitpid(child, 0)


def main() -> NoReturn:
    """Reads the disk, sets up the network, and becomes the node."""
    os.umask(0o077)
    given = read_configuration(read_disk())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as network:
        set_up_network(given, lambda request, data: fcntl.ioctl(network, request, data))
    RUN.mkdir(mode=0o700)
    command = make_command(given, write_files(given.files, RUN))
    leave_behind(refresh_forever)
    os.execv(command[0], command)


if __name__ == "__main__":
    try:
        main()
    except (ConfigurationError, OSError) as error:
        sys.exit(f"node: {error}")
