"""Measure `seccomp`: system-call filters as data, compiled to BPF and installed on every thread (seccomp(2))."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from cloister.trust.hardening import kernel
from cloister.trust.hardening.kernel import INTERFACES, Interface
from cloister.trust.hardening.measure import Missing, Needs

# Filter rules as data: a system call, its arguments, and the error it gets. Pure.
#
# It is a deny list. An allow list would be stricter, but would break requests whenever a new C library or driver makes a new
# call.


AF_UNIX: Final = 1
AF_INET: Final = 2
AF_INET6: Final = 10
SOCK_STREAM: Final = 1
SOCK_KIND: Final = 0xF
MSG_FASTOPEN: Final = 0x20000000
CLONE_THREAD: Final = 0x00010000
CLONE_NAMESPACES: Final = 0x7E020000  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}
PROT_EXEC: Final = 0x4
RLIMIT_CORE: Final = 4
PR_SET_DUMPABLE: Final = 4
PR_SET_MM: Final = 35
PR_SET_PTRACER: Final = 0x59616D61
TIOCSTI: Final = 0x5412
TIOCLINUX: Final = 0x541C
O_WRITING: Final = 0o1 | 0o2 | 0o100 | 0o1000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC

ALWAYS: Final = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "process_mrelease", "kcmp", "pidfd_getfd"),
    *("execve", "execveat", "uselib"),
    *("perf_event_open", "bpf", "userfaultfd", "memfd_secret", "lookup_dcookie"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register"),
    *("kexec_load", "kexec_file_load", "create_module", "init_module", "finit_module", "delete_module", "reboot"),
    *("keyctl", "add_key", "request_key"),
    *("mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "open_tree_attr", "fsopen", "fsconfig"),
    *("fsmount", "fspick", "mount_setattr", "unshare", "setns", "swapon", "swapoff", "quotactl", "quotactl_fd", "acct"),
    *("name_to_handle_at", "open_by_handle_at", "fanotify_init", "fanotify_mark"),
    *("syslog", "iopl", "ioperm", "modify_ldt", "personality", "settimeofday", "clock_settime", "remap_file_pages"),
    *("shmget", "shmat", "semget", "msgget"),
)
"""Refused in every process of a sealed node, whatever the arguments."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A test of one argument: (its low, or high, 32 bits & mask) is `value`, or is not."""

    argument: int
    value: int
    equal: bool = True
    mask: int = 0xFFFFFFFF
    high: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """A system call that is refused if all conditions are true."""

    name: str
    conditions: tuple[Condition, ...] = ()
    error: int = errno.EPERM


def rules(needs: Needs) -> Iterator[Rule]:
    """Yields the rules that apply from the start of a process."""
    yield from (Rule(name) for name in ALWAYS)
    # C libraries fall back to clone(2), whose flags a filter can see; those of clone3 are behind a pointer
    yield Rule("clone3", error=errno.ENOSYS)
    yield Rule("clone", (_any_of(0, CLONE_NAMESPACES),))
    if not needs.fork:
        yield from (Rule("fork"), Rule("vfork"), Rule("clone", (Condition(0, 0, mask=CLONE_THREAD),)))
    yield Rule("prctl", (Condition(0, PR_SET_DUMPABLE), Condition(1, 1)))
    yield Rule("prctl", (Condition(0, PR_SET_PTRACER),))
    yield Rule("prctl", (Condition(0, PR_SET_MM),))
    yield Rule("setrlimit", (Condition(0, RLIMIT_CORE),))
    for high in (False, True):  # a limit is passed, so it is set, not only read
        yield Rule("prlimit64", (Condition(1, RLIMIT_CORE), Condition(2, 0, equal=False, high=high)))
    yield from (Rule("ioctl", (Condition(1, request),)) for request in (TIOCSTI, TIOCLINUX))
    yield from _network_rules(needs)


def closing_rules(needs: Needs) -> Iterator[Rule]:
    """Yields the rules that apply once everything is loaded, before the first request.

    No further page can become executable, which excludes libraries, extension modules and generated code; no file is opened for
    writing unless `needs.write` permits it (Landlock restricts where); no socket is created.
    """
    yield Rule("mmap", (_any_of(2, PROT_EXEC),))
    yield Rule("mprotect", (_any_of(2, PROT_EXEC),))
    yield Rule("pkey_mprotect", (_any_of(2, PROT_EXEC),))
    if not needs.connect:
        yield Rule("socket")
    yield Rule("bind")
    if not needs.write:
        yield from closing_file_rules()


