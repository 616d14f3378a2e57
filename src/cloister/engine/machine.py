"""CPU and memory limits of this process, from the cgroup and the process, not the host.

Reads /proc and /sys (cgroups 1 and 2); the only code that does. Formats: Linux Documentation/admin-guide/cgroup-v2.rst,
cgroup-v1/memory.rst and scheduler/sched-bwc.rst.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED_BYTES = 2**60


@dataclass(frozen=True, slots=True)
class Machine:
    """CPU and memory that this process may use.

    Attributes:
        num_cpus: CPUs of the affinity mask, or of the cgroup's quota if that is fewer; a whole number, at least 1.
        memory_bytes: the smallest of the host's memory, the cgroup's limit and that of the process's address space.
        available_bytes: memory available now, including file cache that the kernel can drop.
        limited_by: "host", "cgroup" or "ulimit -v", whichever sets `available_bytes`.
    """

    num_cpus: int
    memory_bytes: int
    available_bytes: int
    limited_by: str


def read_machine(root: Path = Path("/"), num_affine_cpus: int | None = None, address_space_bytes: int | None = None) -> Machine:
    """Reads the limits of this process.

    Args:
        root: directory that contains `proc` and `sys`.
        num_affine_cpus: CPUs of the affinity mask; None asks the system.
        address_space_bytes: limit of this process's address space (RLIMIT_AS); None asks the system.
    """
    total, available = _host_memory(root)
    limits = [limit for group in _groups(root, "memory") if (limit := _memory_limit(group)) is not None]
    quotas = [quota for group in _groups(root, "cpu") if (quota := _cpu_quota(group)) is not None]
    num_cpus = num_affine_cpus if num_affine_cpus is not None else _affine_cpus()
    address_space = address_space_bytes if address_space_bytes is not None else _address_space_limit()
    room = {
        "host": available,
        "cgroup": min((max(0, limit - used) for limit, used in limits), default=_UNLIMITED_BYTES),
        "ulimit -v": max(0, address_space - _statm_bytes(root / "proc/self/statm", 0)),
    }
    limited_by = min(room, key=lambda name: room[name])  # the first of equal ones
    return Machine(
        # a fraction of a CPU is rounded down: a thread more than the quota is throttled and stalls the others
        num_cpus=max(1, min([num_cpus, *(math.floor(quota) for quota in quotas)])),
        memory_bytes=min([total, address_space, *(limit for limit, _ in limits)]),
        available_bytes=room[limited_by],
        limited_by=limited_by,
    )


def process_age_s() -> float:
    """Returns the age of this process, including the time before its own code ran."""
    fields = _stat_fields(None)
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)


def resident_bytes(pid: int | None = None) -> int:
    """Returns the resident memory of a process (default: this one), including mapped files; 0 if the process does not exist."""
    return _statm_bytes(Path("/proc", _process(pid), "statm"), 1)


def cpu_seconds(pid: int | None = None) -> float | None:
    """Returns the CPU time of a process (default: this one), user and system together; None if the process does not exist."""
    try:
        fields = _stat_fields(pid)
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pause_gc() -> None:
    """Has nothing searched for garbage until `freeze_gc_heap`: a start leaves hardly any, and searches take a quarter of it."""
    gc.disable()


def freeze_gc_heap(*, thaw: bool = False, searches: bool = True) -> None:
    """Exempts everything that is in use from garbage collection, which stops the process for 0.1 s and writes to shared pages.

    Args:
        thaw: whether what was frozen before may be garbage by now; otherwise it is not searched again.
        searches: whether to free garbage first, which would otherwise stay frozen forever. Imports leave about a thousand
            objects.
    """
    if thaw:
        gc.unfreeze()
    if searches:
        gc.collect()
    gc.freeze()
    gc.enable()


def return_free_memory() -> None:
    """Returns freed heap memory to the system if the C library supports it (malloc_trim(3)).

    Reading a tokenizer of 150,000 entries leaves 50 MiB of freed memory.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _statm_bytes(path: Path, field: int) -> int:
    """Returns a field of /proc/PID/statm (proc(5): 0 the address space, 1 resident pages); 0 if there is none."""
    try:
        return int(path.read_text().split()[field]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _address_space_limit() -> int:
    """Bytes that this process may map (setrlimit(2), RLIMIT_AS)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return _UNLIMITED_BYTES if limit == resource.RLIM_INFINITY else limit


def _stat_fields(pid: int | None) -> list[str]:
    """The fields of /proc/PID/stat (proc(5)) from the third: utime is [11], stime [12], starttime [19], in ticks."""
    stat = Path("/proc", _process(pid), "stat").read_text()
    return stat.rpartition(")")[2].split()  # the second field, in parentheses, may contain blanks


def _process(pid: int | None) -> str:
    return "self" if pid is None else str(pid)


def _affine_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _host_memory(root: Path) -> tuple[int, int]:
    """Total and available bytes of the host."""
    lines = (_read(root / "proc/meminfo") or "").splitlines()
    figures = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    if "MemTotal" not in figures:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    return figures["MemTotal"], figures.get("MemAvailable", figures["MemTotal"])


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Every directory whose limits of `controller` apply to this process: its cgroup and all ancestors."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controllers
            mount = mount if mount.exists() else root / "sys/fs/cgroup" / controller
        else:
            continue
        # inside a container the path may be the host's; then only the mount's own files exist, and _read skips the rest
        group = mount / path.strip("/")
        yield group
        while group != mount:
            group = group.parent
            yield group


def _memory_limit(group: Path) -> tuple[int, int] | None:
    """(limit, use without droppable file cache) in bytes; None if there is no limit."""
    for limit_name, usage_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _read(group / limit_name)
        if limit is None or limit == "max" or int(limit) >= _UNLIMITED_BYTES:
            continue
        stat = dict(line.split() for line in (_read(group / "memory.stat") or "").splitlines())
        return int(limit), max(0, int(_read(group / usage_name) or 0) - int(stat.get(cache_name, 0)))
    return None


def _cpu_quota(group: Path) -> float | None:
    """CPUs that the group may use at once; None if there is no quota."""
    if (both := _read(group / "cpu.max")) is not None:
        quota, period = both.split()
    else:
        quota = _read(group / "cpu.cfs_quota_us") or "-1"
        period = _read(group / "cpu.cfs_period_us") or "100000"
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
