"""Tiers below the device, between two steps: connects the scheduler's decisions, the program's blocks, and the threads that
write and read them (decisions/0029)."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cloister.engine.kv_peer_loans import PeerLoans
from cloister.engine.kv_pool import PoolSeat
from cloister.engine.kv_pool_member import PoolMember
from cloister.engine.kv_tier_codec import TierCodec
from cloister.engine.kv_tier_files import TierFile
from cloister.engine.kv_tier_storage import TierSetting
from cloister.engine.kv_tier_worker import TierArrival, TierWorker
from cloister.engine.kv_transfer import KVBlocks
from cloister.kv import KVFormat
from cloister.kv.tier_admission import DEFAULT_ADMISSION, TIER_ADMISSIONS, TierAdmission
from cloister.kv.tier_index import STORE_SHARE, KVTierIndex
from cloister.kv.tier_slots import TierBlock, TierLayout
from cloister.kv.tiers import KVTiers
from cloister.scheduler import Scheduler
from cloister.scheduler.kv_loads import MAX_STEP_BYTES
from cloister.scheduler.kv_restores import TRIAL, TierRead
from cloister.types.events import KVStored

FIND_OLDEST_EVERY_S: Final = 1.0
"""How often to look for the oldest block of a tier while it stores."""


class TierTotals:
    """The last report on one tier.

    Args:
        index: its contents.
    """

    def __init__(self, index: KVTierIndex) -> None:
        self._index = index
        self._num_told_bytes = 0
        self._told_used_bytes: int | None = None
        self._oldest_at_s: float | None = None
        self._oldest_found_s = -math.inf

    def take(self, now: float) -> KVStored | None:
        """Returns what was written since the last call and what the tier holds, if either has changed."""
        num_bytes, used_bytes = self._index.num_stored_bytes - self._num_told_bytes, self._index.used_bytes
        if not num_bytes and used_bytes == self._told_used_bytes:
            return None
        self._num_told_bytes += num_bytes
        self._told_used_bytes = used_bytes
        if now - self._oldest_found_s >= FIND_OLDEST_EVERY_S or not used_bytes:
            self._oldest_at_s, self._oldest_found_s = self._index.find_oldest_s(), now
        oldest_s = None if self._oldest_at_s is None else max(0.0, now - self._oldest_at_s)
        return KVStored(self._index.name, num_bytes, used_bytes, oldest_s)


class TierThreads(Protocol):
    """Writes and reads blocks beside the steps, as `TierWorker` does."""

    @property
    def files(self) -> Sequence[TierFile]: ...

    def probe(self) -> list[tuple[int, float]]: ...

    def on_news(self, wake: Callable[[], None]) -> None: ...

    def choose_level(self, byte_s: float) -> None: ...

    def take_choice(self) -> bool: ...

    def use_layouts(self, layouts: Sequence[TierLayout]) -> None: ...

    def write(self, block: TierBlock, content: bytes) -> None: ...

    def move(self, block: TierBlock, moved: TierBlock) -> None: ...

    def read(self, read: TierRead) -> None: ...

    def cancel(self, request_id: str) -> tuple[int, int, float] | None: ...

    def find_secret(self, root: bytes) -> bytes | None: ...

    def forget(self, root: bytes) -> None: ...

    def is_stuck(self, tier: int) -> bool: ...

    @property
    def has_read(self) -> bool: ...

    def take_read(self) -> list[TierArrival]: ...

    def take_written(self, tier: int) -> tuple[list[tuple[TierBlock, bool]], float]: ...

    def close(self) -> None: ...


MakeTierThreads = Callable[[Sequence[TierFile], KVFormat, Callable[[TierBlock], AESGCM | None], TierCodec | None], TierThreads]


@dataclass(frozen=True, slots=True)
class TierMachine:
    """What tiers need of a machine besides their files. A simulator has another one.

    Attributes:
        make_threads: makes the object that writes and reads.
        process_s, thread_s: processor time of the process, and of the engine's thread.
        draw_bytes: draws secrets.
    """

    make_threads: MakeTierThreads = TierWorker
    process_s: Callable[[], float] = time.process_time
    thread_s: Callable[[], float] = time.thread_time
    draw_bytes: Callable[[int], bytes] = secrets.token_bytes


def _find_nothing(_: TierBlock) -> AESGCM | None:
    """Opens no block of another engine."""
    return None


class EngineTiers:
    """The tiers of one engine.

    Args:
        blocks: the KV of its program.
        settings: which tiers, and where; the fastest first.
        codec: how blocks are compressed (`kv_tier_codec`); None: not at all.
        admission: which blocks full tiers store (`kv_tier_admission`); None: the default.
        pool: descriptor of the pool that engines share, and this one's seat; None: it has none.
        machine: where it runs.

    Raises:
        ConfigError: one cannot be used, or nothing can be compressed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        blocks: KVBlocks,
        settings: Sequence[TierSetting],
        pool: tuple[int, PoolSeat] | None = None,
        codec: str | None = None,
        admission: str | None = None,
        machine: TierMachine = TierMachine(),
    ) -> None:
        self._machine = machine
        self._loads, self._blocks = scheduler.kv_loads, blocks
        self._codec = None if codec is None else TierCodec(blocks.planes, blocks.form.sizes, codec)
        self._is_choosing = False
        self._num_shares, self._groups = max(1, scheduler.config.cache_scopes), scheduler.pool.groups
        self._limits = [setting.limit_bytes for setting in settings]
        salt = machine.draw_bytes(16)  # of this engine's process alone
        make = TIER_ADMISSIONS.get(admission or DEFAULT_ADMISSION)

        def admit(num_slots: int) -> TierAdmission:
            return make(num_slots, salt)

        indexes, files = list[KVTierIndex](), list[TierFile]()
        self._member: PoolMember | None = None
        self._loans: PeerLoans | None = None
        for setting in settings:
            number = len(indexes)
            if pool is not None and setting.is_shared:
                self._member = PoolMember(
                    *pool, blocks.form, self._groups, "shared", self._num_shares, number, admit, lends=setting.lends
                )
                indexes.append(self._member.index)
                files.append(self._member.file)
                if setting.lends:
                    self._loans = PeerLoans(self._member, self._num_shares, number + 1, admit)
                    indexes.append(self._loans.index)
                    files.append(self._loans.file)
                continue
            layout = self._plan(setting.limit_bytes)
            indexes.append(KVTierIndex(setting.name, layout, self._num_shares, number, make_admission=admit))
            storage = setting.storage
            files.append(TierFile(setting.name, storage.open(setting), layout, is_memory=storage.is_memory))
        self.tiers = KVTiers(indexes)
        find_cipher = _find_nothing if self._member is None else self._member.find_cipher
        codec_of_threads = self._codec if self._member is None else None  # `launch.settings` refuses it with a pool
        self.worker = machine.make_threads(files, blocks.form, find_cipher, codec_of_threads)
        for index, measured in zip(indexes, self.worker.probe(), strict=True):
            index.learn(*measured)
        scheduler.use_tiers(self.tiers)
        assert scheduler.kv_restores is not None
        self._restores = scheduler.kv_restores
        self._totals = [TierTotals(index) for index in indexes]
        self._dispatched_s = machine.process_s()
        self._wake: Callable[[], None] = lambda: None

    def _plan(self, limit_bytes: int) -> TierLayout:
        """Returns the slots of a tier of this size, for blocks as they are stored."""
        sizes = self._blocks.form.sizes
        stored = sizes if self._codec is None else self._codec.stored_bytes
        return TierLayout.plan(limit_bytes, stored, self._groups, self._num_shares, content_bytes=sizes)

    def on_news(self, wake: Callable[[], None]) -> None:
        """Has `wake` called, from any thread, when there is something to take."""
        self._wake = wake
        self.worker.on_news(wake)

    def serve(self, now: float) -> None:
        """Handles finished writes and reads, and announcements of other engines."""
        if self._is_choosing and self.worker.take_choice():
            self._use_choice()
        if self._loans is not None:
            self._loans.follow(now)
        for tier, index in enumerate(self.tiers.indexes):
            written, busy_s = self.worker.take_written(tier)
            if written:
                index.spend(busy_s, [block for block, _ in written])
                for block, is_written in written:
                    index.confirm(block, is_written=is_written)
            index.is_stopped = self.worker.files[tier].is_full
            index.is_stuck = self.worker.is_stuck(tier)
        if self._member is not None and self._member.follow():
            self._wake()
        if not self.worker.has_read or self._loads.num_waiting_bytes >= 2 * MAX_STEP_BYTES:
            return
        for arrival in self.worker.take_read():
            self._loads.arrive(arrival.read.request_id, arrival.objects)
            if arrival.read.restore is not None:
                arrival.read.restore.note(arrival.measured)
            if arrival.unreadable is not None:
                self.tiers.lose(arrival.unreadable)
            if arrival.is_complete is not None:
                self._finish(arrival, now, is_complete=arrival.is_complete)
            elif self._restores.is_overtaken(arrival.read, arrival.num_arrived, arrival.measured):
                self.worker.cancel(arrival.read.request_id)
                self._finish(arrival, now, is_complete=False)

    def _finish(self, arrival: TierArrival, now: float, *, is_complete: bool) -> None:
        for index, (num_bytes, elapsed_s) in zip(self.tiers.indexes, arrival.measured, strict=True):
            # of a restore from both sides, this and the saved time are known when the sides have met
            if num_bytes and arrival.read.restore is None:
                index.learn(num_bytes, elapsed_s)
        if arrival.read.request_id == TRIAL:
            self._restores.is_trying = False
        elif arrival.num_bytes and arrival.read.restore is None:
            self.tiers.earn(max(0.0, arrival.saved_s), arrival.read.owner)
        read_s = sum(elapsed_s for _, elapsed_s in arrival.measured)
        self._loads.finish(arrival.read.request_id, now, is_complete=is_complete, transfer_s=read_s)

    def dispatch(self) -> None:
        """Copies what was evicted, and begins reads. Call it between planning a step and running it, which wipes what was
        evicted."""
        worker = self.worker
        if self._member is not None:
            self._member.announce(worker.find_secret)
        for root in self.tiers.take_ended_roots():
            worker.forget(root)
        for index in reversed(self.tiers.indexes):
            self._copy(index)
        if self._loads.cancelled_reads:  # before others begin, perhaps for the same request
            cancelled, self._loads.cancelled_reads = self._loads.cancelled_reads, []
            for request_id in cancelled:
                if (late := worker.cancel(request_id)) is not None:
                    tier, num_bytes, elapsed_s = late
                    self.tiers.indexes[tier].learn(num_bytes, elapsed_s)
        for read in self._restores.take_reads():
            worker.read(read)
        self._dispatched_s = self._machine.process_s()

    def _copy(self, index: KVTierIndex) -> None:
        """Starts the copies to one tier, and from it to the one below."""
        if not index.copies:
            return
        started_s = self._machine.thread_s()
        copies, index.copies = index.copies, []
        contents = iter(self._blocks.export([source for source, _ in copies if isinstance(source, int)]))
        if self._codec is not None and (self._codec.chosen is None or self._is_choosing):
            self._sample([block for _, block in copies], list(contents))
            return
        for source, block in copies:
            if isinstance(source, int):
                self.worker.write(block, next(contents))
            else:
                self.worker.move(source, block)
        index.spend(self._machine.thread_s() - started_s, [block for source, block in copies if isinstance(source, int)])

    def _sample(self, blocks: Sequence[TierBlock], contents: Sequence[bytes]) -> None:
        """Gives the codec blocks to measure, and stores none of them: the size of their slots is not yet known."""
        assert self._codec is not None
        for block, content in zip(blocks, contents, strict=True):
            self.tiers.indexes[block.tier].confirm(block, is_written=False)
            if not self._is_choosing and self._codec.add_sample(block.group, content):
                self._is_choosing = True
                self.worker.choose_level(self.tiers.indexes[-1].predict_s(1))

    def _use_choice(self) -> None:
        """Gives slots the size that blocks have at the chosen level; nothing has been stored yet."""
        self._is_choosing = False
        layouts = [self._plan(limit_bytes) for limit_bytes in self._limits]
        self.worker.use_layouts(layouts)
        for index, layout in zip(self.tiers.indexes, layouts, strict=True):
            index.use_layout(layout)

    def note_step(self, owners: Sequence[bytes | None]) -> None:
        """Notes that a step for these owners has run since `dispatch`: storing may take a small part of its processor time.
        Wall-clock time would let it take more on a busy machine, where that hurts others most."""
        self.tiers.earn_step(STORE_SHARE * (self._machine.process_s() - self._dispatched_s), owners)

    def take_stored(self, now: float) -> tuple[KVStored, ...]:
        """Returns what was written to each tier since the last call and what it holds, if either has changed."""
        told = (totals.take(now) for totals in self._totals)
        return tuple(stored for stored in told if stored is not None)

    def close(self) -> None:
        """Ends the threads and forgets all keys."""
        self.worker.close()