def closing_file_rules() -> Iterator[Rule]:
    """Yields the rules that prevent opening files for writing."""
    yield Rule("creat")
    yield Rule("openat2", error=errno.ENOSYS)  # its flags are behind a pointer; nothing here calls it
    yield Rule("open", (_any_of(1, O_WRITING),))
    yield Rule("openat", (_any_of(2, O_WRITING),))


def _network_rules(needs: Needs) -> Iterator[Rule]:
    """A filter cannot see addresses. So a process without peers cannot connect at all; datagrams (including DNS) are refused
    for all."""
    if not needs.connect:
        yield Rule("connect")
        # TCP fast open connects as it sends
        for name, flags in (("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3)):
            yield Rule(name, (_any_of(flags, MSG_FASTOPEN),))
    if not needs.listen and not needs.connect:
        yield Rule("socket")
        yield from (Rule(name) for name in ("bind", "listen"))
        return
    families = (AF_UNIX, AF_INET, AF_INET6)
    yield Rule("socket", tuple(Condition(0, family, equal=False) for family in families))
    yield Rule("socket", (Condition(1, SOCK_STREAM, equal=False, mask=SOCK_KIND),))


def _any_of(argument: int, bits: int) -> Condition:
    return Condition(argument, 0, equal=False, mask=bits)


# Compiles filter rules to classic BPF, which the kernel runs before every system call. Pure; bytes out.
#
# Sources: seccomp(2), include/uapi/linux/filter.h and bpf_common.h. A program is a chain of blocks, one per rule: load the
# number, skip the block if it is another call, test the arguments, return. The kernel caches which calls always pass, so the
# length of the chain does not slow them (seccomp action cache, Linux 5.11).


LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS: A = data[k]
AND: Final = 0x54  # BPF_ALU | BPF_AND | BPF_K: A &= k
JUMP_EQUAL: Final = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
JUMP_GREATER_EQUAL: Final = 0x35  # BPF_JMP | BPF_JGE | BPF_K
RETURN: Final = 0x06  # BPF_RET | BPF_K

ALLOW: Final = 0x7FFF0000
KILL_PROCESS: Final = 0x80000000
ERRNO: Final = 0x00050000

NUMBER_AT: Final = 0
ARCHITECTURE_AT: Final = 4
ARGUMENTS_AT: Final = 16
"""Offsets in struct seccomp_data; an argument has 8 bytes, low half first on supported machines."""

MOST_INSTRUCTIONS: Final = 4096
"""BPF_MAXINSNS: maximum program length."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: operation, jump if true, jump if false (both relative to the next one), operand."""

    code: int
    if_true: int
    if_false: int
    operand: int


def assemble(rules: Iterable[Rule], interface: Interface) -> list[Instruction]:
    """Returns the program of a filter: another architecture kills the process, rules refuse calls, all other calls pass.

    Rules for calls that this instruction set lacks are omitted.
    """
    program = [
        Instruction(LOAD, 0, 0, ARCHITECTURE_AT),
        Instruction(JUMP_EQUAL, 1, 0, interface.audit),
        Instruction(RETURN, 0, 0, KILL_PROCESS),
    ]
    if interface.foreign_from is not None:
        program += [
            Instruction(LOAD, 0, 0, NUMBER_AT),
            Instruction(JUMP_GREATER_EQUAL, 0, 1, interface.foreign_from),
            Instruction(RETURN, 0, 0, KILL_PROCESS),
        ]
    for rule in rules:
        if rule.name in interface.numbers:
            program += _block(rule, interface.numbers[rule.name])
    program.append(Instruction(RETURN, 0, 0, ALLOW))
    if len(program) > MOST_INSTRUCTIONS:
        raise ValueError(f"a filter of {len(program)} instructions; the kernel takes {MOST_INSTRUCTIONS}")
    return program


def pack(program: Iterable[Instruction]) -> bytes:
    """Returns a program as an array of struct sock_filter."""
    return b"".join(struct.pack("=HBBI", i.code, i.if_true, i.if_false, i.operand) for i in program)


def _block(rule: Rule, number: int) -> list[Instruction]:
    tests = [_test(condition) for condition in rule.conditions]
    body = [*(instruction for test in tests for instruction in test), Instruction(RETURN, 0, 0, ERRNO | rule.error)]
    block = [Instruction(LOAD, 0, 0, NUMBER_AT), Instruction(JUMP_EQUAL, 0, len(body), number), *body]
    for at, instruction in enumerate(block):
        if instruction.code == JUMP_EQUAL and at > 1:
            skip = len(block) - at - 1
            holds = instruction.if_true == 0
            block[at] = Instruction(JUMP_EQUAL, 0 if holds else skip, skip if holds else 0, instruction.operand)
    return block


def _test(condition: Condition) -> list[Instruction]:
    """Loads the argument and continues with the next instruction if the condition is true; `_block` fills in the
    other target."""
    at = ARGUMENTS_AT + 8 * condition.argument + (4 if condition.high else 0)
    masking = [] if condition.mask == 0xFFFFFFFF else [Instruction(AND, 0, 0, condition.mask)]
    jump = Instruction(JUMP_EQUAL, 0 if condition.equal else 1, 1 if condition.equal else 0, condition.value)
    return [Instruction(LOAD, 0, 0, at), *masking, jump]


SET_MODE_FILTER: Final = 1
GET_ACTION_AVAIL: Final = 2
FLAG_TSYNC: Final = 1
MODE_FILTER: Final = 2
UNWINDER: Final = "libgcc_s.so.1"
REMEDY: Final = "run on Linux 4.14 or newer with CONFIG_SECCOMP_FILTER, on x86_64 or aarch64"


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


class Seccomp:
    name = "seccomp"
    stops = "attaching to others, executing programs, tracing, loading into the kernel, calling out, being dumpable again"

    def apply(self, needs: Needs) -> str:
        return _describe(install(rules(needs)))

    def probe(self) -> str:
        interface = _interface()
        action = ctypes.c_uint32(KILL_PROCESS)
        try:
            kernel.call(interface.numbers["seccomp"], GET_ACTION_AVAIL, 0, bytes(action))
        except OSError as error:
            raise Missing(f"the kernel has no seccomp filters ({error.strerror})", REMEDY) from None
        return "filters can be set"


class Closing:
    """The second filter, applied once everything is loaded, before the first request."""

    name = "closed"
    stops = "new executable pages: libraries, extension modules, generated code; new sockets; files opened for writing"

    def apply(self, needs: Needs) -> str:
        with contextlib.suppress(OSError):
            ctypes.CDLL(UNWINDER)  # the C library loads it when the first thread ends or an exception propagates
        return _describe(install(closing_rules(needs)))

    def probe(self) -> str:
        return Seccomp().probe()


def install(refused: Iterable[Rule]) -> int:
    """Adds a filter to every thread of this process; returns its number of instructions.

    Raises:
        Missing: the kernel does not accept it, or a thread runs without it.
    """
    interface = _interface()
    program = assemble(refused, interface)
    packed = pack(program)
    try:
        stray = kernel.call(
            interface.numbers["seccomp"], SET_MODE_FILTER, FLAG_TSYNC, _Program(len(program), ctypes.c_char_p(packed))
        )
    except OSError as error:
        raise Missing(f"the kernel took no filter ({error.strerror})", REMEDY) from None
    if stray:
        raise Missing("a thread has a filter of its own and could not be given this one", "start the node by its launcher")
    _check_threads()
    return len(program)


def _check_threads() -> None:
    """Raises Missing unless the kernel reports every thread as filtered."""
    for thread in os.listdir("/proc/self/task"):
        status = kernel.read_text(f"/proc/self/task/{thread}/status")
        if status is not None and f"Seccomp:\t{MODE_FILTER}" not in status:
            raise Missing("a thread runs without the filter", "start the node by its launcher")


def _interface() -> Interface:
    machine = kernel.machine()
    if machine not in INTERFACES:
        raise Missing(f"there is no table of system calls for {machine}", REMEDY)
    return INTERFACES[machine]


def _describe(num_instructions: int) -> str:
    return f"{num_instructions} instructions, on every thread"
