"""Compressed blocks of tiers: they come back, and whatever else lies in a slot is a miss."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cloister.backends.kv_planes import KVPlane
from cloister.engine.kv_tier_codec import LENGTH_BYTES, MANY_SAMPLES, NUM_SAMPLES, TierCodec
from cloister.engine.kv_tier_files import TierFile
from cloister.engine.kv_tier_opener import make_nonce
from cloister.engine.kv_tier_storage import parse_tiers
from cloister.engine.kv_tier_worker import TierWorker
from cloister.kv import BlockGroup, KVFormat
from cloister.kv.tier_slots import TierBlock, TierLayout
from cloister.scheduler.kv_restores import TierEntry, TierRead
from cloister.types.errors import ConfigError

PLANE = KVPlane(0, 2, 16, 1, 64, 1, 64, 0, 1, 0)
SIZES = (PLANE.num_bytes, 900)  # the second group has states
LIMIT = 2**20


def draw(number: int) -> bytes:
    """A block whose numbers compress as others' do."""
    numbers = np.random.default_rng(number).standard_normal((16, 64)).astype(np.float32) * np.geomspace(
        0.1, 9, 64, dtype=np.float32
    )
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def noise(number: int) -> bytes:
    """A block that nothing makes smaller."""
    return np.random.default_rng(number).bytes(SIZES[0])


def make_codec(name: str) -> TierCodec:
    """A codec that has measured its levels."""
    codec = TierCodec([[PLANE], []], SIZES, name)
    assert [codec.add_sample(0, draw(number)) for number in range(NUM_SAMPLES)] == [False] * (NUM_SAMPLES - 1) + [True]
    codec.choose(1e-8)
    return codec


def make_worker(setting: str, codec: TierCodec) -> TierWorker:
    files = []
    for where in parse_tiers(setting):
        layout = TierLayout.plan(LIMIT, codec.stored_bytes, [BlockGroup(8), BlockGroup(8)], 1, content_bytes=SIZES)
        is_memory = where.storage.is_memory
        file = TierFile(where.name, where.storage.open(where), layout, is_memory=is_memory)
        file.extend()
        files.append(file)
    return TierWorker(files, KVFormat("model", 16, "two", SIZES), codec=codec)


@pytest.fixture(params=["lossless", "fine"])
def codec(request: pytest.FixtureRequest) -> TierCodec:
    return make_codec(request.param)


@pytest.fixture
def worker(codec: TierCodec, tmp_path: Path) -> Iterator[TierWorker]:
    with contextlib.closing(make_worker(f"disk:{tmp_path},1M", codec)) as made:
        yield made


def block_of(number: int, group: int = 0, tier: int = 0) -> TierBlock:
    return TierBlock(b"root", b"", bytes([number]), number, group, number, number, tier)


def write(worker: TierWorker, block: TierBlock, content: bytes) -> bool:
    """Returns whether the block was written."""
    worker.write(block, content)
    return wait_written(worker, block.tier)


def wait_written(worker: TierWorker, tier: int) -> bool:
    deadline_s = time.monotonic() + 300
    while not (written := worker.take_written(tier)[0]):
        assert time.monotonic() < deadline_s
        time.sleep(0.0005)
    ((_, is_written),) = written
    return is_written


def read(worker: TierWorker, block: TierBlock) -> bytes | None:
    """Reads one block as a load does; None if it does not open."""
    blocks = (block, None) if block.group == 0 else (None, block)
    tier_bytes = [0] * len(worker.files)
    tier_bytes[block.tier] = 1
    worker.read(TierRead("request", [], b"root", [TierEntry(block.entry, block.key, blocks)], tier_bytes, 60.0))
    deadline_s = time.monotonic() + 300
    while True:
        assert time.monotonic() < deadline_s
        for arrival in worker.take_read():
            if arrival.is_complete is not None:
                return bytes(arrival.objects[0].contents[block.group]) if arrival.is_complete else None
        time.sleep(0.0005)


def test_a_block_comes_back_and_one_of_a_group_without_numbers_as_it_is(worker: TierWorker, codec: TierCodec) -> None:
    assert write(worker, block_of(1), draw(7))
    assert write(worker, block_of(2, group=1), bytes(range(225)) * 4)
    found = read(worker, block_of(1))
    assert found is not None
    assert (found == draw(7)) == (codec.name == "lossless")
    numbers, others = (np.frombuffer(each, np.uint16).astype(np.uint32) << 16 for each in (found, draw(7)))
    np.testing.assert_allclose(numbers.view(np.float32), others.view(np.float32), atol=0.5)
    assert read(worker, block_of(2, group=1)) == bytes(range(225)) * 4
    assert not codec.is_coded(1)


