"""Performs restores from both sides (`kv.two_sided`) in the scheduler. Pure: no I/O, no clock; it takes `now`.

The sequence runs, and computes its front in steps that end at the predicted meeting point. When it reaches the loaded entries,
it takes their blocks and continues behind them. If the load fails, the sequence computes the rest.
"""

from __future__ import annotations

from cloister.kv.tiers import KVTiers
from cloister.kv.two_sided import ComputeTime, TwoSidedRestore
from cloister.scheduler.kv_load import KVLoad
from cloister.scheduler.kv_loads import KVLoads
from cloister.scheduler.request_table import RequestTable
from cloister.scheduler.sequence import SequenceRecord


class TwoSidedRestores:
    """All two-sided restores of one engine.

    Args:
        predict_s: predicted seconds of computing entries.
    """

    def __init__(self, tiers: KVTiers, requests: RequestTable, loads: KVLoads, predict_s: ComputeTime) -> None:
        self._tiers, self._requests, self._loads, self._predict_s = tiers, requests, loads, predict_s
        self._pool, self._block_size = requests.pool, requests.pool.block_size

    def fits(self, sequence: SequenceRecord) -> bool:
        """Whether the front of a waiting sequence may be computed while its end loads.

        Only if all layers see all positions: else later entries need more than the block of an entry. And only while no other
        sequence has work, which computing the front would delay.
        """
        state = sequence.request_state
        is_plain = state.beams is None and not state.request.images and not state.prefill_only
        is_alone = not self._requests.running and self._requests.num_waiting <= 1 and not self._loads.loading
        return self._pool.has_full_attention_only and is_plain and is_alone

    def limit(self, sequence: SequenceRecord, num_most: int, now: float) -> int:
        """Returns how many of its next `num_most` positions a running sequence computes in this step.

        If the sequence has reached the loaded entries, it takes them, and `num_most` shrinks by as many positions.
        """
        load = self._loads.find_two_sided(sequence)
        if load is None:
            return num_most
        assert load.restore is not None
        size, position = self._block_size, sequence.num_planned
        self._loads.drop_late(load, -(-position // size))
        if position % size:  # a step was cut in the middle of a block
            return min(num_most, size - position % size)
        front, back = position // size, load.next_entry + 1
        if front >= min(back, load.restore.end):
            if load.arrived or load.num_in_flight or sequence.num_in_flight:
                return 0  # until steps have put into blocks what arrived
            return num_most - self._meet(sequence, load, front, now)
        if load.is_complete is None:
            others = len(self._requests.running) > 1 or self._requests.num_waiting
            if others and self._is_load_faster(load.restore, front, back):
                return 0
            back = load.restore.find_next(front, back, self._predict_s)
        return min(num_most, (back - front) * size)

    def _is_load_faster(self, restore: TwoSidedRestore, front: int, back: int) -> bool:
        """Whether loading the rest is predicted to be faster than computing it, so that others need not be delayed."""
        return restore.predict_load_s(front, back) < self._predict_s(front, back)

    def _meet(self, sequence: SequenceRecord, load: KVLoad, front: int, now: float) -> int:
        """Gives a sequence the loaded entries; returns the number of positions that it need not compute."""
        restore = load.restore
        assert restore is not None
        blocks = load.table[front:]
        self._requests.take_cached(sequence, blocks, now)
        sequence.num_committed = sequence.num_planned
        self._requests.prefixes.keep_blocks(sequence)
        self._learn(restore)
        if blocks:
            self._tiers.earn(self._predict_s(front, restore.end), restore.owner)
        self._loads.end_two_sided(load, now)
        return len(blocks) * self._block_size

    def _learn(self, restore: TwoSidedRestore) -> None:
        """Updates the speed of tiers that were faster than predicted. Slower times are ignored: small parts read beside steps
        make every tier seem slow, and would prevent the one-sided loads that show its real speed."""
        for index, (num_bytes, elapsed_s) in zip(self._tiers.indexes, restore.measured, strict=False):
            if num_bytes and elapsed_s < index.predict_s(num_bytes):
                index.learn(num_bytes, elapsed_s)
