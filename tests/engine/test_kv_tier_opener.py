"""Blocks that are opened with one call: the same as one after the other by `cryptography`, and nothing else opens."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cloister.engine.kv_tier_opener import (
    BlockOpener,
    describe_block,
    describe_chain,
    find_opener,
    make_nonce,
    pack_record,
)
from cloister.kv.tier_slots import TAG_BYTES, TierBlock

SIZES = (1, 15, 16, 4096, 20_000)
CHAIN = describe_chain(b"form", b"root")


@pytest.fixture
def make() -> Callable[[memoryview], BlockOpener]:
    found = find_opener()
    if found is None:
        pytest.skip("there is no libcrypto of OpenSSL 3, or no compiled kernels")
    return found


def block_of(number: int, *, entry: int = 3, group: int = 1, key: bytes = b"k" * 32) -> TierBlock:
    return TierBlock(b"root", b"owner", key, entry, group, number, number, 0)


class Run:
    """Neighbours as they lie in a file, sealed by `cryptography`."""

    def __init__(self) -> None:
        self.key = AESGCM.generate_key(256)
        self.blocks = [block_of(2**40 + number, entry=number) for number in range(len(SIZES))]
        self.contents = [os.urandom(size) for size in SIZES]
        cipher = AESGCM(self.key)
        sealed = [
            cipher.encrypt(make_nonce(block), content, CHAIN + describe_block(block))
            for block, content in zip(self.blocks, self.contents, strict=True)
        ]
        self.places = [sum(map(len, sealed[:number])) for number in range(len(sealed))]
        self.sealed = bytearray(b"".join(sealed))
        self.room = bytearray(b"\xff" * sum(SIZES))

    def open(self, make: Callable[[memoryview], BlockOpener], chain: bytes = CHAIN, key: bytes | None = None) -> list[int]:
        outs = [sum(SIZES[:number]) for number in range(len(SIZES))]
        records = [pack_record(*record) for record in zip(self.blocks, self.places, SIZES, outs, strict=True)]
        opener = make(memoryview(key or self.key))
        return list(opener.open(memoryview(self.sealed), chain, b"".join(records), memoryview(self.room)))

    @property
    def opened(self) -> list[bytes]:
        return [bytes(self.room[sum(SIZES[:number]) :][:size]) for number, size in enumerate(SIZES)]


def test_what_cryptography_seals_opens_with_one_call(make: Callable[[memoryview], BlockOpener]) -> None:
    run = Run()
    assert run.open(make) == [1] * len(SIZES)
    assert run.opened == run.contents


@pytest.mark.parametrize("number", range(len(SIZES)))
@pytest.mark.parametrize("where", ["contents", "tag", "nonce", "key", "entry", "group"])
def test_a_changed_block_alone_does_not_open_and_leaves_zeros(
    make: Callable[[memoryview], BlockOpener], where: str, number: int
) -> None:
    run = Run()
    block = run.blocks[number]
    match where:
        case "contents":
            run.sealed[run.places[number]] ^= 1
        case "tag":
            run.sealed[run.places[number] + SIZES[number] + TAG_BYTES - 1] ^= 1
        case "nonce":
            run.blocks[number] = block_of(block.number + 1, entry=block.entry)
        case "key":
            run.blocks[number] = block_of(block.number, entry=block.entry, key=b"other".ljust(32, b"k"))
        case "entry":
            run.blocks[number] = block_of(block.number, entry=block.entry + 1)
        case "group":
            run.blocks[number] = block_of(block.number, entry=block.entry, group=0)
    others = [other != number for other in range(len(SIZES))]
    assert run.open(make) == others
    assert run.opened == [
        content if is_same else bytes(len(content)) for content, is_same in zip(run.contents, others, strict=True)
    ]


def test_another_chain_format_or_key_opens_nothing(make: Callable[[memoryview], BlockOpener]) -> None:
    for chain, key in (
        (describe_chain(b"form", b"other"), None),
        (describe_chain(b"other", b"root"), None),
        (CHAIN, os.urandom(32)),
    ):
        run = Run()
        assert run.open(make, chain, key) == [0] * len(SIZES)
        assert not any(run.room)


def test_what_a_short_read_lacks_does_not_open(make: Callable[[memoryview], BlockOpener]) -> None:
    run = Run()
    run.sealed = run.sealed[: run.places[-1] + TAG_BYTES]
    assert run.open(make) == [1] * (len(SIZES) - 1) + [0]


def test_a_place_beyond_all_numbers_does_not_open(make: Callable[[memoryview], BlockOpener]) -> None:
    run = Run()
    run.places[0] = 2**64 - 1
    assert run.open(make) == [0] + [1] * (len(SIZES) - 1)


def test_contents_never_go_beyond_their_room(make: Callable[[memoryview], BlockOpener]) -> None:
    run = Run()
    record = pack_record(run.blocks[-1], run.places[-1], SIZES[-1], sum(SIZES) - SIZES[-1] + 1)
    with pytest.raises(ValueError, match="outside of their room"):
        make(memoryview(run.key)).open(memoryview(run.sealed), CHAIN, record, memoryview(run.room))
    with pytest.raises(ValueError, match="records"):
        make(memoryview(run.key)).open(memoryview(run.sealed), CHAIN, record[:-1], memoryview(run.room))
    with pytest.raises(ValueError, match="32 bytes"):
        make(memoryview(run.key[:16]))
    assert set(run.room) == {0xFF}
