"""The filters as programs: each is run here, instruction by instruction, and compared with what its rules say."""

from __future__ import annotations

import errno
import re
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.trust.hardening import seccomp
from cloister.trust.hardening.kernel import INTERFACES, Interface
from cloister.trust.hardening.measure import Needs
from cloister.trust.hardening.seccomp import Condition, Rule, closing_rules, rules

NEEDS = (
    Needs("engine"),
    Needs("front", listen=(8000,)),
    Needs("gateway", listen=(1,), connect=(2,)),
    Needs("starter", fork=True),
)
HEADERS = {
    "x86_64": "asm/unistd_64.h",
    "aarch64": "asm-generic/unistd.h",
}
NEWER = {"fchmodat2", "setxattrat", "removexattrat", "open_tree_attr"}
"""Calls that the headers of many machines do not have yet."""
WORD = 0xFFFFFFFF


def run(program: list[seccomp.Instruction], audit: int, number: int, arguments: list[int]) -> int:
    """What the kernel would do: struct seccomp_data holds the number, the architecture, 8 bytes, and arguments."""
    words = [number, audit, 0, 0, *(half for value in arguments for half in (value & WORD, value >> 32))]
    register, at = 0, 0
    while True:
        instruction = program[at]
        at += 1
        match instruction.code:
            case seccomp.LOAD:
                register = words[instruction.operand // 4]
            case seccomp.AND:
                register &= instruction.operand
            case seccomp.JUMP_EQUAL:
                at += instruction.if_true if register == instruction.operand else instruction.if_false
            case seccomp.JUMP_GREATER_EQUAL:
                at += instruction.if_true if register >= instruction.operand else instruction.if_false
            case seccomp.RETURN:
                return instruction.operand


def holds(condition: Condition, arguments: list[int]) -> bool:
    value = arguments[condition.argument]
    half = value >> 32 if condition.high else value & WORD
    return ((half & condition.mask) == condition.value) is condition.equal


def wanted(refused: list[Rule], interface: Interface, number: int, arguments: list[int]) -> int:
    for rule in refused:
        if interface.numbers.get(rule.name) == number and all(holds(condition, arguments) for condition in rule.conditions):
            return seccomp.ERRNO | rule.error
    return seccomp.ALLOW


bits = st.sampled_from([0, 1, 2, 4, 10, 0x10000, 0x20000, 0x59616D61, 0x10000000, 1 << 32, WORD])
argument_lists = st.lists(st.one_of(bits, st.integers(0, 2**64 - 1)), min_size=6, max_size=6)


@pytest.mark.parametrize("machine", INTERFACES)
@given(arguments=argument_lists, needs=st.sampled_from(NEEDS), closing=st.booleans(), data=st.data())
def test_a_program_does_what_its_rules_say(
    machine: str, arguments: list[int], needs: Needs, closing: bool, data: st.DataObject
) -> None:
    interface = INTERFACES[machine]
    refused = list(closing_rules(needs) if closing else rules(needs))
    number = data.draw(st.one_of(st.sampled_from(sorted(interface.numbers.values())), st.integers(0, 600)))
    program = seccomp.assemble(refused, interface)
    assert run(program, interface.audit, number, arguments) == wanted(refused, interface, number, arguments)


@pytest.mark.parametrize("machine", INTERFACES)
def test_another_architecture_ends_the_process(machine: str) -> None:
    program = seccomp.assemble(rules(Needs("engine")), INTERFACES[machine])
    i386 = 0x40000003
    assert run(program, i386, 20, [0] * 6) == seccomp.KILL_PROCESS


def test_the_second_interface_of_x86_ends_the_process() -> None:
    program = seccomp.assemble(rules(Needs("engine")), INTERFACES["x86_64"])
    getpid = 39
    assert run(program, INTERFACES["x86_64"].audit, 0x40000000 | getpid, [0] * 6) == seccomp.KILL_PROCESS
    assert run(program, INTERFACES["x86_64"].audit, getpid, [0] * 6) == seccomp.ALLOW


def test_clone3_is_not_there_so_that_clone_is_taken() -> None:
    interface = INTERFACES["x86_64"]
    program = seccomp.assemble(rules(Needs("front")), interface)
    assert run(program, interface.audit, interface.numbers["clone3"], [0] * 6) == seccomp.ERRNO | errno.ENOSYS


@pytest.mark.parametrize("role", ["engine", "starter"])
def test_only_a_starter_forks_and_everybody_makes_threads(role: str) -> None:
    interface = INTERFACES["x86_64"]
    program = seccomp.assemble(rules(Needs(role, fork=role == "starter")), interface)
    clone = interface.numbers["clone"]
    thread, process, namespace = 0x3D0F00, 17, 0x10000000 | 17
    assert run(program, interface.audit, clone, [thread, *[0] * 5]) == seccomp.ALLOW
    assert (run(program, interface.audit, clone, [process, *[0] * 5]) == seccomp.ALLOW) is (role == "starter")
    assert run(program, interface.audit, clone, [namespace, *[0] * 5]) == seccomp.ERRNO | errno.EPERM


@pytest.mark.parametrize("machine", INTERFACES)
def test_numbers_of_system_calls_are_those_of_the_headers(machine: str) -> None:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    wants = ["-D__ARCH_WANT_SET_GET_RLIMIT", "-D__ARCH_WANT_MEMFD_SECRET", "-D__ARCH_WANT_SYS_CLONE3", "-D__BITS_PER_LONG=64"]
    source = f"#include <{HEADERS[machine]}>"
    done = subprocess.run([compiler, "-E", "-dM", *wants, "-"], input=source, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this machine has no {HEADERS[machine]}")
    told = {name: int(number) for name, number in re.findall(r"#define (?:__NR|__NR3264)_(\w+) (\d+)", done.stdout)}
    known = {name: number for name, number in INTERFACES[machine].numbers.items() if name in told}
    assert known == {name: told[name] for name in known}
    assert set(INTERFACES[machine].numbers) - set(known) <= NEWER
