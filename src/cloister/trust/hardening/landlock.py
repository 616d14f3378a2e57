"""Measure `landlock`: the files and TCP ports that this process can reach (landlock(7)).

Access without a rule is refused, in this thread and all threads that it starts, so apply it before there are others.
"""

from __future__ import annotations

import ctypes
import os
import site
import stat
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from cloister.trust.hardening import kernel
from cloister.trust.hardening.kernel import INTERFACES
from cloister.trust.hardening.measure import Missing, Needs

CREATE_RULESET_VERSION: Final = 1
RULE_PATH_BENEATH: Final = 1
RULE_NET_PORT: Final = 2

EXECUTE: Final = 1 << 0
WRITE_FILE: Final = 1 << 1
READ_FILE: Final = 1 << 2
READ_DIR: Final = 1 << 3
REMOVE_DIR: Final = 1 << 4
REMOVE_FILE: Final = 1 << 5
MAKE_DIR: Final = 1 << 7
MAKE_REG: Final = 1 << 8
REFER: Final = 1 << 13
TRUNCATE: Final = 1 << 14
IOCTL_DEV: Final = 1 << 15
FILE_RIGHTS: Final = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
"""Rights that a rule on a file, not a directory, may grant."""

ALL_BY_VERSION: Final = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""File access rights that each version of the interface can restrict."""
BIND_TCP: Final = 1 << 0
CONNECT_TCP: Final = 1 << 1
NETWORK_SINCE: Final = 4
SCOPE_ABSTRACT_UNIX: Final = 1 << 0
SCOPE_SIGNAL: Final = 1 << 1
SCOPES_SINCE: Final = 6

READING: Final = READ_FILE | READ_DIR
WRITING: Final = READING | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | REFER | TRUNCATE
DEVICE: Final = READ_FILE | WRITE_FILE | IOCTL_DEV

LIBRARIES: Final = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib")
KERNEL_FACTS: Final = (
    *("/proc/self", "/proc/meminfo", "/proc/cpuinfo", "/proc/stat", "/proc/swaps", "/proc/filesystems", "/proc/loadavg"),
    *("/proc/sys/kernel", "/proc/sys/vm", "/proc/sys/net/core/somaxconn", "/proc/driver/nvidia"),
    *("/sys/devices/system", "/sys/fs/cgroup", "/sys/kernel/mm/transparent_hugepage"),
)
SYSTEM_FACTS: Final = (
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/timezone", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/mime.types"),
    *("/usr/share/zoneinfo", "/usr/lib/locale", "/usr/share/locale", "/etc/gai.conf"),
)
DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
REMEDY: Final = "run on Linux 5.13 or newer with CONFIG_SECURITY_LANDLOCK, and `landlock` in the lsm= list of the kernel"


class _Ruleset(ctypes.Structure):
    """struct landlock_ruleset_attr."""

    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    """struct landlock_path_beneath_attr."""

    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


class _PortRule(ctypes.Structure):
    """struct landlock_net_port_attr."""

    _fields_ = (("allowed", ctypes.c_uint64), ("port", ctypes.c_uint64))


class Landlock:
    name = "landlock"
    stops = "reading files that it does not need, writing anywhere but to named directories, TCP ports but named ones"

    def apply(self, needs: Needs) -> str:
        if len(os.listdir("/proc/self/task")) > 1:
            raise Missing("there are threads already, which rules would not hold for", "start the node by its launcher")
        version = self._version()
        handled = _handled(version)
        with_network = version >= NETWORK_SINCE
        ruleset = _Ruleset(
            handled,
            BIND_TCP | CONNECT_TCP if with_network else 0,
            SCOPE_ABSTRACT_UNIX if version >= SCOPES_SINCE else 0,
        )
        size = 24 if version >= SCOPES_SINCE else 16 if with_network else 8
        descriptor = _call("landlock_create_ruleset", ruleset, size, 0)
        try:
            for path, rights in file_rights(needs):
                _allow_path(descriptor, path, rights & handled)
            if with_network:
                _allow_ports(descriptor, needs)
            _call("landlock_restrict_self", descriptor, 0)
        except OSError as error:
            raise Missing(f"the kernel did not take it ({error.strerror})", REMEDY) from None
        finally:
            os.close(descriptor)
        return f"version {version}; writes to {len(needs.write)} directories; {_describe_network(needs, with_network)}"

    def probe(self) -> str:
        version = self._version()
        network = "files and TCP ports" if version >= NETWORK_SINCE else "files; TCP rules need Linux 6.7"
        return f"version {version}: {network}"

    def _version(self) -> int:
        try:
            return _call("landlock_create_ruleset", None, 0, CREATE_RULESET_VERSION)
        except OSError as error:
            raise Missing(f"the kernel has no Landlock ({error.strerror})", REMEDY) from None


def confine_signals() -> bool:
    """Prevents this process and its children from signalling others; returns False on Linux before 6.12.

    Called in a fresh fork, so that each has its own domain: a captured process cannot end or stop another.
    """
    try:
        if _call("landlock_create_ruleset", None, 0, CREATE_RULESET_VERSION) < SCOPES_SINCE:
            return False
        descriptor = _call("landlock_create_ruleset", _Ruleset(0, 0, SCOPE_SIGNAL), 24, 0)
    except OSError:
        return False
    try:
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)  # without it only the host's root may restrict itself
        _call("landlock_restrict_self", descriptor, 0)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def file_rights(needs: Needs) -> Iterator[tuple[str, int]]:
    """Yields every accessible path with its rights."""
    yield from ((path, READING) for path in (*code_paths(), *LIBRARIES, *KERNEL_FACTS, *SYSTEM_FACTS, *needs.read))
    yield from ((path, DEVICE) for path in (*DEVICES, *sorted(str(path) for path in Path("/dev").glob("nvidia*"))))
    yield from ((path, WRITING) for path in needs.write)
    if needs.fork:
        yield ("/proc", READING)  # each child process reads its own directory there


def code_paths() -> tuple[str, ...]:
    """Paths of the interpreter, its libraries and all importable packages."""
    prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)
    version = f"/etc/python{sys.version_info.major}.{sys.version_info.minor}"  # where Debian's library links a module to
    paths = (
        *prefixes,
        *sys.path,
        *site.getsitepackages(),
        *sysconfig.get_paths().values(),
        str(Path(__file__).parents[3]),
        version,
    )
    return tuple(dict.fromkeys(path for path in paths if path))


def _allow_path(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # a missing path needs no rule
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= FILE_RIGHTS
        _call("landlock_add_rule", ruleset, RULE_PATH_BENEATH, _PathRule(rights, descriptor), 0)
    finally:
        os.close(descriptor)


def _allow_ports(ruleset: int, needs: Needs) -> None:
    rights: dict[int, int] = {}
    for ports, right in ((needs.listen, BIND_TCP), (needs.connect, CONNECT_TCP)):
        for port in ports:
            rights[port] = rights.get(port, 0) | right
    for port, allowed in rights.items():
        _call("landlock_add_rule", ruleset, RULE_NET_PORT, _PortRule(allowed, port), 0)


def _handled(version: int) -> int:
    return ALL_BY_VERSION[max(known for known in ALL_BY_VERSION if known <= version)]


def _describe_network(needs: Needs, with_network: bool) -> str:
    if not with_network:
        return "no rules for TCP ports"
    return f"TCP: listens on {_list(needs.listen)}, calls {_list(needs.connect)}"


def _list(ports: Iterable[int]) -> str:
    return ", ".join(str(port) if port else "any port" for port in ports) or "none"


def _call(name: str, *arguments: int | ctypes.Structure | None) -> int:
    return kernel.call(INTERFACES[kernel.machine()].numbers[name], *arguments)
