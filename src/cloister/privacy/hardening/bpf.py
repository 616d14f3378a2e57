"""Classic BPF for seccomp: rules become a program that the kernel runs before every system call. Pure; bytes out.

Sources: seccomp(2), include/uapi/linux/filter.h and bpf_common.h. A program is a chain of blocks, one a rule: load the number,
skip the block if it is another call, test the arguments, answer. The kernel remembers which calls always pass, so the length of
the chain costs those nothing (seccomp action cache, Linux 5.11).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cloister.privacy.hardening.filter import Condition, Rule
from cloister.privacy.hardening.syscalls import Interface

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
"""Offsets in struct seccomp_data; an argument has 8 bytes, the low half first on the machines that we know."""

MOST_INSTRUCTIONS: Final = 4096
"""BPF_MAXINSNS: the kernel takes no longer program."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: operation, jump if true, jump if false (both relative to the next one), operand."""

    code: int
    if_true: int
    if_false: int
    operand: int


def assemble(rules: Iterable[Rule], interface: Interface) -> list[Instruction]:
    """Returns the program of a filter: another architecture ends the process, the rules refuse, the rest goes on.

    A rule whose call this instruction set does not have is left out.
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
    """Loads the argument and goes on to the next instruction if the condition holds; where else to is filled in by `_block`."""
    at = ARGUMENTS_AT + 8 * condition.argument + (4 if condition.high else 0)
    masking = [] if condition.mask == 0xFFFFFFFF else [Instruction(AND, 0, 0, condition.mask)]
    jump = Instruction(JUMP_EQUAL, 0 if condition.equal else 1, 1 if condition.equal else 0, condition.value)
    return [Instruction(LOAD, 0, 0, at), *masking, jump]
