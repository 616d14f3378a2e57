"""What a step costs by how many rows it verifies: the bound of every speed-up.

A step that verifies n drafts of a sequence computes n + 1 rows instead of one. With E tokens a step, speculation is at most
E / (cost(n + 1) / cost(1)) times as fast, drafting aside.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from benchmarks.speculation_runs import Arm
from cloister.backends.base import GREEDY, Capability, ForwardBatch

ROWS: Final = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (1, 32), (4, 1), (4, 4), (4, 8), (16, 1), (16, 2), (16, 4), (16, 8))
"""(sequences, rows of each)."""
CONTEXT: Final = 64
_BLOCK: Final = 16


def measure_costs(arm: Arm, repeats: int) -> dict[tuple[int, int], float]:
    """Returns milliseconds of a forward pass for each of `ROWS`, medians of turns, on an engine that is not asked again."""
    program = arm.program
    if Capability.GREEDY not in program.capabilities:
        raise RuntimeError("the back end finds no tokens itself")
    batches = {rows: chain_batch(*rows, arm.core.model.vocab_size) for rows in ROWS}
    times: dict[tuple[int, int], list[float]] = {rows: [] for rows in ROWS}
    for turn in range(repeats + 1):
        for rows, batch in batches.items():
            since_s = time.perf_counter()
            program.step(batch, GREEDY)
            if turn:
                times[rows].append(time.perf_counter() - since_s)
    return {rows: float(np.median(taken)) * 1e3 for rows, taken in times.items()}


def chain_batch(num_seqs: int, num_rows: int, vocab_size: int) -> ForwardBatch:
    """Returns a step of sequences of the same length that verify chains."""
    num_tokens, length = num_seqs * num_rows, CONTEXT + num_rows
    num_blocks = -(-length // _BLOCK)
    return ForwardBatch(
        token_ids=np.random.default_rng(0).integers(16, vocab_size, num_tokens, dtype=np.int32),
        positions=np.tile(np.arange(CONTEXT, length, dtype=np.int32), num_seqs),
        query_starts=np.arange(0, num_tokens + 1, num_rows, dtype=np.int32),
        context_lens=np.full(num_seqs, length, np.int32),
        block_tables=np.arange(num_seqs * num_blocks, dtype=np.int32).reshape(num_seqs, num_blocks),
        logit_rows=np.arange(num_tokens, dtype=np.int32),
    )


def list_rows(costs: dict[tuple[int, int], float]) -> Sequence[tuple[object, ...]]:
    """Returns (sequences, rows of each, ms, over one row of each) for a table."""
    return [(seqs, rows, ms, ms / costs[seqs, 1]) for (seqs, rows), ms in costs.items()]
