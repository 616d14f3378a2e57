"""A tier below the device, between two steps: joins what the scheduler decides, the program's blocks, and the threads that
write and read them (decisions/0029)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from cloister.engine.kv_tier_storage import TierSetting
from cloister.engine.kv_tier_worker import TierWorker
from cloister.engine.kv_transfer import KVBlocks
from cloister.kv.tiers import STORE_SHARE, KVTierIndex, TierLayout
from cloister.scheduler import Scheduler
from cloister.scheduler.kv_loads import MAX_STEP_BYTES
from cloister.scheduler.kv_restores import TRIAL
from cloister.types.errors import ConfigError
from cloister.types.events import KVStored

FIND_OLDEST_EVERY_S: Final = 1.0
"""How often the oldest block of a tier is looked for while it stores."""


class KVTier:
    """The tier of one engine.

    Args:
        blocks: the KV of its program.
        setting: which tier, and where.

    Raises:
        ConfigError: it cannot be used.
    """

    def __init__(self, scheduler: Scheduler, blocks: KVBlocks, setting: TierSetting) -> None:
        self._loads, self._blocks = scheduler.kv_loads, blocks
        num_shares = max(1, scheduler.config.cache_scopes)
        layout = TierLayout.plan(setting.limit_bytes, blocks.form.sizes, scheduler.pool.groups, num_shares)
        self.index = KVTierIndex(setting.name, layout, num_shares)
        self.worker = TierWorker(setting.storage.open(setting), layout, blocks.form, is_memory=setting.storage.is_memory)
        try:
            self.index.learn(*self.worker.probe())
        except (OSError, TimeoutError) as error:
            raise ConfigError(
                f"the KV tier {setting.name} cannot be written and read in time: {type(error).__name__}; choose another place",
                param="kv_tier",
            ) from error
        scheduler.use_tier(self.index)
        assert scheduler.kv_restores is not None
        self._restores = scheduler.kv_restores
        self._num_told_bytes = 0
        self._told_used_bytes: int | None = None
        self._oldest_at_s: float | None = None
        self._oldest_found_s = -math.inf
        self._dispatched_s = time.process_time()

    def on_news(self, wake: Callable[[], None]) -> None:
        """Has `wake` called, from any thread, when there is something to take."""
        self.worker.on_news(wake)

    def serve(self, now: float) -> None:
        """Takes what was written and read."""
        written, busy_s = self.worker.take_written()
        if written:
            self.index.spend(busy_s, [block for block, _ in written])
            for block, is_written in written:
                self.index.confirm(block, is_written=is_written)
        self.index.is_stopped = self.worker.is_full
        self.index.is_stuck = self.worker.is_stuck
        if self._loads.num_waiting_bytes >= 2 * MAX_STEP_BYTES:
            return
        for arrival in self.worker.take_read():
            self._loads.arrive(arrival.request_id, arrival.objects)
            if arrival.unreadable is not None:
                self.index.lose(arrival.unreadable)
            if arrival.is_complete is not None:
                if arrival.num_bytes:
                    self.index.learn(arrival.num_bytes, arrival.elapsed_s)
                if arrival.request_id == TRIAL:
                    self._restores.is_trying = False
                elif arrival.num_bytes:
                    self.index.earn(max(0.0, arrival.saved_s), arrival.owner)
                self._loads.finish(arrival.request_id, now, is_complete=arrival.is_complete)

    def dispatch(self) -> None:
        """Copies what was evicted, and begins reads. Call it between planning a step and running it, which wipes what was
        evicted."""
        index, worker = self.index, self.worker
        if index.ended_roots:
            ended, index.ended_roots = index.ended_roots, []
            for root in ended:
                worker.forget(root)
        if index.stores:
            started_s = time.thread_time()
            stores, index.stores = index.stores, []
            worker.write([stored for _, stored in stores], self._blocks.export([block for block, _ in stores]))
            index.spend(time.thread_time() - started_s, [stored for _, stored in stores])
        if self._restores.reads:
            reads, self._restores.reads = self._restores.reads, []
            for read in reads:
                worker.read(read)
        self._dispatched_s = time.process_time()
        if self._loads.cancelled_reads:
            cancelled, self._loads.cancelled_reads = self._loads.cancelled_reads, []
            for request_id in cancelled:
                if (late := worker.cancel(request_id)) is not None:
                    index.learn(*late)

    def note_step(self) -> None:
        """Notes that a step has run since `dispatch`: storing may take a small part of its processor time. Times on the clock
        would let it take more on a busy machine, where it takes most from others."""
        self.index.earn(STORE_SHARE * (time.process_time() - self._dispatched_s))

    def take_stored(self, now: float) -> KVStored | None:
        """Returns what was written since the last call and what the tier holds, if either has changed."""
        num_bytes, used_bytes = self.index.num_stored_bytes - self._num_told_bytes, self.index.used_bytes
        if not num_bytes and used_bytes == self._told_used_bytes:
            return None
        self._num_told_bytes += num_bytes
        self._told_used_bytes = used_bytes
        if now - self._oldest_found_s >= FIND_OLDEST_EVERY_S or not used_bytes:
            self._oldest_at_s, self._oldest_found_s = self.index.find_oldest_s(), now
        oldest_s = None if self._oldest_at_s is None else max(0.0, now - self._oldest_at_s)
        return KVStored(self.index.name, num_bytes, used_bytes, oldest_s)

    def close(self) -> None:
        """Ends the threads and forgets all keys."""
        self.worker.close()