def test_all_blocks_of_a_group_are_equally_long_whatever_is_in_them(worker: TierWorker, codec: TierCodec) -> None:
    lengths = []
    for number, content in enumerate((bytes(SIZES[0]), draw(3))):
        stored = codec.encode(0, content)
        assert stored is not None
        lengths.append(len(stored))
        assert write(worker, block_of(number), content)
        assert read(worker, block_of(number)) is not None
    assert lengths == [codec.stored_bytes[0]] * 2
    assert lengths[0] < SIZES[0] * (0.85 if codec.name == "lossless" else 0.45)


def test_a_block_that_does_not_fit_is_not_stored(worker: TierWorker) -> None:
    assert not write(worker, block_of(1), noise(0))
    assert read(worker, block_of(1)) is None
    assert write(worker, block_of(2), draw(1))


@pytest.mark.parametrize("at", [0, 2, LENGTH_BYTES, LENGTH_BYTES + 9, LENGTH_BYTES + 200])
def test_a_stream_that_was_damaged_before_it_was_sealed_is_a_miss(worker: TierWorker, codec: TierCodec, at: int) -> None:
    stored = codec.encode(0, draw(1))
    assert stored is not None
    damaged = bytearray(stored)
    damaged[at] ^= 0x80
    assert write(worker, block_of(1), draw(1))
    block, cipher, file = block_of(1), worker._keys.cipher(worker._key_of[b"root"]), worker.files[0]
    assert cipher is not None
    for content, is_good in ((bytes(stored), True), (bytes(damaged), False)):
        file.write(block, cipher.encrypt(make_nonce(block), content, worker._describe(block)))
        assert (read(worker, block) is not None) == is_good


def test_another_level_does_not_open(codec: TierCodec, worker: TierWorker) -> None:
    assert write(worker, block_of(1), draw(1))
    worker._stored_form = b"coarse"
    assert read(worker, block_of(1)) is None


def test_a_stream_moves_to_the_disk_as_it_was_sealed(codec: TierCodec, tmp_path: Path) -> None:
    with contextlib.closing(make_worker(f"host:1M+disk:{tmp_path},1M", codec)) as worker:
        assert write(worker, block_of(1), draw(5))
        found = read(worker, block_of(1))
        assert found is not None
        sealed = worker.files[0].read_sealed(block_of(1))
        worker.move(block_of(1), block_of(1, tier=1))
        assert wait_written(worker, 1)
        assert read(worker, block_of(1, tier=1)) == found
        assert worker.files[1].read_sealed(block_of(1, tier=1)) == sealed


def test_nothing_of_a_block_is_on_the_disk(codec: TierCodec, worker: TierWorker) -> None:
    assert write(worker, block_of(1), draw(5))
    stored = codec.encode(0, draw(5))
    assert stored is not None
    sealed = worker.files[0].read_sealed(block_of(1))
    assert len(sealed) == len(stored) + 16
    assert bytes(stored[100:108]) not in sealed


def test_a_group_that_offers_nothing_does_not_keep_the_others_waiting() -> None:
    codec = TierCodec([[PLANE], [PLANE]], (SIZES[0], SIZES[0]), "lossless")
    assert not any(codec.add_sample(0, draw(number)) for number in range(MANY_SAMPLES - 1))
    assert codec.add_sample(0, draw(0))
    codec.choose(1e-8)
    assert codec.is_coded(0)
    assert not codec.is_coded(1)


def test_what_does_not_get_smaller_is_stored_as_it_is() -> None:
    codec = TierCodec([[PLANE]], SIZES[:1], "lossless")
    for number in range(NUM_SAMPLES):
        codec.add_sample(0, noise(number))
    codec.choose(1e-8)
    assert not codec.is_coded(0)
    assert codec.encode(0, noise(9)) == noise(9)


def test_a_fast_tier_stores_numbers_as_they_are_and_a_slow_one_does_not() -> None:
    levels = []
    for byte_s in (1e-12, 1e-4):
        codec = TierCodec([[PLANE]], SIZES[:1], "auto")
        for number in range(NUM_SAMPLES):
            codec.add_sample(0, draw(number))
        levels.append(codec.choose(byte_s).level.name)
    assert levels == ["raw", "lossless"]


def test_without_numbers_there_is_nothing_to_compress() -> None:
    with pytest.raises(ConfigError, match="leave it out"):
        TierCodec([[], []], SIZES, "lossless")


def test_a_cipher_of_another_scope_opens_nothing(worker: TierWorker) -> None:
    assert write(worker, block_of(1), draw(1))
    worker._key_of[b"root"] = worker._keys.draw()
    assert read(worker, block_of(1)) is None
