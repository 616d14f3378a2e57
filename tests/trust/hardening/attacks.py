"""What root of a container tries on a process that holds a secret. Prints what became of each attack, as JSON.

An attack returns what it got hold of; one that fails raises. Arguments: process, address, size and descriptor of the secret.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from cloister.trust.hardening import kernel
from cloister.trust.hardening.kernel import INTERFACES

NUMBERS = INTERFACES[kernel.machine()].numbers
TOOL_TIMEOUT_S = 300
PTRACE_PEEKDATA, PTRACE_ATTACH, PTRACE_DETACH, PTRACE_SEIZE = 2, 16, 17, 0x4206
WALL = 0x40000000
KCMP_VM = 1
BPF_PROG_LOAD, BPF_PROG_TYPE_KPROBE = 5, 2
MADV_COLD = 20
TRACE_DIRECTORIES = ("/sys/kernel/tracing", "/sys/kernel/debug/tracing")


class NotThere(Exception):
    """This machine has not what the attack needs."""


class Target:
    def __init__(self, pid: int, address: int, size: int, descriptor: int) -> None:
        self.pid, self.address, self.size, self.descriptor = pid, address, size, descriptor

    def path(self, name: str) -> str:
        return f"/proc/{self.pid}/{name}"


class Vector(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


def attach_with_ptrace(target: Target) -> bytes:
    return _peek(target, PTRACE_ATTACH)


def seize_with_ptrace(target: Target) -> bytes:
    return _peek(target, PTRACE_SEIZE)


def read_proc_mem(target: Target) -> bytes:
    with open(target.path("mem"), "rb", buffering=0) as memory:
        memory.seek(target.address)
        return memory.read(target.size)


def write_proc_mem(target: Target) -> bytes:
    old = read_proc_mem(target)
    with open(target.path("mem"), "r+b", buffering=0) as memory:
        memory.seek(target.address)
        memory.write(old)
    return old


def read_with_process_vm(target: Target) -> bytes:
    buffer = ctypes.create_string_buffer(target.size)
    _process_vm("process_vm_readv", target, buffer)
    return buffer.raw


def write_with_process_vm(target: Target) -> bytes:
    buffer = ctypes.create_string_buffer(target.size)
    _process_vm("process_vm_readv", target, buffer)
    _process_vm("process_vm_writev", target, buffer)
    return buffer.raw


def attach_gdb(target: Target) -> bytes:
    """What py-spy, strace and every debugger do begins like this."""
    command = ["-p", str(target.pid), "-batch", "-nx", "-ex", f"x/{target.size}xb {target.address}"]
    shown = _run_tool("gdb", *command)
    if "Operation not permitted" in shown or "ptrace:" in shown:
        raise PermissionError(errno.EPERM, "gdb: ptrace: Operation not permitted")
    found = b"".join(bytes(int(byte, 16) for byte in re.findall(r"\t0x([0-9a-f]{2})", line)) for line in shown.splitlines())
    return found or _fail("gdb read nothing")


def attach_strace(target: Target) -> str:
    tool = shutil.which("strace") or _lacking("strace")
    tracer = subprocess.Popen([tool, "-p", str(target.pid)], stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    said = tracer.stderr.readline()
    tracer.send_signal(signal.SIGINT)
    tracer.communicate(timeout=TOOL_TIMEOUT_S)
    return said if "attached" in said else _fail(said.strip())


def dump_with_gcore(target: Target) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        said = _run_tool("gcore", "-o", f"{directory}/core", str(target.pid))
        cores = list(Path(directory).iterdir())
        return cores[0].read_bytes() if cores else _fail(f"gcore wrote no core: {said.strip()[:100]}")


def read_environment(target: Target) -> bytes:
    return Path(target.path("environ")).read_bytes() or _fail("nothing to read")


def read_maps(target: Target) -> str:
    return Path(target.path("maps")).read_text() or _fail("nothing to read")


def read_smaps(target: Target) -> str:
    return Path(target.path("smaps")).read_text() or _fail("nothing to read")


def read_auxiliary_vector(target: Target) -> bytes:
    return Path(target.path("auxv")).read_bytes() or _fail("nothing to read")


def read_registers(target: Target) -> str:
    return Path(target.path("syscall")).read_text() or _fail("nothing to read")


def open_mapped_files(target: Target) -> str:
    return os.readlink(f"{target.path('map_files')}/{os.listdir(target.path('map_files'))[0]}")


def open_descriptor(target: Target) -> bytes:
    with open(target.path(f"fd/{target.descriptor}"), "rb", buffering=0) as pipe:
        return _put_back(pipe.fileno(), target)


def take_descriptor(target: Target) -> bytes:
    handle = os.pidfd_open(target.pid)
    try:
        taken = kernel.call(NUMBERS["pidfd_getfd"], handle, target.descriptor, 0)
    finally:
        os.close(handle)
    return _put_back(taken, target)


def enter_root_directory(target: Target) -> list[str]:
    return os.listdir(target.path("root"))


def enter_working_directory(target: Target) -> list[str]:
    return os.listdir(target.path("cwd"))


def find_program(target: Target) -> str:
    return os.readlink(target.path("exe"))


def enter_namespace(target: Target) -> str:
    with open(target.path("ns/mnt"), "rb") as namespace:
        return str(namespace.fileno())


def compare_memory(target: Target) -> int:
    return kernel.call(NUMBERS["kcmp"], os.getpid(), target.pid, KCMP_VM, 0, 0)


def count_with_perf(target: Target) -> int:
    attributes = ctypes.create_string_buffer(128)
    struct.pack_into("=IIQ", attributes, 0, 1, 128, 0)  # PERF_TYPE_SOFTWARE, PERF_COUNT_SW_CPU_CLOCK
    struct.pack_into("=Q", attributes, 40, 1 << 5 | 1 << 6)  # exclude_kernel, exclude_hv
    return kernel.call(NUMBERS["perf_event_open"], attributes, target.pid, -1, -1, 0)


def record_with_perf(target: Target) -> str:
    with tempfile.TemporaryDirectory() as directory:
        said = _run_tool("perf", "record", "-o", f"{directory}/data", "-p", str(target.pid), "--", "sleep", "0.1")
        if "[ perf record: Captured" not in said:
            _fail(said.strip().splitlines()[-1] if said.strip() else "perf recorded nothing")
        return said


def load_bpf(target: Target) -> int:
    """A program for kprobes that returns 0: where it can be loaded, others read any memory with bpf_probe_read."""
    code = struct.pack("=BBhi", 0xB7, 0, 0, 0) + struct.pack("=BBhi", 0x95, 0, 0, 0)
    instructions, licence = ctypes.create_string_buffer(code), ctypes.create_string_buffer(b"GPL")
    attributes = ctypes.create_string_buffer(128)
    addresses = (ctypes.addressof(instructions), ctypes.addressof(licence))
    struct.pack_into("=IIQQ", attributes, 0, BPF_PROG_TYPE_KPROBE, 2, *addresses)
    return kernel.call(NUMBERS["bpf"], BPF_PROG_LOAD, attributes, 128)


def advise_memory(target: Target) -> int:
    handle = os.pidfd_open(target.pid)
    page = target.address & ~0xFFF
    try:
        return kernel.call(NUMBERS["process_madvise"], handle, Vector(page, 4096), 1, MADV_COLD, 0)
    finally:
        os.close(handle)


def probe_user_space(target: Target) -> str:
    """A uprobe reads arguments from any program's memory; it needs the tracing files, which SYS_ADMIN mounts."""
    for directory in TRACE_DIRECTORIES:
        events = Path(directory) / "uprobe_events"
        if events.exists():
            events.write_text("")
            return str(events)
    subprocess.run(["mount", "-t", "tracefs", "tracefs", TRACE_DIRECTORIES[0]], check=True, capture_output=True)
    subprocess.run(["umount", TRACE_DIRECTORIES[0]], check=False, capture_output=True)
    return "mounted"


