"""Memory is budgeted once, itemised, and refused with the figure that would fit (rule 9). No I/O, no clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from cloister.backends.base import MemoryNeed
from cloister.types.errors import MemoryBudgetError
from cloister.types.step import MAX_SCORED_ROWS

MIB: Final = 2**20
OVERHEAD_BYTES: Final = 384 * MIB
"""Interpreter and libraries of an engine process (225 MiB resident with torch 2.13, CPU build), and allocator slack."""
DEFAULT_SHARE: Final = 0.5
"""Part of what weights and activations leave free that the KV cache takes when nobody said how much."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What an engine takes, in bytes.

    Attributes:
        items: (what, bytes): weights, KV cache, activations, overhead.
        num_blocks: KV blocks that the KV item pays for.
        why: one sentence on where the KV figure comes from.
    """

    items: tuple[tuple[str, int], ...]
    num_blocks: int
    why: str

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.items)


def budget_memory(
    need: MemoryNeed,
    *,
    available_bytes: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    kv_memory_mb: float | None = None,
    adapters_bytes: int = 0,
    drafters_bytes: int = 0,
    num_draft_rows: int = 0,
    overhead_bytes: int = OVERHEAD_BYTES,
) -> MemoryBudget:
    """Divides `available_bytes`.

    Without `kv_memory_mb` the KV cache holds `max_num_seqs` sequences of `max_model_len` positions, or as many blocks as
    half of what is left pays for, whichever is fewer, but always one sequence of full length.

    Args:
        adapters_bytes: of the places for adapters.
        drafters_bytes: of drafters, their KV aside: `need` counts it with each block.
        num_draft_rows: rows as wide as the vocabulary that drafts take at once.

    Raises:
        MemoryBudgetError: it cannot fit; the message has the figure that would.
    """
    activations_bytes = need.activations_bytes + need.logit_row_bytes * (_logit_rows(max_num_seqs) + num_draft_rows)
    left = available_bytes - need.weights_bytes - adapters_bytes - drafters_bytes - activations_bytes - overhead_bytes
    if left <= 0:
        raise MemoryBudgetError(
            f"weights ({_mib(need.weights_bytes)}), {_say('adapters', adapters_bytes)}{_say('drafters', drafters_bytes)}"
            f"activations ({_mib(activations_bytes)}) and overhead "
            f"({_mib(overhead_bytes)}) need {_mib(available_bytes - left)}, but {_mib(available_bytes)} are available; "
            f"give it {_mib(available_bytes - left + need.kv_block_bytes)} or choose a smaller model",
            param="model",
        )
    blocks_per_seq = math.ceil(max_model_len / block_size)
    if kv_memory_mb is None:
        num_blocks, why = _default_blocks(need.kv_block_bytes, left, blocks_per_seq, max_num_seqs)
    else:
        num_blocks, why = int(kv_memory_mb * MIB) // need.kv_block_bytes, "--kv-memory-mb"
    _check_fits(need.kv_block_bytes, num_blocks, left, blocks_per_seq, block_size, given=kv_memory_mb is not None)
    items = (
        ("weights", need.weights_bytes),
        *((("adapters", adapters_bytes),) if adapters_bytes else ()),
        *((("drafters", drafters_bytes),) if drafters_bytes else ()),
        ("KV cache", num_blocks * need.kv_block_bytes),
        ("activations", activations_bytes),
        ("overhead", overhead_bytes),
    )
    return MemoryBudget(items, num_blocks, why)


def _logit_rows(max_num_seqs: int) -> int:
    """Rows of logits that there are at once: one for each sequence and a copy where log-probabilities are asked for, and those
    of scored prompts."""
    return 2 * max_num_seqs + MAX_SCORED_ROWS


def _default_blocks(block_bytes: int, left: int, blocks_per_seq: int, max_num_seqs: int) -> tuple[int, str]:
    wanted = blocks_per_seq * max_num_seqs
    shared = int(left * DEFAULT_SHARE) // block_bytes
    if wanted <= shared:
        return wanted, f"{max_num_seqs} sequences of full length"
    if blocks_per_seq <= shared:
        return shared, f"{DEFAULT_SHARE:.0%} of the memory that weights and activations leave free"
    return blocks_per_seq, "one sequence of full length"


def _check_fits(block_bytes: int, num_blocks: int, left: int, blocks_per_seq: int, block_size: int, *, given: bool) -> None:
    if num_blocks < blocks_per_seq:
        shorter = f", or --max-model-len {num_blocks * block_size} or less" if num_blocks else ""
        raise MemoryBudgetError(
            f"a KV cache of {_mib(num_blocks * block_bytes)} does not hold one sequence of full length; "
            f"set --kv-memory-mb {_mib_figure(blocks_per_seq * block_bytes)} or more{shorter}",
            param="kv_memory_mb",
        )
    if num_blocks * block_bytes > left:
        fits = left // block_bytes
        can_keep_length = given and fits >= blocks_per_seq
        remedy = f"--kv-memory-mb {fits * block_bytes // MIB}" if can_keep_length else f"--max-model-len {fits * block_size}"
        raise MemoryBudgetError(
            f"a KV cache of {_mib(num_blocks * block_bytes)} does not fit into the {left // MIB} MiB that weights, "
            f"activations and overhead leave; set {remedy} or less",
            param="kv_memory_mb" if can_keep_length else "max_model_len",
        )


def _say(what: str, size_bytes: int) -> str:
    return f"{what} ({_mib(size_bytes)}), " if size_bytes else ""


def _mib(size_bytes: int) -> str:
    return f"{_mib_figure(size_bytes)} MiB"


def _mib_figure(size_bytes: int) -> int:
    return math.ceil(size_bytes / MIB)
