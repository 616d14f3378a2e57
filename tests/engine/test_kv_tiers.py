"""A tier with real files: what comes back has the same bits, and what does not is computed."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloister.cluster.virtual.engine import VirtualEngine, make_engine
from cloister.cluster.virtual.engine_shape import EngineShape
from cloister.engine import kv_tier_files, kv_tier_reads, kv_tier_worker
from cloister.engine.kv_pool import PoolSeat
from cloister.engine.kv_tier_files import TierFile
from cloister.engine.kv_tier_storage import KV_TIERS, TierSetting, parse_tiers
from cloister.kv import BlockGroup, KVFormat
from cloister.kv.tier_index import TRY_EVERY, KVTierIndex
from cloister.kv.tier_slots import TierBlock, TierLayout
from cloister.kv.tiers import KVTiers
from cloister.scheduler.kv_restores import TierEntry, TierRead
from cloister.text import Tokenizer
from cloister.types.clock import WallClock
from cloister.types.errors import ConfigError
from cloister.types.events import CacheUsage, Ended, Event, InspectCache, KVLoaded, KVStored, Scheduled, Stepped, Submit
from cloister.types.request import Request, SamplingParams, SequenceOutput
from cloister.types.scope import LOCAL_SCOPE, Scope, ScopeKind

PROMPT = list(b"a prompt that is longer than some blocks of tokens, and so worth keeping for the next turn")
NUM_HIT = (len(PROMPT) - 1) // 8 * 8


class Engine:
    """An engine of 24 blocks with a tier, whose steps the test makes."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        setting: str | None,
        pool: tuple[int, PoolSeat] | None = None,
        admission: str | None = None,
    ) -> None:
        # computing is slow, as the scheduler knows after some steps, so that loading is worth it on a busy machine too
        shape = EngineShape(num_blocks=24, step_s=1.0, token_s=0.1)
        self.engine: VirtualEngine = make_engine(shape, tokenizer, WallClock())
        self.core = self.engine.core
        if setting is not None:
            self.core.open_kv_tiers(setting, pool, admission=admission)
            self.core._tiers.on_news(self.core.input_queue.wake)  # type: ignore[union-attr]
        self.events: list[Event] = []
        self.outputs: list[SequenceOutput] = []

    @property
    def tier(self) -> Any:
        return self.core._tiers

    @property
    def index(self) -> Any:
        return self.tier.tiers.indexes[0]

    @property
    def file(self) -> Any:
        return self.tier.worker.files[0]

    def step(self) -> None:
        message = self.core.step()
        if message is not None:
            self.events += message.events
            self.outputs += message.outputs

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Makes steps until something has happened; a busy machine has long for it."""
        deadline_s = time.monotonic() + 300
        while not is_done():
            assert time.monotonic() < deadline_s, "it never happened"
            self.step()
            time.sleep(0.0002)

    def find(self, kind: type[Any], name: str) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind) and event.request_id == name]  # type: ignore[union-attr]

    def submit(self, name: str, token_ids: list[int] = PROMPT, scope: Scope | None = None) -> None:
        sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        request = Request(request_id=name, token_ids=token_ids, sampling=sampling)
        if scope is not None:
            request = Request(request_id=name, token_ids=token_ids, sampling=sampling, scope=scope)
        self.core.input_queue.put(Submit(request))

    def finish(self, name: str) -> list[int]:
        self.run_until(lambda: bool(self.find(Ended, name)))
        return [token_id for output in self.outputs if output.request_id == name for token_id in output.token_ids]

    def answer(self, name: str, token_ids: list[int] = PROMPT, scope: Scope | None = None) -> list[int]:
        self.submit(name, token_ids, scope)
        return self.finish(name)

    def crowd_out(self, first: int = 0, num_others: int = 4) -> None:
        """Others' prompts take all blocks of the device, and what they evict is written."""
        for number in range(first, first + num_others):
            self.answer(f"other {number}", [(31 * number + i) % 251 for i in range(90)])
        if self.tier is not None:
            self.run_until(lambda: not any(index._unwritten for index in self.tier.tiers.indexes))

    def num_cached(self, name: str) -> int:
        (scheduled,) = self.find(Scheduled, name)
        return int(scheduled.num_cached_tokens)

    def blocks_of(self, token_ids: list[int] = PROMPT) -> list[TierBlock]:
        request = Request(request_id="x", token_ids=token_ids, sampling=SamplingParams())
        keys, _, _ = self.engine.scheduler._requests.prefixes.chain_of(request, token_ids)
        return [block for key in keys if (block := self.index.find(key, 0)) is not None]

    def overwrite(self, block: TierBlock, content: bytes, offset: int = 0) -> None:
        os.pwrite(self.file.fd, content, self.index.layout.place(block.group, block.slot) + offset)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take its time: only tests of deadlines have one."""
    monkeypatch.setattr("cloister.scheduler.kv_restores.MIN_READ_S", 60.0)
    monkeypatch.setattr("cloister.scheduler.kv_load.KV_LOAD_TIMEOUT_S", 300.0)


@pytest.fixture
def make(tokenizer: Tokenizer) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make_one(setting: str | None, admission: str | None = None) -> Engine:
        made.append(Engine(tokenizer, setting, admission=admission))
        return made[-1]

    yield make_one
    for engine in made:
        if engine.tier is not None:
            engine.tier.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disks are read by calls in whose way a test can stand."""
    monkeypatch.setattr(kv_tier_files, "DISK_ENGINES", ("pread", "direct"))


