"""Engines that share memory for KV: what one has stored another loads with the same bits; what does not open is computed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from cloister.engine import kv_pool_member, kv_tier_files
from cloister.engine.kv_pool import PAGE_BYTES, KVPool, PoolSeat
from cloister.engine.kv_pool_member import RECORD_BYTES, RING_WORDS
from cloister.kv.tier_slots import TierBlock
from cloister.text import Tokenizer
from cloister.types.errors import ConfigError
from cloister.types.events import InspectCache, KVLoaded
from cloister.types.scope import Scope, ScopeKind
from tests.engine.test_kv_tiers import NUM_HIT, PROMPT, Engine, UnreliableWrites
from tests.pool_member import FORM, Member, content_of, key_of

SETTING = "shared:1M"
ANN = Scope(ScopeKind.TENANT, b"ann")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take its time."""
    monkeypatch.setattr("cloister.scheduler.kv_restores.MIN_READ_S", 60.0)
    monkeypatch.setattr("cloister.scheduler.kv_load.KV_LOAD_TIMEOUT_S", 300.0)


class Machine:
    """A pool, and engines in it."""

    def __init__(self, tokenizer: Tokenizer, part_bytes: int = 2**20, num_parts: int = 3) -> None:
        self.pool, self._tokenizer = KVPool(part_bytes, num_parts), tokenizer
        self.engines: dict[int, Engine] = {}
        self.seats: dict[int, PoolSeat] = {}

    def start(self, setting: str = SETTING, admission: str | None = None, **changes: Any) -> Engine:
        seat = self.pool.take_seat()
        assert seat is not None
        seat = replace_seat(seat, **changes)
        engine = Engine(self._tokenizer, setting, (os.dup(self.pool.fd), seat), admission)
        self.engines[seat.part], self.seats[seat.part] = engine, seat
        engine.answer("warm up", [7] * 60)  # so that it knows that computing is slow
        return engine

    def kill(self, part: int) -> None:
        """Ends an engine without telling it."""
        self.engines.pop(part).tier.close()
        self.pool.free_seat(self.seats.pop(part))

    def read(self, part: int) -> bytes:
        return os.pread(self.pool.fd, self.pool.part_bytes, part * self.pool.part_bytes)


def replace_seat(seat: PoolSeat, **changes: Any) -> PoolSeat:
    fields = {name: getattr(seat, name) for name in seat.__struct_fields__}
    return PoolSeat(**(fields | changes))


@pytest.fixture
def machine(tokenizer: Tokenizer) -> Iterator[Machine]:
    made = Machine(tokenizer)
    yield made
    for engine in made.engines.values():
        engine.tier.close()


@pytest.fixture
def pair(machine: Machine) -> tuple[Engine, Engine]:
    """Two engines, of which the first has stored the prompt."""
    first, second = machine.start(), machine.start()
    first.answer("first")
    first.crowd_out()
    first.step()
    assert len(first.blocks_of()) * 8 >= NUM_HIT
    return first, second


def record_of(engine: Engine, block: TierBlock) -> int:
    member = engine.tier._member
    part = member._own if block.home is None else member._others[block.home]
    return int(part.record_start(part.place_of(block)))


def test_what_one_engine_has_stored_another_loads_and_the_answer_is_the_same(
    pair: tuple[Engine, Engine], tokenizer: Tokenizer
) -> None:
    _, second = pair
    expected = Engine(tokenizer, None).answer("alone")
    assert second.answer("again") == expected
    assert second.num_cached("again") == NUM_HIT
    (loaded,) = second.find(KVLoaded, "again")
    assert (loaded.tier, loaded.complete, loaded.num_tokens) == ("shared", True, NUM_HIT)
    second.tier.tiers.check()