def read_physical_memory(target: Target) -> str:
    for path in ("/proc/kcore", "/dev/mem"):
        if Path(path).exists():
            with open(path, "rb", buffering=0) as memory:
                return f"{path} {len(memory.read(4096))} bytes"
    raise NotThere("there is no /proc/kcore and no /dev/mem")


READING: dict[str, Callable[[Target], object]] = {
    attack.__name__: attack
    for attack in (
        *(attach_with_ptrace, seize_with_ptrace, read_proc_mem, write_proc_mem, read_with_process_vm, write_with_process_vm),
        *(attach_gdb, attach_strace, dump_with_gcore, read_environment, read_maps, read_smaps, read_auxiliary_vector),
        *(read_registers, open_mapped_files, open_descriptor, take_descriptor, enter_root_directory, enter_working_directory),
        *(find_program, enter_namespace, compare_memory, count_with_perf, record_with_perf, load_bpf, advise_memory),
        *(probe_user_space, read_physical_memory),
    )
}


def main(pid: int, address: int, size: int, descriptor: int, secret: bytes) -> dict[str, dict[str, object]]:
    target = Target(pid, address, size, descriptor)
    return {name: _try(attack, target, secret) for name, attack in READING.items()}


def _try(attack: Callable[[Target], object], target: Target, secret: bytes) -> dict[str, object]:
    try:
        got = attack(target)
    except NotThere as error:
        return {"outcome": "not there", "why": str(error)}
    except (OSError, subprocess.SubprocessError, AssertionError) as error:
        return {"outcome": "failed", "why": str(error)[:200]}
    return {"outcome": "succeeded", "has_secret": isinstance(got, bytes) and secret in got}


def _peek(target: Target, request: int) -> bytes:
    kernel.call(NUMBERS["ptrace"], request, target.pid, 0, 0)
    try:
        if request == PTRACE_SEIZE:
            kernel.call(NUMBERS["ptrace"], 0x4207, target.pid, 0, 0)  # PTRACE_INTERRUPT
        os.waitpid(target.pid, WALL)
        words = []
        for offset in range(0, target.size, 8):
            word = ctypes.c_long()
            kernel.call(NUMBERS["ptrace"], PTRACE_PEEKDATA, target.pid, target.address + offset, ctypes.addressof(word))
            words.append(struct.pack("=q", word.value))
        return b"".join(words)
    finally:
        kernel.call(NUMBERS["ptrace"], PTRACE_DETACH, target.pid, 0, 0)


def _process_vm(name: str, target: Target, buffer: ctypes.Array[ctypes.c_char]) -> None:
    local = Vector(ctypes.addressof(buffer), target.size)
    remote = Vector(target.address, target.size)
    kernel.call(NUMBERS[name], target.pid, local, 1, remote, 1, 0)


def _put_back(descriptor: int, target: Target) -> bytes:
    """Reads what is in a pipe, and leaves it there for the next attack."""
    content = os.read(descriptor, target.size)
    with open(f"/proc/{target.pid}/fd/{target.descriptor + 1}", "wb", buffering=0) as back:
        back.write(content)
    return content


def _run_tool(name: str, *arguments: str) -> str:
    tool = shutil.which(name) or _lacking(name)
    done = subprocess.run(
        [tool, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False
    )
    return done.stdout + done.stderr


def _lacking(name: str) -> str:
    raise NotThere(f"{name} is not installed")


def _fail(why: str) -> bytes:
    raise AssertionError(why)


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:5]]
    print(json.dumps(main(*numbers, bytes.fromhex(sys.argv[5]))))
