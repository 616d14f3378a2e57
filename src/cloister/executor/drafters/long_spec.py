"""Drafts for long contexts from a cache of constant size (LongSpec, Yang et al. 2025): its cost, and the small model's input,
do not grow with the context.

The cache holds the first tokens of a sequence, which are attention sinks (StreamingLLM, Xiao et al. 2024, section 3), and its
newest ones. When it is full, the newest half is computed again after the first tokens: so positions stay within the small
model's maximum for any position encoding, and on average each token is computed twice.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np

from cloister.backends.base import IntArray, KVLayout, Program
from cloister.executor.drafters.base import (
    DRAFTERS,
    NOTHING,
    Draft,
    Drafter,
    DrafterContext,
    DraftModel,
    DraftRequest,
    VerifyFeedback,
)
from cloister.executor.drafters.chain import ChainGrower, Stretch
from cloister.executor.drafters.draft_files import open_draft
from cloister.executor.drafters.draft_model import FEW, MAX_FOLLOWED, common_length
from cloister.types.errors import ConfigError
from cloister.types.threat import Requirement, ThreatProfile

LONG_SPEC_THREAT: Final = ThreatProfile(
    row="speculation in general",
    threats=frozenset({Requirement.STATELESS}),
    residue="the small model's KV of one request, until that leaves",
    where=("device memory",),
    attack="reuse of an unwiped block; packet sizes and times reveal accepted lengths",
    mitigations=("its cache belongs to one sequence, is never shared, and is wiped when the sequence ends",),
)
NUM_SINKS: Final = 4
CAPACITY: Final = 512
"""Default number of positions in one sequence's cache."""


class _Cache:
    """One sequence's cache: position p holds token p if p < NUM_SINKS, else token first + p - NUM_SINKS.

    Attributes:
        num_filled: number of leading positions with KV of known tokens.
        drafted: drafts whose KV follows these, until their step has been verified.
    """

    __slots__ = ("blocks", "drafted", "first", "num_filled")

    def __init__(self, blocks: array[int], first: int) -> None:
        self.blocks = blocks
        self.first = first
        self.num_filled = 0
        self.drafted: IntArray = np.empty(0, np.int32)

    def drop_drafted(self) -> None:
        self.drafted[:] = 0
        self.drafted = self.drafted[:0]


class LongSpecDrafter(Drafter):
    """Drafts chains with one small model that sees the first and the newest tokens of a sequence.

    Args:
        capacity: positions in a cache; at most the small model's maximum.

    Attributes:
        cache_bytes: cache size of one sequence, independent of its length.

    Raises:
        ConfigError: the small model has too few positions.
    """

    has_probs = True

    def __init__(self, context: DrafterContext, model: DraftModel, capacity: int = CAPACITY) -> None:
        self._context = context
        self._model = model
        self._capacity = min(capacity, model.max_positions)
        self._num_kept = min((self._capacity - NUM_SINKS) // 2, MAX_FOLLOWED - NUM_SINKS)
        if self._num_kept <= self.max_drafts:
            raise ConfigError(f"the draft model has {model.max_positions} positions; name one with more")
        self._blocks_each = -(-self._capacity // context.block_size)
        self._num_blocks = self._blocks_each * context.max_num_seqs
        self.cache_bytes = self._blocks_each * model.kv_block_bytes(context.block_size)
        self.fixed_bytes = model.weights_bytes + context.max_num_seqs * self.cache_bytes
        self._program: Program | None = None
        self._grower: ChainGrower | None = None
        self._caches: dict[int, _Cache] = {}
        self._free: list[int] = []

    def allocate(self, kv: KVLayout) -> None:
        """Builds the small model with a cache for each sequence that may run at once, independent of the model's KV."""
        self._program = self._model.build(KVLayout(self._num_blocks, kv.block_size))
        self._grower = ChainGrower(self._program, self._context.vocab_size, kv.block_size, self._context.sampling_metadata)
        self._free = list(range(self._num_blocks))

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Returns a chain for each request."""
        for cache in self._caches.values():
            cache.drop_drafted()
        drafts = [NOTHING] * len(requests)
        ready: list[tuple[int, _Cache, Stretch]] = []
        num_left = MAX_FOLLOWED
        for place, request in enumerate(requests):
            own = self._cache(request)
            if own is None:
                continue
            stretch = self._stretch(own, request)
            if len(stretch.tokens) > FEW:  # it is new or was rebased; limits how many are computed at once
                if len(stretch.tokens) > num_left:
                    continue
                num_left -= len(stretch.tokens)
            ready.append((place, own, stretch))
        if ready and self._grower is not None:
            grown = self._grower.grow([stretch for _, _, stretch in ready])
            for (place, cache, stretch), draft in zip(ready, grown, strict=True):
                cache.num_filled = stretch.end
                cache.drafted = np.array(draft.token_ids[: stretch.num_drafts - 1], np.int32)
                drafts[place] = draft
        return drafts

    def observe(self, seen: Sequence[VerifyFeedback]) -> None:
        """Marks the KV of accepted drafts as computed."""
        for each in seen:
            cache = self._caches.get(each.state.seq_id)
            if cache is not None and cache.drafted.size:
                start = cache.first + cache.num_filled - NUM_SINKS
                known = each.state.tokens[start : start + cache.drafted.size]
                cache.num_filled += common_length(cache.drafted.tolist(), known)
                cache.drop_drafted()

    def forget(self, seq_id: int) -> None:
        """Wipes the cache of a finished sequence."""
        cache = self._caches.pop(seq_id, None)
        if cache is not None and self._program is not None:
            cache.drop_drafted()
            self._program.wipe_blocks(cache.blocks)
            self._free += cache.blocks

    def wipe_buffers(self) -> None:
        """Overwrites the small model's buffers."""
        if self._program is not None:
            self._program.wipe_buffers()

    def _cache(self, request: DraftRequest) -> _Cache | None:
        """Returns a sequence's cache with space for its drafts; None if more sequences run than configured."""
        num_known, cache = len(request.state.tokens), self._caches.get(request.state.seq_id)
        if cache is None:
            if len(self._free) < self._blocks_each:
                return None
            blocks = array("i", self._free[-self._blocks_each :])
            del self._free[-self._blocks_each :]
            cache = self._caches[request.state.seq_id] = _Cache(blocks, max(NUM_SINKS, num_known - self._num_kept))
        if NUM_SINKS + num_known - cache.first + self.max_drafts > self._capacity:
            cache.first = num_known - self._num_kept
            cache.num_filled = min(cache.num_filled, NUM_SINKS)
        return cache

    def _stretch(self, cache: _Cache, request: DraftRequest) -> Stretch:
        """Returns the known tokens that the cache lacks, always including the last one."""
        known = request.state.tokens
        start = min(cache.num_filled, NUM_SINKS + len(known) - cache.first - 1)
        tokens = known[start:NUM_SINKS] if start < NUM_SINKS else array("i")
        tokens += known[cache.first + max(start - NUM_SINKS, 0) :]
        return Stretch(request.state, cache.blocks, start, tokens, min(request.num_drafts, self.max_drafts), request.is_coupled)


@DRAFTERS.register("long_spec", LONG_SPEC_THREAT)
def make_long_spec(context: DrafterContext) -> Drafter:
    """Opens the small model (errors as in `open_draft`)."""
    return LongSpecDrafter(context, open_draft(context))
