"""The memory budget, computed once and itemised. A configuration that does not fit is refused with a figure that does. No I/O,
no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from cloister.backends.base import KVGroup, MemoryNeed
from cloister.backends.spec import LayerGroup
from cloister.types.errors import MemoryBudgetError
from cloister.types.step import MAX_SCORED_ROWS

MIB: Final = 2**20
OVERHEAD_BYTES: Final = 384 * MIB
"""Interpreter and libraries of an engine process (225 MiB resident with torch 2.13, CPU build), compiled grammars
(`executor.grammar_memory.LIMIT_BYTES`), and allocator slack."""
WINDOWS_PER_PREFIX: Final = 8
"""Assumed length of a cached prefix, in windows; layers with a window keep the last window of each prefix, which a
hit reads."""
RECENT_WINDOWS_PER_PREFIX: Final = 32
"""The same of the newest positions of layers that pack the others: their window is short."""
STATES_PER_SEQ: Final = 4
"""States for each sequence: its running one, one more while a step copies it, and two that the prefix cache keeps: where its
prompt ended and where its answer did."""
SEQS_PER_LENGTH: Final = 8
"""KV for one sequence of full length can hold this many shorter ones, which need as many states; never fewer."""
DEFAULT_SHARE: Final = 0.5
"""Default share of the KV cache in the memory that weights and activations leave free."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The memory of an engine, in bytes.

    Attributes:
        items: (what, bytes): weights, KV cache, states of layers that have one, activations, overhead.
        groups: KV blocks in the KV item, by groups of layers.
        why: one sentence on the origin of the KV figure.
    """

    items: tuple[tuple[str, int], ...]
    groups: tuple[KVGroup, ...]
    why: str

    @property
    def num_blocks(self) -> int:
        """Blocks of the first group, whose layers see the most positions."""
        return self.groups[0].num_blocks

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
    groups: Sequence[LayerGroup] = (),
    max_batched_tokens: int = 0,
    kv_memory_mb: float | None = None,
    adapters_bytes: int = 0,
    drafters_bytes: int = 0,
    tier_bytes: int = 0,
    num_draft_rows: int = 0,
    num_drafts: int = 0,
    most_drafts: int = 0,
    overhead_bytes: int = OVERHEAD_BYTES,
    whole_bytes: int | None = None,
    follows_settings: bool = False,
) -> MemoryBudget:
    """Divides `available_bytes`.

    Without `kv_memory_mb` the KV cache holds `max_num_seqs` sequences of `max_model_len` positions, or as many blocks as fit
    into half of the remaining memory, whichever is fewer, but always at least one sequence of full length.

    Args:
        groups: of layers (`backends.spec.group_layers`); empty for one group of all layers.
        max_batched_tokens: most positions in one step. All of them need blocks until the step is committed; only then are
            blocks behind a window released.
        adapters_bytes: size of the adapter slots.
        kv_memory_mb: size of the KV cache, states included.
        drafters_bytes: size of drafters without their KV, which `need` counts with each block.
        tier_bytes: size of a KV tier in memory.
        whole_bytes: all free memory, of which `available_bytes` is the part that --memory-share allows; None if nothing more is
            free.
        num_draft_rows: rows of vocabulary width that drafts need at once.
        num_drafts: most drafts of a step.
        most_drafts: most of one sequence.
        follows_settings: the KV cache must be as large on every machine: requests are refused, and prefixes kept, by its size.

    Raises:
        MemoryBudgetError: it does not fit; the message states a figure that does.
    """
    activations_bytes = need.activations_bytes + need.logit_row_bytes * (_logit_rows(max_num_seqs) + num_draft_rows)
    activations_bytes += need.draft_bytes * num_drafts + need.draft_state_bytes * most_drafts
    left = available_bytes - need.weights_bytes - adapters_bytes - drafters_bytes - activations_bytes - overhead_bytes
    blocks_per_seq = math.ceil(max_model_len / block_size)
    sizes = _GroupSizes(need, groups, block_size, blocks_per_seq, max_num_seqs, max_batched_tokens)
    least_blocks = blocks_per_seq if kv_memory_mb is None else sizes.count_blocks(int(kv_memory_mb * MIB))
    _check_tier(tier_bytes, left - sizes.num_bytes(least_blocks))
    left -= tier_bytes
    if left <= 0:
        needed_bytes = available_bytes - left + need.kv_block_bytes
        refusal = MemoryBudgetError(
            f"weights ({_mib(need.weights_bytes)}), {_say('adapters', adapters_bytes)}{_say('drafters', drafters_bytes)}"
            f"{_say('the KV tier', tier_bytes)}"
            f"activations ({_mib(activations_bytes)}) and overhead "
            f"({_mib(overhead_bytes)}) need {_mib(available_bytes - left)}, but {_mib(available_bytes)} are available; "
            f"{_say_how_to_get(needed_bytes, whole_bytes)} or choose a smaller model",
            param="model",
        )
        refusal.fit = available_bytes / needed_bytes
        raise refusal
    if kv_memory_mb is None:
        num_blocks, why = _default_blocks(sizes, left, blocks_per_seq, max_num_seqs)
        if follows_settings and num_blocks < blocks_per_seq * max_num_seqs:
            raise _refuse_share(sizes, left, blocks_per_seq, max_num_seqs)
    else:
        num_blocks, why = sizes.count_blocks(int(kv_memory_mb * MIB)), "--kv-memory-mb"
    _check_fits(sizes, num_blocks, left, blocks_per_seq, block_size, given=kv_memory_mb is not None)
    items = (
        ("weights", need.weights_bytes),
        *((("adapters", adapters_bytes),) if adapters_bytes else ()),
        *((("drafters", drafters_bytes),) if drafters_bytes else ()),
        ("KV cache", sizes.num_bytes(num_blocks) - sizes.state_bytes(num_blocks)),
        *((("states", sizes.state_bytes(num_blocks)),) if need.state_bytes else ()),
        *((("KV tier", tier_bytes),) if tier_bytes else ()),
        ("activations", activations_bytes),
        ("overhead", overhead_bytes),
    )
    return MemoryBudget(items, sizes.groups(num_blocks), why)


class _GroupSizes:
    """Number of blocks of each group of layers.

    Layers that see all positions need a block for every `block_size` positions. Layers with a window use only what sequences
    see and one step computes, plus the windows at the ends of cached prefixes.
    There are as many states as the sequences that are likely to run at once need: those of all `max_num_seqs` if there is KV
    for many.
    """

    def __init__(
        self,
        need: MemoryNeed,
        groups: Sequence[LayerGroup],
        block_size: int,
        blocks_per_seq: int,
        max_num_seqs: int,
        max_batched_tokens: int,
    ) -> None:
        self._blocks_per_seq, self._max_num_seqs = blocks_per_seq, max_num_seqs
        extra = need.kv_block_bytes - sum(need.kv_layer_bytes)  # KV of drafters, which share the blocks of the first group
        self._groups: list[tuple[KVGroup, int]] = []
        for group in groups if need.kv_layer_bytes else ():
            if group.is_state:
                self._groups.append((KVGroup(0, group.layers, is_state=True), need.state_bytes))
                continue
            layer_bytes = need.recent_layer_bytes if group.is_recent else need.kv_layer_bytes
            size_bytes = sum(layer_bytes[layer] for layer in group.layers) + (0 if self._groups else extra)
            most = 2**62
            if group.window is not None:
                per_seq = math.ceil(group.window / block_size) + 1
                most = max_num_seqs * per_seq + math.ceil(max_batched_tokens / block_size) + 1
            self._groups.append((KVGroup(most, group.layers, group.window, is_recent=group.is_recent), size_bytes))
        self._groups = self._groups or [(KVGroup(2**62), need.kv_block_bytes)]

    def groups(self, num_blocks: int) -> tuple[KVGroup, ...]:
        """Returns the groups of a cache for `num_blocks * block_size` positions."""
        return tuple(replace(group, num_blocks=self._count(group, num_blocks)) for group, _ in self._groups)

    def num_bytes(self, num_blocks: int) -> int:
        """Returns their size in bytes."""
        return sum(self._count(group, num_blocks) * size_bytes for group, size_bytes in self._groups)

    def state_bytes(self, num_blocks: int) -> int:
        """Returns the share of it that states take."""
        return sum(self._count(group, num_blocks) * size_bytes for group, size_bytes in self._groups if group.is_state)

    def _count(self, group: KVGroup, num_blocks: int) -> int:
        if group.is_state:
            num_more = max(0, num_blocks - self._blocks_per_seq) * SEQS_PER_LENGTH // self._blocks_per_seq
            return STATES_PER_SEQ * min(self._max_num_seqs, 1 + num_more)
        per_prefix = RECENT_WINDOWS_PER_PREFIX if group.is_recent else WINDOWS_PER_PREFIX
        return min(num_blocks, group.num_blocks + num_blocks // per_prefix)

    def count_blocks(self, num_bytes: int) -> int:
        """Returns the largest `num_blocks` that fits into this many bytes."""
        most = WINDOWS_PER_PREFIX * num_bytes // max(1, min(size_bytes for _, size_bytes in self._groups))
        low, high = 0, 1 + max(most, self._blocks_per_seq * self._max_num_seqs)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.num_bytes(middle) <= num_bytes else (low, middle)
        return low


def _logit_rows(max_num_seqs: int) -> int:
    """Most rows of logits that exist at once: one for each sequence, a copy for log-probabilities, and those of
    scored prompts."""
    return 2 * max_num_seqs + MAX_SCORED_ROWS


def _default_blocks(sizes: _GroupSizes, left: int, blocks_per_seq: int, max_num_seqs: int) -> tuple[int, str]:
    wanted = blocks_per_seq * max_num_seqs
    shared = sizes.count_blocks(int(left * DEFAULT_SHARE))
    if wanted <= shared:
        return wanted, f"{max_num_seqs} sequences of full length"
    if blocks_per_seq <= shared:
        return shared, f"{DEFAULT_SHARE:.0%} of the memory that weights and activations leave free"
    return blocks_per_seq, "one sequence of full length"


def _refuse_share(sizes: _GroupSizes, left: int, blocks_per_seq: int, max_num_seqs: int) -> MemoryBudgetError:
    """Returns the refusal of a KV cache whose size would depend on a machine's memory, with settings that avoid that."""
    shared = sizes.count_blocks(int(left * DEFAULT_SHARE))
    remedies = []
    if shared >= blocks_per_seq:
        least_mb, most_mb = math.ceil(sizes.num_bytes(blocks_per_seq) / MIB), sizes.num_bytes(shared) // MIB
        remedies.append(f"set --kv-memory-mb {max(least_mb, most_mb)}")
        remedies.append(f"--max-num-seqs {shared // blocks_per_seq} or less")
    remedies.append("a smaller --max-model-len")
    return MemoryBudgetError(
        f"the KV cache of a sealed node must be as large on every machine of its release, and {max_num_seqs} sequences of full "
        f"length take {_mib(sizes.num_bytes(blocks_per_seq * max_num_seqs))}, more than {DEFAULT_SHARE:.0%} of the "
        f"{_mib(left)} that are left; {', or '.join(remedies)}, here and in `cloister release make`",
        param="kv_memory_mb",
    )


