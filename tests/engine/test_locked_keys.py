"""Keys lie in one place, which is not swapped, dumped or inherited, and are wiped when they are forgotten."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from cloister.engine import locked_keys
from cloister.engine.locked_keys import LockedKeys
from cloister.types.errors import ConfigError

NONCE = bytes(12)


def read_locked_kib(pid: int | str = "self") -> int:
    return int(re.search(r"VmLck:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()).group(1))  # type: ignore[union-attr]


def count_in_memory(pid: int, needle: bytes) -> list[str]:
    """Returns the mappings of a process that hold some bytes, one for each place."""
    found = []
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            start, end = (int(number, 16) for number in line.split()[0].split("-"))
            if "r" not in line.split()[1] or "[v" in line:
                continue
            memory.seek(start)
            found += [line] * memory.read(end - start).count(needle)
    return found


def test_a_key_is_in_one_place_of_the_process_after_it_has_sealed_and_nowhere_once_it_is_forgotten() -> None:
    (from_child, to_parent), (from_parent, to_child) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        keys = LockedKeys()
        number = keys.draw()
        for _ in range(100):
            cipher = keys.cipher(number)
            assert cipher is not None
            cipher.encrypt(NONCE, bytes(1000), b"")
        del cipher
        os.write(to_parent, bytes(byte ^ 0xFF for byte in keys._keys[number]))  # so that the key itself is not copied
        os.read(from_parent, 1)
        keys.forget(number)
        os.write(to_parent, b"!")
        os.read(from_parent, 1)
        os._exit(0)
    try:
        key = bytes(byte ^ 0xFF for byte in os.read(from_child, 64))
        assert len(set(key)) > 8, "it is drawn"
        assert len(count_in_memory(child, key)) == 1
        os.write(to_child, b"!")
        os.read(from_child, 1)
        assert count_in_memory(child, key) == []
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_its_memory_is_locked_left_out_of_dumps_and_empty_in_a_fork() -> None:
    before = read_locked_kib()
    keys = LockedKeys()
    number = keys.put(b"k" * 32)
    assert read_locked_kib() == before + 4
    address = locked_keys._address_of(keys._keys[number]).value
    smaps = Path("/proc/self/smaps").read_text()
    (flags,) = re.findall(rf"^{address - address % 4096:08x}-.*?VmFlags: (.*?)$", smaps, re.MULTILINE | re.DOTALL)
    assert {"lo", "dd", "wf"} <= set(flags.split())
    child = os.fork()
    if not child:
        os._exit(bytes(keys._keys[number]) != bytes(32))
    assert os.waitpid(child, 0)[1] == 0


def test_a_number_is_never_used_again_and_pages_are_added() -> None:
    keys = LockedKeys()
    numbers = [keys.draw() for _ in range(200)]
    copies = {keys.copy(number) for number in numbers}
    assert len(copies) == 200
    keys.forget(numbers[0])
    assert keys.copy(numbers[0]) is None
    assert keys.cipher(numbers[0]) is None
    assert keys.draw() not in numbers
    keys.clear()
    assert all(keys.copy(number) is None for number in numbers)


def test_where_no_memory_may_be_locked_a_tier_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked_keys._libc, "mlock", lambda address, length: -1)
    with pytest.raises(ConfigError, match=r"ulimit -l 64.*or leave kv_tier out"):
        locked_keys.lock_keys()
