"""KV tiers whose slots are a dictionary, and whose reads and writes happen when a test says so."""

from __future__ import annotations

from cloister.kv import KVObject
from cloister.kv.objects import KVHeader
from cloister.kv.tier_admission import AdmissionFactory, AdmitAll
from cloister.kv.tier_index import KVTierIndex
from cloister.kv.tier_slots import TierBlock, TierLayout
from cloister.kv.tiers import KVTiers
from cloister.scheduler import Scheduler
from cloister.scheduler.kv_restores import TierRead

BLOCK_BYTES = 1000
"""What a block counts as, whatever the runner says of it."""


class MemoryTier:
    """Attaches itself to a scheduler.

    Args:
        num_below: slots of a second tier; 0: there is none.
        make_admission: what decides which blocks full tiers store.

    Attributes:
        index: of the first tier.
        reads: those that have not ended.
        transfer_s: what a read is said to have taken.
        byte_s: seconds for a byte that the engine is told of reads whose front is computed; None: nothing.
        contents: (group, slot) -> (number of its write, contents), in the first tier.
        below: the same in the second one.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner,
        num_slots: int,
        num_below: int = 0,
        make_admission: AdmissionFactory = AdmitAll,
    ) -> None:
        sizes = (BLOCK_BYTES,) * scheduler.pool.num_groups
        self.tiers = KVTiers([
            KVTierIndex(name, TierLayout(sizes, (num,) * len(sizes)), number=number, make_admission=make_admission)
            for number, (name, num) in enumerate((("memory", num_slots), ("below", num_below)))
            if num
        ])  # fmt: skip
        self.index = self.tiers.indexes[0]
        self.scheduler, self.runner = scheduler, runner
        self.contents: dict[tuple[int, int], tuple[int, bytes]] = {}
        self.below: dict[tuple[int, int], tuple[int, bytes]] = {}
        self.unwritten: list = []
        self.reads: list[TierRead] = []
        self.cancelled: set[str] = set()
        self.num_loaded = 0
        self.transfer_s: float | None = None
        self.byte_s: float | None = None
        scheduler.use_tiers(self.tiers)

    def dispatch(self) -> None:
        """As the engine does it between planning a step and running it."""
        copies = [copy for index in reversed(self.tiers.indexes) for copy in index.copies]
        for index in self.tiers.indexes:
            index.copies = []
        for source, stored in copies:
            self.unwritten.append((stored, self.runner.export_blocks([source])[0] if isinstance(source, int) else source))
        self.tiers.take_ended_roots()
        loads = self.scheduler.kv_loads
        self.reads = [read for read in self.reads if read.request_id not in loads.cancelled_reads]
        loads.cancelled_reads.clear()
        self.reads += self.scheduler.kv_restores.take_reads()

    def write(self, num_blocks: int, *, is_written: bool = True) -> None:
        """Writes the oldest blocks."""
        for stored, content in self.unwritten[:num_blocks]:
            if is_written and stored.tier:
                moved = self._find(content) if isinstance(content, TierBlock) else (stored.number, content)
                self.below[stored.group, stored.slot] = moved
            elif is_written:
                self.contents[stored.group, stored.slot] = stored.number, content
            self.tiers.indexes[stored.tier].confirm(stored, is_written=is_written)
        del self.unwritten[:num_blocks]

    def read(self, num_entries: int, now: float) -> None:
        """Reads so many entries of the oldest read, and ends it after the last one or at one that it cannot read."""
        if not self.reads:
            return
        read, loads = self.reads[0], self.scheduler.kv_loads
        for _ in range(num_entries):
            if not read.entries:
                break
            entry = read.entries.pop(0)
            contents = []
            for block in entry.blocks:
                number, content = (0, b"") if block is None else self._find(block)
                if block is not None and number != block.number:
                    self.tiers.lose(block)
                    self._end(read, now, is_complete=False)
                    return
                contents.append(content)
            header = KVHeader(b"", read.root, entry.key, entry.entry, tuple(map(len, contents)))
            loads.arrive(read.request_id, [KVObject(header, tuple(contents), b"")])
            self.num_loaded += 1
            if read.restore is not None and self.byte_s is not None:
                num_bytes = BLOCK_BYTES * (len(read.keys) - entry.entry)
                read.restore.note([(num_bytes, num_bytes * self.byte_s)])
        if not read.entries:
            self._end(read, now, is_complete=True)

    def _end(self, read: TierRead, now: float, *, is_complete: bool) -> None:
        self.reads.remove(read)
        self.scheduler.kv_loads.finish(read.request_id, now, is_complete=is_complete, transfer_s=self.transfer_s)

    def _find(self, block: TierBlock) -> tuple[int, bytes]:
        contents = self.below if block.tier else self.contents
        return contents.get((block.group, block.slot), (-1, b""))

    def damage(self) -> None:
        """Damages what was written last."""
        if self.contents:
            place = max(self.contents, key=lambda place: self.contents[place][0])
            self.contents[place] = -1, b""
