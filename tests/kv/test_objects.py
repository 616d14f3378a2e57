"""KV objects: what is not exactly what was asked for, by an engine that knows the secret, is a miss."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from cloister.kv import KVFormat, KVObject, KVQuery, KVSealer, PrefixKeys
from cloister.types.scope import LOCAL_SCOPE, Scope, ScopeKind

FORMAT = KVFormat("fp_1", 4, "all", (8, 6))
KEYS = PrefixKeys("fp_1", 4)
ROOT = KEYS.root(LOCAL_SCOPE)
CHAIN: list[bytes] = []
KEYS.extend(CHAIN, ROOT, range(12), 3)
SECRET = b"s" * 32
SEALER = KVSealer(FORMAT, SECRET)
CONTENTS = (b"12345678", b"abcdef")


def sealed(entry: int = 1, contents: tuple[bytes, ...] = CONTENTS, sealer: KVSealer = SEALER) -> KVObject:
    return sealer.seal(ROOT, CHAIN[entry], entry, contents)


def is_genuine(found: KVObject, sealer: KVSealer = SEALER) -> bool:
    """As the asker sees it, after the way over a wire."""
    return sealer.is_genuine(msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=KVObject), ROOT, CHAIN)


@pytest.mark.parametrize("contents", [CONTENTS, (b"", b"abcdef"), (b"12345678", b"")])
def test_an_object_of_the_same_engines_is_genuine(contents: tuple[bytes, ...]) -> None:
    assert is_genuine(sealed(contents=contents))


def test_who_does_not_know_the_secret_makes_no_object() -> None:
    assert not is_genuine(sealed(sealer=KVSealer(FORMAT, b"t" * 32)))


@pytest.mark.parametrize(
    "form",
    [
        replace(FORMAT, fingerprint="fp_2"),
        replace(FORMAT, block_size=8),
        replace(FORMAT, layout="a window"),
        replace(FORMAT, sizes=(8, 7)),
    ],
    ids=["model", "block size", "layout", "number format"],
)
def test_an_object_of_another_format_is_a_miss(form: KVFormat) -> None:
    assert not is_genuine(sealed(sealer=KVSealer(form, SECRET)))


@pytest.mark.parametrize("bit", range(0, 8 * len(sealed().mac), 37))
def test_a_changed_mac_is_found(bit: int) -> None:
    found = sealed()
    assert not is_genuine(msgspec.structs.replace(found, mac=flip(found.mac, bit)))


def test_every_changed_bit_of_the_contents_is_found() -> None:
    found = sealed()
    for group, content in enumerate(CONTENTS):
        for bit in range(8 * len(content)):
            contents = list(CONTENTS)
            contents[group] = flip(content, bit)
            assert not is_genuine(msgspec.structs.replace(found, contents=tuple(contents)))


def test_contents_cannot_change_places() -> None:
    same = KVFormat("fp_1", 4, "all", (4, 4))
    sealer = KVSealer(same, SECRET)
    found = sealed(contents=(b"abcd", b"efgh"), sealer=sealer)
    assert is_genuine(found, sealer)
    assert not is_genuine(msgspec.structs.replace(found, contents=(b"efgh", b"abcd")), sealer)


def test_an_object_says_where_it_belongs() -> None:
    header, replaced = sealed().header, msgspec.structs.replace
    for wrong in (
        replaced(header, entry=0),
        replaced(header, entry=3),
        replaced(header, entry=-1),
        replaced(header, key=CHAIN[0]),
        replaced(header, key=CHAIN[0], entry=0),
        replaced(header, root=KEYS.root(Scope(ScopeKind.TENANT, b"x"))),
        replaced(header, root=KEYS.root(LOCAL_SCOPE, "an adapter")),
        replaced(header, sizes=(8, 0)),
        replaced(header, sizes=(8,)),
    ):
        assert not is_genuine(replaced(sealed(), header=wrong))
    other: list[bytes] = []
    KEYS.extend(other, ROOT, range(1, 13), 3)
    assert not SEALER.is_genuine(sealed(), ROOT, other), "of another prompt"


def test_nothing_of_it_is_shown() -> None:
    shown = f"{sealed()!r} {KVQuery('r', ROOT, CHAIN)!r}"
    assert "abcdef" not in shown
    assert repr(CHAIN[0]) not in shown


def flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
