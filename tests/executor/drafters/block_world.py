"""Sequences that come, share, fork, are preempted and go, at random, as a scheduler would have them; drafts are checked against
those of a drafter that has never seen anything."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from random import Random

import numpy as np

from cloister.backends.base import KVLayout
from cloister.executor.drafters.base import NOTHING, Draft, Drafter, DraftRequest, VerifyFeedback
from cloister.executor.state import BatchState, SequenceState
from tests.executor.drafters.small_models import BLOCK, VOCAB, arrive, ask, make_batch

NUM_BLOCKS = 96
MAX_DRAFTS = 6


class BlockWorld:
    """Blocks, a prefix cache of full ones, and a few sequences, driven by one source of chance."""

    def __init__(self, make: Callable[[BatchState], Drafter], seed: int) -> None:
        self.random = Random(seed)
        self.batch = make_batch()
        self._make = make
        self.drafter = make(self.batch)
        self.drafter.allocate(KVLayout(NUM_BLOCKS, BLOCK))
        self.users = [0] * NUM_BLOCKS
        self.free = list(range(NUM_BLOCKS))
        self.cache: dict[tuple[int, ...], int] = {}  # all tokens up to the end of a full block -> the block
        self.live: list[SequenceState] = []
        self.next_id = 0
        self.num_checked = 0

    def step(self) -> None:
        """Does one thing that may happen, or drafts."""
        actions = [self.begin, self.draft, self.draft, self.draft, self.go_on, self.fork, self.end, self.preempt, self.evict]
        action = self.random.choice(actions)
        if action == self.begin or self.live:
            action()
        for state in [state for state in self.live if len(state.tokens) > 60]:
            self._depart(state)

    def begin(self, tokens: list[int] | None = None) -> None:
        if len(self.live) >= 4:
            return
        if tokens is None:
            known = [list(prefix) for prefix in self.cache]
            tokens = self.random.choice(known) if known and self.random.random() < 0.6 else []
            tokens = tokens + [self.random.randrange(2, VOCAB) for _ in range(self.random.randrange(1, 30))]
        blocks = []
        for end in range(BLOCK, len(tokens), BLOCK):  # a prefix hit leaves one token to compute
            block = self.cache.get(tuple(tokens[:end]))
            if block is None:
                break
            self.users[block] += 1
            blocks.append(block)
        state = arrive(self.batch, self.next_id, tokens, blocks)
        self.next_id += 1
        self.live.append(state)
        self._grow(state, len(tokens))
        if self.random.random() < 0.7:
            self.drafter.follow([(state, self.random.randrange(1, len(tokens) + 1)), (state, len(tokens))])
        self._gain(state, [self.random.randrange(2, VOCAB)])

    def draft(self) -> None:
        """Drafts for some sequences, checks the drafts, and lets chance decide how much of them is accepted."""
        states = self.random.sample(self.live, self.random.randrange(1, len(self.live) + 1))
        requests = [ask(state, self.random.randrange(1, MAX_DRAFTS), coupled=self.random.random() < 0.3) for state in states]
        for each in requests:
            self._grow(each.state, len(each.state.tokens) + each.num_drafts)
        drafts = self.drafter.draft(requests)
        seen = []
        for each, draft in zip(requests, drafts, strict=True):
            self._check(each, draft)
            path = self._walk(draft)
            start = len(each.state.tokens) - 1
            self._gain(each.state, [*[draft.token_ids[place] for place in path], self.random.randrange(2, VOCAB)])
            self._shrink(each.state)
            seen.append(VerifyFeedback(each.state, start, draft, path, np.zeros(1 + len(draft.token_ids), np.int32)))
        self.drafter.observe(seen)

    def go_on(self) -> None:
        """A step without drafts."""
        state = self.random.choice(self.live)
        self._grow(state, len(state.tokens))
        self._gain(state, [self.random.randrange(2, VOCAB)])

    def fork(self) -> None:
        if len(self.live) >= 4:
            return
        parent = self.random.choice(self.live)
        child = self.batch.fork(parent.seq_id, self.next_id, 1)
        self.next_id += 1
        self.drafter.fork(parent.seq_id, child.seq_id)
        del child.tokens[-1:]
        self._gain(child, [self.random.randrange(2, VOCAB)])
        for block in child.blocks:
            self.users[block] += 1
        self.live.append(child)

    def end(self) -> None:
        """A sequence ends; most of its full blocks stay in the cache."""
        state = self.random.choice(self.live)
        for number in range((len(state.tokens) - 1) // BLOCK):
            prefix = tuple(state.tokens[: (number + 1) * BLOCK])
            if prefix not in self.cache and self.random.random() < 0.9:
                self.cache[prefix] = state.blocks[number]
                self.users[state.blocks[number]] += 1
        self._depart(state)

    def preempt(self) -> None:
        state = self.random.choice(self.live)
        tokens = state.tokens.tolist()
        self._depart(state)
        self.begin(tokens)

    def evict(self) -> None:
        if self.cache:
            self._release([self.cache.pop(self.random.choice(list(self.cache)))])

    def _check(self, each: DraftRequest, draft: Draft) -> None:
        assert len(draft.token_ids) <= each.num_drafts
        batch = make_batch()
        lone = self._make(batch)
        lone.allocate(KVLayout(NUM_BLOCKS, BLOCK))
        state = arrive(batch, 0, each.state.tokens, range(NUM_BLOCKS))
        batch._columns[state.slot] = self.batch._columns[each.state.slot]
        expected = lone.draft([DraftRequest(state, each.num_drafts, each.parents, each.is_coupled)])[0]
        assert draft.token_ids == expected.token_ids
        assert draft.parents == expected.parents
        if expected.probs is None:
            assert draft.probs is None
        else:
            assert draft.probs is not None
            assert np.array_equal(draft.probs, expected.probs)
            self.num_checked += 1

    def _walk(self, draft: Draft) -> tuple[int, ...]:
        if draft is NOTHING or not draft.token_ids:
            return ()
        parents = draft.parents if draft.parents is not None else list(range(-1, len(draft.token_ids) - 1))
        path: list[int] = []
        while self.random.random() < 0.7:
            children = [place for place, parent in enumerate(parents) if parent == (path[-1] if path else -1)]
            if not children:
                break
            path.append(self.random.choice(children))
        return tuple(path)

    def _gain(self, state: SequenceState, tokens: list[int]) -> None:
        state.tokens.extend(tokens)

    def _grow(self, state: SequenceState, end: int) -> None:
        """Makes the last known position and all up to `end` writable."""
        first = (len(state.tokens) - 1) // BLOCK
        for number in range(first, len(state.blocks)):
            if self.users[state.blocks[number]] > 1:
                fresh = self._take()
                self.drafter.copy_blocks([(state.blocks[number], fresh)])
                self._release([state.blocks[number]])
                state.blocks[number] = fresh
        while len(state.blocks) * BLOCK < end:
            state.blocks.append(self._take())

    def _shrink(self, state: SequenceState) -> None:
        kept = -(-(len(state.tokens) - 1) // BLOCK)
        given_back = state.blocks[kept:]
        del state.blocks[kept:]
        self._release(given_back)

    def _take(self) -> int:
        while not self.free:
            self.evict()
        block = self.free.pop(self.random.randrange(len(self.free)))
        self.users[block] = 1
        return block

    def _release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.users[block] -= 1
            if not self.users[block]:
                self.drafter.wipe_blocks([block])
                self.free.append(block)

    def _depart(self, state: SequenceState) -> None:
        self.live.remove(state)
        self.drafter.forget(state.seq_id)
        blocks = array("i", state.blocks)
        self.batch.depart(state.seq_id)
        self._release(blocks)