def _check_tier(tier_bytes: int, room_bytes: int) -> None:
    """Raises MemoryBudgetError if it is a tier that does not fit: everything else does."""
    if tier_bytes <= room_bytes or room_bytes < 0:
        return
    fits = room_bytes // MIB
    raise MemoryBudgetError(
        f"a KV tier of {_mib(tier_bytes)} does not fit into the {_mib(room_bytes)} that weights, KV cache, activations and "
        f"overhead leave; {f'give --kv-tier a size of {fits}M or less, or leave it out' if fits else 'leave --kv-tier out'}",
        param="kv_tier",
    )


def _check_fits(sizes: _GroupSizes, num_blocks: int, left: int, blocks_per_seq: int, block_size: int, *, given: bool) -> None:
    """Raises MemoryBudgetError, with settings that do, if a cache is too small for one sequence or does not fit."""
    size_bytes, least_bytes = sizes.num_bytes(num_blocks), sizes.num_bytes(blocks_per_seq)
    if num_blocks >= blocks_per_seq and size_bytes <= left:
        return
    fits = sizes.count_blocks(left)
    figure = _find_figure(sizes, left, blocks_per_seq, is_more=num_blocks < blocks_per_seq) if given else None
    remedies = [] if figure is None else [f"set --kv-memory-mb {figure}"]
    if 0 < num_blocks < blocks_per_seq and size_bytes <= left:
        remedies.append(f"set --max-model-len {num_blocks * block_size} or less")
    if figure is None and 0 < fits < blocks_per_seq:
        remedies.append(f"{'leave --kv-memory-mb out and ' if given else ''}set --max-model-len {fits * block_size} or less")
    room = f"the {_mib(left)} that weights, activations and overhead leave"
    if num_blocks < blocks_per_seq:
        problem = f"hold one sequence of full length, which takes {_mib(least_bytes)}"
        problem += "" if figure is not None else f", more than {room}"
    else:
        problem = f"fit into {room}"
    raise MemoryBudgetError(
        f"a KV cache of {_mib(size_bytes)} does not {problem}; "
        f"{', or '.join(remedies) or 'choose a smaller model, or give it more memory'}",
        param="kv_memory_mb" if figure is not None else "max_model_len",
    )