def test_what_another_engine_has_is_not_stored_a_second_time(pair: tuple[Engine, Engine]) -> None:
    first, second = pair
    second.answer("again")
    num_other = len(second.index)
    second.crowd_out(10)
    keys = {block.key for block in second.blocks_of()}
    assert {block.home for block in second.blocks_of()} == {0}
    assert not keys & second.index._slots[0].blocks.keys()
    assert len(second.index) > num_other, "it stores what nobody has"
    uses = [first.index._slots[0].used[block.key] for block in first.blocks_of()]
    first.step()
    assert min(first.index._slots[0].used[block.key] for block in first.blocks_of()[: NUM_HIT // 8]) > max(uses), (
        "a load by the second engine is a use"
    )


def test_an_engine_that_starts_later_finds_what_the_others_have(machine: Machine, pair: tuple[Engine, Engine]) -> None:
    third = machine.start()
    expected = pair[0].answer("again")
    assert third.answer("again") == expected
    assert third.num_cached("again") == NUM_HIT


def test_an_engine_that_is_far_behind_reads_all_records_again(pair: tuple[Engine, Engine]) -> None:
    first, second = pair
    second.step()
    num_known = second.index.num_elsewhere
    assert num_known == len(first.index)
    first.index.forget(first.blocks_of()[0].root)
    first.step()  # it tells what is gone, and then so much else that nobody can read that any more
    for _ in range(RING_WORDS + 5):
        first.tier._member._tell(0, 0)
    second.run_until(lambda: second.index.num_elsewhere != num_known)
    assert second.index.num_elsewhere == 0 == len(first.index)


def test_many_news_are_followed_over_several_steps(pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pair
    monkeypatch.setattr(kv_pool_member, "MAX_FOLLOWED", 7)
    woken = list[bool]()
    second.tier.on_news(lambda: woken.append(True))
    second.step()
    assert second.index.num_elsewhere <= 7
    assert woken, "an engine without requests would leave the rest unread"
    second.run_until(lambda: second.index.num_elsewhere == len(first.index))


@pytest.mark.parametrize("damage", ["block", "torn block", "record", "torn record", "record of another slot", "stale record"])
def test_what_is_not_as_it_was_written_is_computed(damage: str, pair: tuple[Engine, Engine], machine: Machine) -> None:
    first, second = pair
    second.step()
    blocks, fd = second.blocks_of(), machine.pool.fd
    broken = blocks[4]
    place, record = second.file.place(broken), record_of(second, broken)
    match damage:
        case "block":
            os.pwrite(fd, bytes(8), place + 40)
        case "torn block":
            os.pwrite(fd, os.pread(fd, 70, second.file.place(blocks[5])), place)
        case "record":
            os.pwrite(fd, b"\1", record + 60)
        case "torn record":
            os.pwrite(fd, bytes(RECORD_BYTES - 50), record + 50)
        case "record of another slot":
            os.pwrite(fd, os.pread(fd, RECORD_BYTES, record_of(second, blocks[5])), record)
        case _:
            kept = os.pread(fd, RECORD_BYTES, record)
            first.index.forget(broken.root)
            first.crowd_out(10)
            assert first.index._slots[0].blocks, "the slots were not written again"
            os.pwrite(fd, kept, record)
            second.index.forget_part(0)
            for block in blocks[: NUM_HIT // 8]:
                second.index.note_elsewhere(0, block.group, block.slot, block)
    expected = first.answer("again")
    assert second.answer("again") == expected
    assert second.num_cached("again") == (0 if damage == "stale record" else 4 * 8)
    second.tier.tiers.check()


def test_an_engine_with_another_secret_finds_nothing(machine: Machine, pair: tuple[Engine, Engine]) -> None:
    stranger = machine.start(secret=b"x" * 32)
    assert stranger.answer("again") == pair[0].answer("again")
    assert stranger.num_cached("again") == 0
    assert stranger.index.num_elsewhere == 0


def test_a_dropped_scope_is_gone_for_all_engines_when_the_reply_comes(machine: Machine) -> None:
    first, second = machine.start(), machine.start()
    first.answer("ann's", PROMPT, ANN)
    first.crowd_out()
    first.step()
    second.step()
    root = first.engine.scheduler._requests.prefixes._keys.root(ANN)  # type: ignore[union-attr]
    blocks = [block for block in second.index._places.values() if block.root == root]
    kept = [os.pread(machine.pool.fd, RECORD_BYTES, record_of(second, block)) for block in blocks]
    assert blocks
    first.core.input_queue.put(InspectCache("call", ANN, True))
    message = first.core.step()
    assert message is not None
    assert message.replies, "the reply comes with this step"
    assert all(second.tier._member.find_cipher(block) is None for block in blocks)
    memory = machine.read(0)
    assert not any(record in memory for record in kept)
    assert second.answer("again", PROMPT, ANN) == first.answer("again", PROMPT, ANN)
    assert second.num_cached("again") == 0


@pytest.mark.parametrize("other", [Scope(ScopeKind.TENANT, b"bob"), ANN.narrow("another salt")], ids=["key", "salt"])
def test_no_other_scope_finds_or_loads_what_another_engine_keeps(other: Scope, machine: Machine) -> None:
    first, second = machine.start(), machine.start()
    first.answer("ann's", PROMPT, ANN)
    first.crowd_out()
    first.step()
    second.answer("probe", PROMPT, other)
    assert (second.num_cached("probe"), second.find(KVLoaded, "probe")) == (0, [])
    second.answer("ann's again", PROMPT, ANN)
    assert second.find(KVLoaded, "ann's again"), "the probe would show nothing"


def test_the_part_of_an_engine_that_has_ended_is_wiped_and_its_successor_begins_anew(
    machine: Machine, pair: tuple[Engine, Engine]
) -> None:
    _, second = pair
    second.step()
    blocks = second.blocks_of()
    stale = machine.read(0)
    machine.kill(0)
    assert not any(machine.read(0))
    assert all(second.tier._member.find_cipher(block) is None for block in blocks)
    second.step()
    assert second.index.is_empty
    successor = machine.start()
    assert machine.seats[0].writer == 3
    expected = successor.answer("first")
    assert second.answer("again") == expected
    assert second.num_cached("again") == 0
    # what the part held before, put back by somebody, belongs to an engine that has ended
    os.pwrite(machine.pool.fd, stale[PAGE_BYTES:], PAGE_BYTES)
    successor.crowd_out()
    second.crowd_out(20)
    second.step()
    assert all(block.number >> kv_pool_member.NUMBER_BITS == 3 for block in second.index._places.values())


def test_a_pool_that_is_full_lets_the_oldest_go_and_tells_so(tokenizer: Tokenizer) -> None:
    machine = Machine(tokenizer, part_bytes=160 * 1024)
    first, second = machine.start("shared:160K"), machine.start("shared:160K")
    with contextlib.closing(first.tier), contextlib.closing(second.tier):
        (num_slots,) = first.index.layout.num_slots
        for number in range(0, 12, 4):
            first.crowd_out(number)
        first.step()
        second.run_until(lambda: second.index.num_elsewhere == len(first.index))
        assert len(first.index) == num_slots
        assert {block.number for block in second.index._places.values()} == {
            block.number for block in first.index._slots[0].blocks.values()
        }
        first.tier.tiers.check()
        second.tier.tiers.check()


def test_a_pool_has_a_seat_for_each_part_and_no_more() -> None:
    pool = KVPool(2**20, 2)
    first, second = pool.take_seat(), pool.take_seat()
    assert first is not None
    assert second is not None
    assert (first.part, second.part, pool.take_seat()) == (0, 1, None)
    pool.free_seat(first)
    third = pool.take_seat()
    assert third is not None
    assert (third.part, third.writer) == (0, 3)
    assert first.secret == second.secret
    assert first.secret.hex() not in repr(first)
    assert repr(first.secret) not in repr(first)


def test_nobody_can_change_the_length_of_the_pool() -> None:
    pool = KVPool(2**20, 2)
    for num_bytes in (2**20, 2**22):
        with pytest.raises(PermissionError):
            os.ftruncate(pool.fd, num_bytes)


def test_a_part_that_is_too_small_says_which_size_is_enough(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="too small for one block of each kind; give it at least 1M"):
        Machine(tokenizer, part_bytes=64 * 1024).start("shared:64K")
    machine = Machine(tokenizer, part_bytes=2**20)
    machine.start("shared:1M").tier.close()


def test_an_engine_without_a_seat_says_that_replicas_share_a_tier(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="set replicas to 2 or more"):
        Engine(tokenizer, SETTING)


# Members alone, with real memory


def test_engines_of_other_models_use_one_pool_side_by_side() -> None:
    pool = KVPool(2**20, 4)
    forms = [FORM, replace(FORM, fingerprint="another model"), replace(FORM, sizes=(3000, 700), layout="other")]
    with contextlib.ExitStack() as stack:
        members = [stack.enter_context(contextlib.closing(Member(pool.fd, pool.take_seat(), form))) for form in (*forms, FORM)]
        for member, form in zip(members, forms, strict=False):
            member.store({(key_of(number), number % 2): content_of(form, number, number % 2) for number in range(8)})
        for member, form in zip(members, (*forms, FORM), strict=True):
            for number in range(8):
                assert member.read(key_of(number), number % 2) == content_of(form, number, number % 2)
        assert [member.index.num_elsewhere for member in members] == [0, 0, 0, 8]


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_to_writes_every_engine_gets_the_right_bytes_or_none(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, pool, contents = random.Random(seed), KVPool(160 * 1024, 3), dict[tuple[bytes, int], bytes]()
    num_right = 0
    with contextlib.ExitStack() as stack:
        members = [stack.enter_context(contextlib.closing(Member(pool.fd, pool.take_seat()))) for _ in range(3)]
        unreliable = UnreliableWrites(seed)
        monkeypatch.setattr(kv_tier_files.os, "pwrite", unreliable)  # of blocks, and of what is said of them
        for turn in range(24):
            number = draw.randrange(3)
            member = members[number]
            for _ in range(draw.randrange(1, 5)):
                key, group = key_of(draw.randrange(40)), draw.randrange(2)
                contents[key, group] = content_of(FORM, key[-1], group)
                member.tiers.offer(b"root", key, 0, group, 0)
            member.dispatch(contents)
            for key, group in contents:
                if draw.random() < 0.3:
                    reader = members[draw.randrange(3)]
                    found = reader.read(key, group)
                    assert found in (None, contents[key, group])
                    num_right += found is not None and reader.tiers.find(key, group).home is not None  # type: ignore[union-attr]
            if turn % 8 == 7:  # an engine dies, with what it has not written yet
                unreliable.late = [late for late in unreliable.late if not starts_in(pool, number, late[2])]
                member.close()
                pool.free_seat(member.seat)
                monkeypatch.setattr(kv_tier_files.os, "pwrite", unreliable.pwrite)
                members[number] = stack.enter_context(contextlib.closing(Member(pool.fd, pool.take_seat())))
                monkeypatch.setattr(kv_tier_files.os, "pwrite", unreliable)
            for each in members:
                each.tiers.check()
    assert num_right > 20


def starts_in(pool: KVPool, part: int, place: int) -> bool:
    return part * pool.part_bytes <= place < (part + 1) * pool.part_bytes


KILLED = """
import sys
import msgspec
from cloister.engine.kv_pool import PoolSeat
from tests.pool_member import FORM, Member, content_of, key_of
member, number = Member(int(sys.argv[1]), msgspec.msgpack.decode(bytes.fromhex(sys.argv[2]), type=PoolSeat)), 0
while True:
    member.store({(key_of(n % 50), n % 2): content_of(FORM, n % 50, n % 2) for n in range(number, number + 10)})
    number += 7
    print(number, flush=True)
"""


def test_an_engine_that_is_killed_while_it_writes_leaves_only_right_blocks_and_then_nothing() -> None:
    pool = KVPool(160 * 1024, 2)
    seat = pool.take_seat()
    assert seat is not None
    command = [sys.executable, "-c", KILLED, str(pool.fd), msgspec.msgpack.encode(seat).hex()]
    with (
        contextlib.closing(Member(pool.fd, pool.take_seat())) as reader,
        subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[pool.fd]) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline(), "it wrote nothing"
        assert process.stdout.readline()
        num_right = 0
        for number in range(50):
            found = reader.read(key_of(number), number % 2)
            assert found in (None, content_of(FORM, number, number % 2))
        os.kill(process.pid, signal.SIGKILL)
        process.wait(300)
        for number in range(50):
            found = reader.read(key_of(number), number % 2)
            assert found in (None, content_of(FORM, number, number % 2))
            num_right += found is not None
        assert num_right > 5
        pool.free_seat(seat)
        assert not any(os.pread(pool.fd, pool.part_bytes, 0))
        assert all(reader.read(key_of(number), number % 2) is None for number in range(50))
        assert reader.index.is_empty
