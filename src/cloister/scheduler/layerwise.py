"""Memory of prompts that are computed layer by layer (`types.layerwise`). Pure.

A request that ends with its prompt is computed this way if KV of all layers would not fit; the result is bit-identical. It
takes tokens of each step's budget like any prefill, so others run beside it. Its memory is allocated at once and does not grow.
If it is preempted, it starts over.
"""

from __future__ import annotations

from cloister.kv import BlockPool
from cloister.scheduler.sequence import SequenceRecord, table_of
from cloister.types.layerwise import CellLayout, LayerwisePlan
from cloister.types.threat import ThreatProfile

LAYERWISE_THREAT = ThreatProfile(
    row="paging, continuous batching, chunked prefill, TP, SP",
    residue="KV of a layer and residual streams of a prompt, in KV blocks until free",
    where=("device memory",),
    attack="reuse of an unwiped block",
    mitigations=(
        "blocks that hold them are wiped as those with KV are",
        "copies outside of blocks are overwritten after each chunk",
    ),
)


class LayerwisePrompts:
    """The memory of such prompts.

    Args:
        num_usable: blocks that one sequence can have while nothing else runs.
    """

    def __init__(self, cells: CellLayout, pool: BlockPool, num_usable: int) -> None:
        self._cells, self._pool, self._num_usable = cells, pool, num_usable

    @property
    def max_positions(self) -> int:
        """Positions of the longest prompt that there is memory for."""
        return self._cells.count_most_entries(self._num_usable) * self._pool.block_size

    def count_needed(self, sequence: SequenceRecord, num_hit: int) -> int:
        """Returns the blocks that a waiting sequence needs beside those of the `num_hit` entries that it found."""
        return self._cells.count_blocks(self._count_entries(sequence), num_hit, num_hit)

    def count_hits(self, sequence: SequenceRecord, num_found: int) -> int:
        """Returns how many of the entries that a waiting sequence found it can use: their KV of all layers and the scratch
        memory for the rest must both fit."""
        while num_found and num_found + self.count_needed(sequence, num_found) > self._num_usable:
            num_found -= 1
        return num_found

    def begin(self, sequence: SequenceRecord, num_hit: int) -> None:
        """Allocates the memory of a starting sequence, which must be available (`count_needed`)."""
        num_entries, first = self._count_entries(sequence), num_hit * self._pool.block_size
        num_kept = num_hit + self._count_kept(sequence, num_entries, num_hit)
        num_scratch = self._cells.count_blocks(num_entries, num_hit, num_kept)
        table_of(sequence).add_scratch(num_kept - num_hit, num_scratch)
        num_positions = sequence.request_state.num_prompt_tokens - first
        sequence.layerwise = LayerwisePlan(first, num_kept, num_positions, self._cells.num_layers)

    def _count_kept(self, sequence: SequenceRecord, num_entries: int, num_hit: int) -> int:
        """Returns for how many entries behind those found KV of all layers is kept for the prefix cache: as many as half of the
        spare memory holds."""
        request = sequence.request_state.request
        if request.pooling is not None or request.sampling.prompt_logprobs is not None:
            return 0  # such requests read no hits
        num_spare = self._pool.num_free - self._cells.count_blocks(num_entries, num_hit, num_hit)
        num_full = sequence.request_state.num_prompt_tokens // self._pool.block_size
        return max(0, min(num_full - num_hit, num_spare // 2))

    def _count_entries(self, sequence: SequenceRecord) -> int:
        return -(-sequence.request_state.num_prompt_tokens // self._pool.block_size)