def _find_figure(sizes: _GroupSizes, left: int, blocks_per_seq: int, *, is_more: bool) -> str | None:
    """Returns a size in MiB that holds one sequence of full length and fits, as round as possible; None if there is none.

    Args:
        is_more: the least of them, else the most.
    """
    size_mib = (sizes.num_bytes(blocks_per_seq) if is_more else sizes.num_bytes(sizes.count_blocks(left))) / MIB
    for digits in (0, 1, 2, 3):
        rounded = (math.ceil if is_more else math.floor)(size_mib * 10**digits) / 10**digits
        num_blocks = sizes.count_blocks(int(rounded * MIB))
        if num_blocks >= blocks_per_seq and sizes.num_bytes(num_blocks) <= left:
            return f"{rounded:.{digits}f} or {'more' if is_more else 'less'}"
    return None


def _say_how_to_get(needed_bytes: int, whole_bytes: int | None) -> str:
    """Returns advice for this much memory: a larger share of the free memory, if that is enough."""
    if whole_bytes is None or whole_bytes < needed_bytes:
        return f"give it {_mib(needed_bytes)}"
    return (
        f"raise --memory-share, by which an engine may use a part of {_mib(whole_bytes)}, so that it is {_mib(needed_bytes)},"
    )


def _say(what: str, size_bytes: int) -> str:
    return f"{what} ({_mib(size_bytes)}), " if size_bytes else ""


def _mib(size_bytes: int) -> str:
    size_mib = size_bytes / MIB
    return f"{math.ceil(size_mib)} MiB" if size_mib >= 10 else f"{math.ceil(size_mib * 100) / 100:g} MiB"