@pytest.fixture(params=["disk", "host"])
def setting(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"disk:{tmp_path},10M" if request.param == "disk" else "host:10M"


def test_what_was_evicted_is_loaded_and_the_answer_is_the_same(make: Callable[..., Engine], setting: str) -> None:
    engine = make(setting)
    expected = make(None).answer("first")
    assert engine.answer("first") == expected
    engine.crowd_out()
    assert engine.answer("again") == expected
    assert engine.num_cached("again") == NUM_HIT
    (loaded,) = engine.find(KVLoaded, "again")
    assert (loaded.tier, loaded.complete, loaded.num_tokens) == (setting[:4], True, NUM_HIT)
    assert loaded.num_bytes == NUM_HIT * 16
    engine.run_until(lambda: not engine.index._unwritten)
    engine.answer("a step that reports", [1, 2, 3])
    stored = [stored for event in engine.events if isinstance(event, Stepped) for stored in event.stored]
    assert sum(part.num_bytes for part in stored) == len(engine.index) * 8 * 16
    assert engine.engine.scheduler.pool.num_used == 0


def test_a_file_has_no_name_and_nothing_of_a_request_in_it(make: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make(f"disk:{tmp_path},1M")
    engine.answer("first")
    engine.crowd_out()
    assert not list(tmp_path.iterdir())
    written = os.pread(engine.file.fd, 2**20, 0)
    assert len(written.strip(b"\0")) > 1000
    kv = make(None)
    kv.answer("first")
    plain = [content for content in kv.engine.runner._runner._program.export_blocks(range(24)) if content.strip(b"\0")]  # type: ignore[attr-defined]
    assert plain
    for block, content in zip(engine.blocks_of(), plain, strict=False):
        assert content[:32] not in written
        assert block.key not in written
        assert block.root not in written


def flip(engine: Engine, block: TierBlock, other: TierBlock) -> None:
    engine.overwrite(block, b"\xff", 40)


def cut(engine: Engine, block: TierBlock, other: TierBlock) -> None:
    engine.overwrite(block, bytes(64), 64)


def truncate(engine: Engine, block: TierBlock, other: TierBlock) -> None:
    os.ftruncate(engine.file.fd, engine.index.layout.place(block.group, block.slot) + 10)


def swap(engine: Engine, block: TierBlock, other: TierBlock) -> None:
    size = engine.index.layout.slot_bytes[0]
    engine.overwrite(block, os.pread(engine.file.fd, size, engine.index.layout.place(0, other.slot)))


@pytest.mark.parametrize("damage", [flip, cut, truncate, swap])
def test_a_damaged_block_is_a_miss_and_is_computed(make: Callable[..., Engine], tmp_path: Path, damage: Any) -> None:
    engine = make(f"disk:{tmp_path},1M")
    expected = engine.answer("first")
    engine.crowd_out()
    blocks = engine.blocks_of()
    assert len(blocks) == NUM_HIT // 8
    damage(engine, blocks[3], blocks[4])
    assert engine.answer("again") == expected
    assert engine.num_cached("again") <= 3 * 8
    assert not engine.find(KVLoaded, "again")[0].complete
    assert set(blocks) - set(engine.blocks_of()), "it would be tried again and again"


def test_an_older_block_of_a_slot_does_not_open_as_the_one_that_followed(make: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make(f"disk:{tmp_path},1M")
    expected = engine.answer("first")
    engine.crowd_out()
    (block, *_) = engine.blocks_of()
    place = engine.index.layout.place(0, block.slot)
    stale = os.pread(engine.file.fd, engine.index.layout.slot_bytes[0], place)
    engine.index.lose(block)
    engine.crowd_out(20)
    engine.answer("again")
    engine.crowd_out(30)
    (again, *_) = engine.blocks_of()
    assert (again.key, again.number) != (block.key, block.number)
    engine.overwrite(again, stale)
    assert engine.answer("and again") == expected
    assert engine.num_cached("and again") == 0


def test_a_scope_that_ended_takes_its_key_along(make: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make(f"disk:{tmp_path},1M")
    session = Scope(ScopeKind.SESSION, b"s", lifetime_s=1e6)
    engine.answer("first", scope=session)
    engine.crowd_out()
    root = engine.engine.scheduler._requests.prefixes._keys.root(session)  # type: ignore[union-attr]
    assert engine.tier.worker.find_secret(root) is not None
    engine.engine.clock._offset_s += 2e6
    engine.step()
    assert engine.tier.worker.find_secret(root) is None
    engine.answer("again", scope=session)
    assert engine.num_cached("again") == 0


def test_a_conversation_for_whose_key_no_memory_may_be_locked_is_not_stored_and_goes_on(
    make: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(f"disk:{tmp_path},1M")

    def draw_none() -> int:
        raise OSError(12, os.strerror(12))

    monkeypatch.setattr(engine.tier.worker._keys, "draw", draw_none)
    expected = engine.answer("first")
    engine.crowd_out()
    engine.crowd_out(30)
    assert engine.answer("first") == expected
    assert engine.num_cached("first") == 0
    assert not engine.blocks_of()
    assert caplog.text.count("raise the limit (`ulimit -l`)") == 1


def test_a_full_disk_stops_the_tier_once_and_no_request(
    make: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(f"disk:{tmp_path},1M")
    expected = engine.answer("first")
    engine.crowd_out()

    def write_none(fd: int, content: bytes, place: int) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(kv_tier_files.os, "pwrite", write_none)
    with caplog.at_level(logging.WARNING):
        engine.crowd_out(10)
        engine.crowd_out(20)
    assert sum("stores nothing more" in record.getMessage() for record in caplog.records) == 1
    assert "No space left" in caplog.text
    engine.index.check()
    assert engine.answer("again") == expected
    assert engine.num_cached("again") == NUM_HIT, "what was written before is lost"


@pytest.mark.usefixtures("calls")
def test_a_read_that_hangs_is_given_up_and_nobody_waits_for_the_tier_until_it_answers(
    make: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(f"disk:{tmp_path},1M")
    expected = engine.answer("first")
    engine.crowd_out()
    preadv, has_begun, may_go_on = os.preadv, threading.Event(), threading.Event()

    def hang(*arguments: Any) -> int:
        has_begun.set()
        may_go_on.wait(300)
        return preadv(*arguments)

    monkeypatch.setattr(kv_tier_reads.os, "preadv", hang)
    engine.submit("again")
    engine.run_until(has_begun.is_set)
    engine.engine.clock._offset_s += 200.0
    assert engine.finish("again") == expected
    assert engine.num_cached("again") == 0
    assert not engine.find(KVLoaded, "again")[0].complete
    assert engine.tier.worker.is_stuck(0)
    engine.crowd_out(10)
    assert engine.answer("and again") == expected
    assert not engine.find(KVLoaded, "and again")
    may_go_on.set()
    engine.run_until(lambda: not engine.tier.worker.is_stuck(0))
    engine.index._byte_s = 1e-9  # it was slow, which it would have to unlearn
    engine.crowd_out(20)
    assert engine.answer("at last") == expected
    assert engine.num_cached("at last") == NUM_HIT


def test_another_key_opens_nothing(make: Callable[..., Engine], setting: str) -> None:
    engine = make(setting)
    expected = engine.answer("first")
    engine.crowd_out()
    (block, *_) = engine.blocks_of()
    engine.tier.worker._key_of[block.root] = engine.tier.worker._keys.draw()
    assert engine.answer("again") == expected
    assert engine.num_cached("again") == 0
    assert block not in engine.blocks_of()


def test_a_disk_that_fills_up_loses_nothing_that_was_written(make: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make(f"disk:{tmp_path},8M")
    expected = engine.answer("first")
    engine.crowd_out()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((len(engine.index) + 8) * engine.index.layout.slot_bytes[0], hard))
    try:
        engine.crowd_out(10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert engine.index.is_stopped
    engine.index.check()
    assert engine.answer("again") == expected
    assert engine.num_cached("again") == NUM_HIT


@pytest.mark.usefixtures("calls")
def test_neighbours_are_read_at_once(make: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(f"disk:{tmp_path},1M")
    engine.answer("first")
    engine.crowd_out()
    sizes: list[int] = []
    preadv = os.preadv

    def note(fd: int, buffers: list[memoryview], place: int) -> int:
        sizes.append(len(buffers[0]))
        return preadv(fd, buffers, place)

    monkeypatch.setattr(kv_tier_reads.os, "preadv", note)
    engine.answer("again")
    assert engine.num_cached("again") == NUM_HIT
    assert len(sizes) < NUM_HIT // 8
    assert sum(sizes) == NUM_HIT // 8 * engine.index.layout.slot_bytes[0]


@pytest.mark.parametrize("engine_name", kv_tier_reads.DISK_ENGINES)
def test_every_way_to_read_a_disk_brings_the_same(make: Callable[..., Engine], tmp_path: Path, engine_name: str) -> None:
    engine = make(f"disk:{tmp_path},1M")
    try:
        engine.file._use(kv_tier_reads.ReadPattern(engine_name, 2**20, 2))
    except OSError as error:
        pytest.skip(f"{engine_name} cannot be used here: {error}")
    expected = engine.answer("first")
    engine.crowd_out()
    assert engine.answer("again") == expected
    assert engine.num_cached("again") == NUM_HIT


def test_a_tier_measures_how_to_read_it_when_it_starts(tmp_path: Path) -> None:
    for setting, engines in ((f"disk:{tmp_path},16M", kv_tier_reads.DISK_ENGINES), ("host:16M", kv_tier_reads.MEMORY_ENGINES)):
        with contextlib.closing(make_worker(setting)) as worker:
            ((num_bytes, elapsed_s),) = worker.probe()
            assert num_bytes > 0
            assert elapsed_s > 0
            assert worker.files[0].pattern.engine in engines
            assert worker.files[0].pattern.block_bytes >= kv_tier_files.FIRST_PATTERN.block_bytes


def test_a_tier_that_has_become_faster_is_noticed_while_requests_are_computed(
    make: Callable[..., Engine], setting: str
) -> None:
    engine = make(setting)
    expected = engine.answer("first")
    engine.crowd_out()
    engine.index._byte_s = 1e9
    engine.index._num_declined = TRY_EVERY - 2
    for number in range(2):
        assert engine.answer(f"slow {number}") == expected
        engine.crowd_out(10 * (number + 1))
    assert not [event for event in engine.events if isinstance(event, KVLoaded)]
    engine.run_until(lambda: not engine.engine.scheduler.kv_restores.is_trying)  # type: ignore[union-attr]
    assert engine.index._byte_s < 1e9, "it was not tried"
    engine.index._byte_s = 1e-9  # it approaches what was measured in quarters
    engine.crowd_out(1000)
    assert engine.answer("fast") == expected
    assert engine.num_cached("fast") == NUM_HIT


@pytest.mark.usefixtures("calls")
def test_a_slow_disk_delays_no_start_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, num_read = os.preadv, list[int]()

    def crawl(fd: int, buffers: list[memoryview], place: int) -> int:
        num_bytes = preadv(fd, buffers, place)
        time.sleep(num_bytes / 5e6)
        num_read.append(num_bytes)
        return num_bytes

    monkeypatch.setattr(kv_tier_reads.os, "preadv", crawl)
    monkeypatch.setattr(kv_tier_files, "_PROBE_READS_S", 0.1)
    with contextlib.closing(make_worker(f"disk:{tmp_path},64M")) as worker:
        ((num_bytes, elapsed_s),) = worker.probe()
    assert sum(num_read) <= 10 * 2**20
    assert num_bytes / elapsed_s < 20e6
    assert worker.files[0].pattern.block_bytes == 2**18, "what a slow disk brings would come late"


@pytest.mark.usefixtures("calls")
def test_a_load_that_turns_out_slow_is_cut_short_and_what_arrived_is_used(
    make: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(f"disk:{tmp_path},1M")
    expected = engine.answer("first")
    engine.crowd_out()
    monkeypatch.setattr(engine.file, "pattern", kv_tier_reads.ReadPattern("pread", 4096, 1))
    preadv, num_reads, may_go_on = os.preadv, list[int](), threading.Event()

    def slow_down(*arguments: Any) -> int:
        num_reads.append(1)
        if len(num_reads) > 3:
            may_go_on.wait(300)
        return preadv(*arguments)

    monkeypatch.setattr(kv_tier_reads.os, "preadv", slow_down)
    predict = engine.engine.scheduler.kv_restores._predict_s  # type: ignore[union-attr]
    monkeypatch.setattr(
        engine.engine.scheduler.kv_restores, "_predict_s", lambda start, end: 0.0 if start > 1 else predict(start, end)
    )
    assert engine.answer("again") == expected
    may_go_on.set()
    (loaded,) = engine.find(KVLoaded, "again")
    assert not loaded.complete
    assert 0 < engine.num_cached("again") < NUM_HIT
    engine.run_until(lambda: not engine.tier.worker.is_stuck(0))


def test_two_engines_use_one_directory(make: Callable[..., Engine], tmp_path: Path) -> None:
    engines = [make(f"disk:{tmp_path},1M") for _ in range(2)]
    for engine in engines:
        engine.answer("first")
        engine.crowd_out()
    engines[0].tier.close()
    engines[1].answer("again")
    assert engines[1].num_cached("again") == NUM_HIT


BOTH = "host:48K+disk:{},10M"
"""The first holds 12 blocks, about one prompt."""


def test_what_memory_lets_go_moves_to_the_disk_as_it_was_sealed_and_comes_back(
    make: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = make(BOTH.format(tmp_path))
    expected = engine.answer("first")
    engine.crowd_out(0, 2)
    lower = engine.tier.tiers.indexes[1]
    files = engine.tier.worker.files
    sealed = {block.key: files[0].read_sealed(block) for block in engine.blocks_of()}
    assert sealed
    engine.crowd_out(10)
    moved = [block for key in sealed if (block := lower.find(key, 0)) is not None]
    assert moved
    assert all(files[1].read_sealed(block) == sealed[block.key] for block in moved)
    assert engine.answer("again") == expected
    assert engine.num_cached("again") == NUM_HIT
    (loaded,) = engine.find(KVLoaded, "again")
    assert (loaded.tier, loaded.complete) == ("disk", True)
    stored = [stored for event in engine.events if isinstance(event, Stepped) for stored in event.stored]
    assert {one.tier for one in stored} == {"host", "disk"}
    engine.tier.tiers.check()


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_damaged_block_of_either_tier_is_a_miss(make: Callable[..., Engine], tmp_path: Path, damaged: int) -> None:
    engine = make(BOTH.format(tmp_path))
    expected = engine.answer("first")
    engine.crowd_out(0, 3)
    request = Request(request_id="x", token_ids=PROMPT, sampling=SamplingParams())
    keys, _, _ = engine.engine.scheduler._requests.prefixes.chain_of(request, PROMPT)
    blocks = [engine.tier.tiers.find(key, 0) for key in keys]
    assert {block.tier for block in blocks if block is not None} == {0, 1}
    number, block = next((number, block) for number, block in enumerate(blocks) if block is not None and block.tier == damaged)
    file = engine.tier.worker.files[damaged]
    os.pwrite(file.fd, bytes(64), file.place(block) + 32)
    assert engine.answer("again") == expected
    assert engine.num_cached("again") == 8 * number
    assert engine.tier.tiers.find(keys[number], 0) is not block


class UnreliableWrites:
    """Takes the place of `os.pwrite`: writes may be torn, lost, or come after later ones, and are said to have gone well."""

    def __init__(self, seed: int) -> None:
        self.draw, self.pwrite, self.late = random.Random(seed), os.pwrite, list[tuple[int, bytes, int]]()

    def __call__(self, fd: int, content: Any, place: int) -> int:
        match self.draw.randrange(8):
            case 0:
                self.pwrite(fd, content[: self.draw.randrange(len(content))], place)
            case 1:
                pass
            case 2:
                self.late.append((fd, bytes(content), place))
            case _:
                self.pwrite(fd, content, place)
        while self.late and self.draw.random() < 0.3:
            self.pwrite(*self.late.pop(self.draw.randrange(len(self.late))))
        return len(content)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_to_writes_a_block_has_its_own_bytes_or_none(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, form = (1000, 5000), KVFormat("model", 8, "two", (1000, 5000))
    layouts = [TierLayout(sizes, (num, num)) for num in (6, 20)]
    tiers = KVTiers([KVTierIndex(name, layout, number=n) for n, (name, layout) in enumerate(zip("ab", layouts, strict=True))])
    settings = [TierSetting.parse(given) for given in ("host:1M", f"disk:{tmp_path},1M")]
    files = [TierFile(s.name, s.storage.open(s), layout) for s, layout in zip(settings, layouts, strict=True)]
    draw, contents = random.Random(seed), dict[tuple[bytes, int], bytes]()
    num_right = 0
    with contextlib.closing(kv_tier_worker.TierWorker(files, form)) as worker:
        monkeypatch.setattr(kv_tier_files.os, "pwrite", UnreliableWrites(seed))
        for _ in range(25):
            for _ in range(draw.randrange(1, 6)):
                key, group = draw.randrange(20).to_bytes(32, "big"), draw.randrange(2)
                tiers.offer(b"root", key, 0, group, 0)
                contents[key, group] = bytes(list(key[-1:])) * sizes[group]
            for index in reversed(tiers.indexes):
                copies, index.copies = index.copies, []
                for source, block in copies:
                    if isinstance(source, int):
                        worker.write(block, contents[block.key, block.group])
                    else:
                        worker.move(source, block)
            settle(tiers, worker)
            for key, group in contents:
                if (block := tiers.find(key, group)) is not None and draw.random() < 0.3:
                    found = read_one(worker, block)
                    assert found in (None, contents[key, group])
                    num_right += found is not None
                    if found is None:
                        tiers.lose(block)
            tiers.check()
    assert num_right > 20


def settle(tiers: KVTiers, worker: kv_tier_worker.TierWorker) -> None:
    """Waits until everything is written."""
    deadline_s = time.monotonic() + 300
    while any(index._unwritten for index in tiers.indexes):
        assert time.monotonic() < deadline_s
        for tier, index in enumerate(tiers.indexes):
            for block, is_written in worker.take_written(tier)[0]:
                index.confirm(block, is_written=is_written)
        time.sleep(0.0005)


def read_one(worker: kv_tier_worker.TierWorker, block: TierBlock) -> bytes | None:
    """Reads one block as a load does; None if it does not open."""
    tier_bytes = [0, 0]
    tier_bytes[block.tier] = 1
    blocks = (block, None) if block.group == 0 else (None, block)
    worker.read(TierRead("request", [], b"root", [TierEntry(0, block.key, blocks)], tier_bytes, 60.0))
    deadline_s = time.monotonic() + 300
    while True:
        assert time.monotonic() < deadline_s
        for arrival in worker.take_read():
            if arrival.is_complete is not None:
                return bytes(arrival.objects[0].contents[block.group]) if arrival.is_complete else None
        time.sleep(0.0005)


def test_a_full_disk_below_leaves_the_tier_in_memory_as_it_was(
    make: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(BOTH.format(tmp_path))
    disk = engine.tier.worker.files[1]
    pwrite = os.pwrite

    def write_some(fd: int, content: bytes, place: int) -> int:
        if fd == disk.fd:
            raise OSError(28, os.strerror(28))
        return pwrite(fd, content, place)

    monkeypatch.setattr(kv_tier_files.os, "pwrite", write_some)
    engine.crowd_out()
    upper, lower = engine.tier.tiers.indexes
    assert (upper.is_stopped, lower.is_stopped, len(lower)) == (False, True, 0)
    expected = engine.answer("first")
    engine.crowd_out(10, 2)
    assert engine.answer("again") == expected
    assert engine.find(KVLoaded, "again")[0].tier == "host"
    assert engine.num_cached("again") > 0
    engine.tier.tiers.check()


def test_a_key_stays_while_either_tier_has_a_block_of_its_scope(make: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make(BOTH.format(tmp_path))
    session = Scope(ScopeKind.SESSION, b"s", lifetime_s=1e6)
    engine.answer("first", scope=session)
    engine.crowd_out()
    root = engine.engine.scheduler._requests.prefixes._keys.root(session)  # type: ignore[union-attr]
    upper, lower = engine.tier.tiers.indexes
    assert root not in upper.kept
    assert root in lower.kept
    assert engine.tier.worker.find_secret(root) is not None
    engine.engine.clock._offset_s += 2e6
    engine.step()
    assert engine.tier.worker.find_secret(root) is None


KILLED = """
import os, sys, tempfile
from pathlib import Path
from cloister.engine.kv_tier_files import TierFile
from cloister.engine.kv_tier_storage import TierSetting
from cloister.engine.kv_tier_worker import TierWorker
from cloister.kv import BlockGroup, KVFormat
from cloister.kv.tier_slots import TierLayout
from cloister.kv.tier_index import KVTierIndex
setting = TierSetting.parse(f"disk:{sys.argv[1]},64M")
layout = TierLayout.plan(setting.limit_bytes, (100_000,), [BlockGroup(8)])
file = TierFile("disk", setting.storage.open(setting), layout)
worker = TierWorker([file], KVFormat("model", 8, "one", (100_000,)))
index, number = KVTierIndex("disk", layout), 0
while True:
    for _ in range(50):
        number += 1
        index.offer(b"root", number.to_bytes(32, "big"), 0, 0, 0)
    copies, index.copies = index.copies, []
    for _, stored in copies:
        worker.write(stored, bytes(100_000))
    while index._unwritten:
        for block, is_written in worker.take_written(0)[0]:
            index.confirm(block, is_written=is_written)
    print(number, flush=True)
"""


def test_an_engine_that_is_killed_while_it_writes_leaves_nothing_in_the_directory(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline(), "it wrote nothing"
        os.kill(process.pid, signal.SIGKILL)
        process.wait(300)
    assert not list(tmp_path.iterdir())
    with contextlib.closing(make_worker(f"disk:{tmp_path},1M")) as worker:
        assert worker.probe()[0][0] > 0


def make_worker(given: str) -> kv_tier_worker.TierWorker:
    setting = TierSetting.parse(given)
    layout = TierLayout.plan(setting.limit_bytes, (1000,), [BlockGroup(8)])
    form = KVFormat("model", 8, "one", (1000,))
    file = TierFile(setting.name, setting.storage.open(setting), layout, is_memory=setting.storage.is_memory)
    return kv_tier_worker.TierWorker([file], form)


@pytest.mark.parametrize(
    ("given", "name", "path", "num_bytes"),
    [
        ("host:4G", "host", "", 4 * 2**30),
        ("host:1.5m", "host", "", 3 * 2**19),
        ("disk:/a/b", "disk", "/a/b", None),
        ("disk:/a,b,2T", "disk", "/a,b", 2 * 2**40),
        ("disk:C,10K", "disk", "C", 10240),
    ],
)
def test_a_setting_says_which_tier_and_where(given: str, name: str, path: str, num_bytes: int | None) -> None:
    setting = TierSetting.parse(given)
    assert (setting.name, setting.path, setting.num_bytes) == (name, path, num_bytes)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("disk:/a,1G+host:4G", [("host", "", 4 * 2**30), ("disk", "/a", 2**30)]),
        ("host:4G+disk:/a+b", [("host", "", 4 * 2**30), ("disk", "/a+b", None)]),
        ("disk:/a+host/b,1G", [("disk", "/a+host/b", 2**30)]),
    ],
)
def test_a_setting_may_name_both_tiers(given: str, expected: list[tuple[str, str, int | None]]) -> None:
    assert [(tier.name, tier.path, tier.num_bytes) for tier in parse_tiers(given)] == expected


@pytest.mark.parametrize(
    "given", ["disk", "disk:", "disk:,4G", "disk:/a,lots", "host:0", "host:64", "host:-1G", "host:infG", "tape:4G"]
)
def test_a_wrong_setting_is_answered_with_a_right_one(given: str) -> None:
    with pytest.raises(ConfigError, match=r"such as host:4G|choose one of: host, shared, peer, disk"):
        TierSetting.parse(given)


def test_a_directory_that_cannot_be_used_says_so(make: Callable[..., Engine], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory; name one that this user may write to"):
        make(f"disk:{tmp_path / 'file' / 'below'},1M")
    with pytest.raises(ConfigError, match="Not a directory"):
        make(f"disk:{tmp_path / 'file' / 'below'}")
    with pytest.raises(ConfigError, match="too small for one block of each kind; give it at least"):
        make("host:1K")
    assert make(f"disk:{tmp_path}").index.layout.num_bytes > 2**20


def test_a_directory_that_is_not_there_is_made_for_this_user_alone(make: Callable[..., Engine], tmp_path: Path) -> None:
    for name, size in (("one", ",1M"), ("two", "")):
        make(f"disk:{tmp_path / 'new' / name}{size}")
        assert (tmp_path / "new" / name).stat().st_mode & 0o777 == 0o700


def test_a_tier_is_divided_as_the_device_is() -> None:
    groups = [BlockGroup(100), BlockGroup(20, 16, 4), BlockGroup.of_state(10)]
    layout = TierLayout.plan(100 * 2**20, (5000, 5000, 50_000), groups)
    assert layout.slot_bytes == (8192, 8192, 53_248)
    assert layout.num_bytes <= 100 * 2**20
    assert [num // layout.num_slots[2] for num in layout.num_slots] == [10, 2, 1]
    assert layout.place(1, 0) == layout.num_slots[0] * 8192
    assert layout.place(2, 1) == layout.place(1, layout.num_slots[1]) + 53_248


@pytest.mark.parametrize(("admission", "num_cached"), [("always", 0), ("tinylfu", NUM_HIT)])
def test_a_prompt_that_is_sent_often_stays_in_a_small_tier_where_uses_are_counted(make, admission, num_cached) -> None:
    engine = make("host:120K", admission=admission)
    expected = engine.answer("first")
    for turn in range(3):
        engine.crowd_out(4 * turn, 4)
        engine.answer(f"again {turn}")
    engine.crowd_out(12, 8)
    assert engine.answer("last") == expected
    assert engine.num_cached("last") == num_cached


def test_every_tier_says_what_it_endangers() -> None:
    assert KV_TIERS.names() == ("host", "shared", "peer", "disk")
    assert all(threat.mitigations for _, threat in KV_TIERS)


def test_what_a_scope_has_in_a_tier_is_reported_dropped_and_gone_from_the_metrics(make, tmp_path: Path) -> None:
    engine = make(f"disk:{tmp_path},64M")
    ann = Scope(ScopeKind.TENANT, b"ann")
    engine.answer("ann's", PROMPT, ann)
    engine.crowd_out()
    num_bytes = engine.index.layout.block_bytes[0]

    def inspect(scope: Scope, *, drop: bool = False) -> dict[str, CacheUsage]:
        engine.core.input_queue.put(InspectCache("call", scope, drop))
        message = engine.core.step()
        (reply,) = message.replies
        assert reply.call_id == "call"
        return {usage.place: usage for usage in reply.places}

    def told() -> KVStored:
        return next(stored for event in reversed(engine.events) if isinstance(event, Stepped) for stored in event.stored)

    full = told()
    before = inspect(ann, drop=True)
    assert before["device"].num_blocks == 0
    assert before["disk"].num_blocks * num_bytes == before["disk"].num_bytes > 0
    assert before["disk"].num_tokens == before["disk"].num_blocks * 8
    assert before["disk"].oldest_s >= before["disk"].used_s >= 0
    assert inspect(ann)["disk"].num_blocks == 0
    assert inspect(Scope(ScopeKind.TENANT, b"bob"))["disk"].num_blocks == 0
    assert inspect(LOCAL_SCOPE)["disk"].num_blocks == len(engine.index) > 0
    engine.answer("others'", [9] * 20)
    assert told().used_bytes == engine.index.used_bytes < full.used_bytes
    assert told().oldest_s is not None
    engine.answer("again", PROMPT, ann)
    assert engine.num_cached("again") == 0


def make_as_fast_as_computing(engine: Engine) -> None:
    """Has the scheduler believe that loading takes as long as computing, so that it does both."""
    scheduler = engine.engine.scheduler
    scheduler.kv_loads.overhead_s = 0.0
    num_bytes = sum(engine.index.layout.block_bytes[block.group] for block in engine.blocks_of())
    engine.index._byte_s = scheduler.kv_restores._predict_s(0, NUM_HIT // 8) / num_bytes


def test_the_end_of_a_prefix_comes_while_its_front_is_computed(tokenizer: Tokenizer) -> None:
    engine = Engine(tokenizer, "host:1M")
    first = engine.answer("first")
    engine.crowd_out()
    make_as_fast_as_computing(engine)
    engine.submit("again")
    engine.step()
    worker = engine.tier.worker
    (load,) = engine.engine.scheduler.kv_loads.loading.values()
    assert load.restore is not None
    deadline_s = time.monotonic() + 300
    while not any(job.is_complete for job in worker._reads.values()):
        assert time.monotonic() < deadline_s, "it is not read"
        time.sleep(0.001)
    assert engine.finish("again") == first
    num_cached = engine.find(Ended, "again")[0].num_cached_tokens
    assert 0 < num_cached < NUM_HIT
    assert engine.find(KVLoaded, "again")[0].num_bytes > num_cached // 8 * (engine.index.layout.block_bytes[0] - 1)
    assert not worker._reads
    assert not worker._given_up


def test_a_read_that_begins_again_is_not_cancelled_with_the_first_one(tokenizer: Tokenizer) -> None:
    engine = Engine(tokenizer, "host:1M")
    first = engine.answer("first")
    engine.crowd_out()
    make_as_fast_as_computing(engine)
    engine.submit("again")
    engine.step()
    scheduler = engine.engine.scheduler
    (sequence,) = scheduler._requests.running.values()
    scheduler._requests.preempt(sequence, time.monotonic())  # cancels its read
    engine.index._byte_s = 1e-12  # the next one is from one side, and waited for
    assert engine.finish("again") == first
    loaded = engine.find(KVLoaded, "again")[-1]
    assert loaded.complete
    assert loaded.num_tokens == NUM_HIT
