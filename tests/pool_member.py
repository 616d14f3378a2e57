"""A member of a shared pool with its worker, whose blocks a test makes; and an engine that loads whatever a tier has."""

from __future__ import annotations

import os
import time

from cloister.engine.core import EngineCore
from cloister.engine.kv_pool import PoolSeat
from cloister.engine.kv_pool_member import PoolMember
from cloister.engine.kv_tier_worker import TierWorker
from cloister.kv import BlockGroup, KVFormat
from cloister.kv.tiers import KVTiers
from cloister.launch import build_engine
from cloister.scheduler import kv_restores
from cloister.scheduler.kv_loads import KVLoads
from cloister.scheduler.kv_restores import TierEntry, TierRead
from cloister.types.config import EngineConfig

FORM = KVFormat("model", 8, "two", (1000, 5000))


class Member:
    """Stores and reads blocks of one format, which tests make (`content_of`)."""

    def __init__(self, fd: int, seat: PoolSeat | None, form: KVFormat = FORM) -> None:
        assert seat is not None
        self.seat = seat
        groups = [BlockGroup(8) for _ in form.sizes]
        self.member = PoolMember(os.dup(fd), seat, form, groups, "shared")
        self.index, self.tiers = self.member.index, KVTiers([self.member.index])
        self.worker = TierWorker([self.member.file], form, self.member.find_cipher)

    def store(self, contents: dict[tuple[bytes, int], bytes]) -> None:
        for key, group in contents:
            self.tiers.offer(b"root", key, 0, group, 0)
        self.dispatch(contents)

    def dispatch(self, contents: dict[tuple[bytes, int], bytes]) -> None:
        """As `EngineTiers`: what is gone is told before its slot is written again."""
        self.member.announce(self.worker.find_secret)
        copies, self.index.copies = self.index.copies, []
        for _, block in copies:
            self.worker.write(block, contents[block.key, block.group])
        deadline_s = time.monotonic() + 300
        while self.index._unwritten:
            assert time.monotonic() < deadline_s
            for block, is_written in self.worker.take_written(0)[0]:
                self.index.confirm(block, is_written=is_written)
        self.member.announce(self.worker.find_secret)

    def read(self, key: bytes, group: int) -> bytes | None:
        """Reads one block as a load does; None if there is none, or it does not open."""
        self.member.follow()
        block = self.tiers.find(key, group)
        if block is None:
            return None
        self.tiers.touch([block])
        blocks = tuple(block if number == group else None for number in range(2))
        self.worker.read(TierRead("request", [], b"root", [TierEntry(0, block.key, blocks)], [1], 60.0))
        deadline_s = time.monotonic() + 300
        while True:
            assert time.monotonic() < deadline_s
            for arrival in self.worker.take_read():
                if arrival.unreadable is not None:
                    self.tiers.lose(arrival.unreadable)
                if arrival.is_complete is not None:
                    return bytes(arrival.objects[0].contents[group]) if arrival.is_complete else None
            time.sleep(0.0002)

    def close(self) -> None:
        self.worker.close()


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content_of(form: KVFormat, number: int, group: int) -> bytes:
    return bytes([number, len(form.fingerprint) % 256]) * (form.sizes[group] // 2)


def build_loading_engine(config: EngineConfig) -> EngineCore:
    """Entry point of an engine that loads what a tier has, however slow the machine is at the moment."""
    kv_restores.MIN_READ_S = 60.0  # type: ignore[misc]
    KVTiers.predict_s = lambda self, num_bytes: 0.0  # type: ignore[method-assign]
    KVLoads.predict_overhead_s = lambda self: 0.0  # type: ignore[method-assign]
    kv_restores.KVRestores.is_overtaken = lambda *_: False  # type: ignore[method-assign]
    return build_engine(config)
