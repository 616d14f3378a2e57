"""Beam search over the sequences of a request: takes candidate tokens for each beam, forks beams that share blocks, and returns
the best answers. Pure.

The search of `transformers` (`generate(num_beams=...)`, `do_sample=False`), against which the tests compare it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from heapq import nsmallest
from typing import NamedTuple

from cloister.kv import NO_BLOCK
from cloister.scheduler.admission import MAX_CANDIDATES, count_positions
from cloister.scheduler.request_table import RequestTable
from cloister.scheduler.sequence import RequestState, SequenceRecord, introduce
from cloister.types.events import Progressed
from cloister.types.request import BeamSearch, FinishReason
from cloister.types.step import Sample


class Beam(NamedTuple):
    """A beam that continues: its parent sequence, its next token, and its log-probability."""

    parent_id: int
    token_id: int
    logprob: float


class Hypothesis(NamedTuple):
    """A complete answer, including the token that ended it, and its score."""

    score: float
    token_ids: list[int]
    is_ended: bool
    """Ended by a token; otherwise by the maximum length."""


class Beams:
    """The beams of one request.

    Args:
        ends: ids of tokens that end an answer.
        max_output: maximum length of an answer in tokens.

    Attributes:
        hypotheses: complete answers, best first, at most `width`.
        is_done: no better answer is possible.
    """

    def __init__(self, search: BeamSearch, ends: Iterable[int], max_output: int) -> None:
        self.search = search
        self.hypotheses: list[Hypothesis] = []
        self.is_done = False
        self._ends = frozenset(ends)
        self._max_output = max_output
        self._logprobs: dict[int, float] = {}
        self._candidates: dict[int, Iterable[tuple[int, float]]] = {}

    @property
    def num_candidates(self) -> int:
        """Number of candidate tokens requested for each beam: enough for `width` beams to continue if all others end."""
        return max(2, 1 + len(self._ends)) * self.search.width

    def find_excess(self) -> str | None:
        """Returns why a step of the search would take too long, or None."""
        if self.search.width * self.num_candidates <= MAX_CANDIDATES:
            return None
        return f"{self.search.width} beams with {len(self._ends)} tokens that end an answer are too many; take fewer of either"

    def start(self, logprobs: Mapping[int, float]) -> None:
        """Sets the sequences that are now the beams, and their log-probabilities so far."""
        self._logprobs = dict(logprobs)

    def collect(self, seq_id: int, candidates: Iterable[tuple[int, float]]) -> bool:
        """Adds the candidate tokens of one beam, with log-probabilities; returns True once all beams have theirs."""
        self._candidates[seq_id] = candidates
        return self._candidates.keys() == self._logprobs.keys()

    def advance(self, outputs: Mapping[int, list[int]]) -> list[Beam]:
        """Returns the beams that continue, best first; those that end become hypotheses.

        Args:
            outputs: output tokens of each beam so far.
        """
        length = 1 + len(next(iter(outputs.values())))
        divisor = length**self.search.length_penalty
        places = {seq_id: place for place, seq_id in enumerate(self._logprobs)}
        found = (
            Beam(seq_id, token_id, self._logprobs[seq_id] + logprob)
            for seq_id, candidates in self._candidates.items()
            for token_id, logprob in candidates
        )
        best = nsmallest(self.num_candidates, found, key=lambda beam: (-beam.logprob, places[beam.parent_id], beam.token_id))
        self._candidates = {}
        kept: list[Beam] = []
        width, is_last = self.search.width, length >= self._max_output
        for rank, beam in enumerate(best):
            is_end = beam.token_id in self._ends
            if not (is_end or is_last):
                kept.append(beam)
            elif rank < width:  # an end that is less likely than `width` others does not count
                token_ids = [*outputs[beam.parent_id], beam.token_id]
                self.hypotheses.append(Hypothesis(beam.logprob / divisor, token_ids, is_end))
        self.hypotheses = sorted(self.hypotheses, key=lambda hypothesis: -hypothesis.score)[:width]
        kept = kept[:width]
        is_full = len(self.hypotheses) == width
        can_improve = bool(kept) and (not is_full or kept[0].logprob / divisor > self.hypotheses[-1].score)
        self.is_done = not can_improve or (is_full and self.search.early_stopping)
        return kept


class BeamSearches:
    """Advances the beam searches of a scheduler.

    Args:
        requests: table of requests, which holds the beams as sequences and receives their answers.
        num_slots: slots that all searches together may hold. Beams are never preempted, so others need slots that beams cannot
            take.

    Attributes:
        admitted: searches that are queued or run, and those that ended since the last `admit`.
    """

    def __init__(self, requests: RequestTable, num_slots: int) -> None:
        self._requests = requests
        self._num_slots = num_slots
        self.admitted: list[RequestState] = []

    def admit(self, choose: Callable[[Collection[RequestState]], RequestState]) -> None:
        """Queues searches that were held, while all that are queued or run have slots in their share.

        One that waited in the policy's queue for others to end would hold up every request behind it. Searches that have ended
        are forgotten, so it is called for each plan while any are held or `admitted`.

        Args:
            choose: returns the next one (`SchedulingPolicy.choose_search`).
        """
        held, states = self._requests.held_searches, self._requests.request_states
        if self.admitted:  # one that waited for its KV meanwhile is held again
            self.admitted = [
                state for state in self.admitted if states.get(name := state.request.request_id) is state and name not in held
            ]
        num_left = self._num_slots - sum(s.request.sampling.num_sequences for s in self.admitted)
        while held:
            state = choose(held.values())
            num_left -= state.request.sampling.num_sequences
            if num_left < 0:
                return
            del held[state.request.request_id]
            self.admitted.append(state)
            self._requests.queue(state)

    def count_promised(self) -> list[int]:
        """Returns the blocks of each group that all searches may still need."""
        states = {
            s.request_state.order: s.request_state for s in self._requests.running.values() if s.request_state.beams is not None
        }
        needed = [self.count_blocks(state) for state in states.values()]
        return [sum(counts) for counts in zip(*needed, strict=True)] if needed else [0] * self._requests.pool.num_groups

    def count_blocks(self, state: RequestState) -> list[int]:
        """Returns the blocks of each group that the beams of a request may still need if they share nothing.

        Beams are never preempted: the others would hold their blocks while they wait for one.
        """
        assert state.beams is not None
        width, pool = state.beams.search.width, self._requests.pool
        num_positions = count_positions(state.num_prompt_tokens, state.sequences[0].max_output)
        num_each = -(-num_positions // pool.block_size) + 1  # one more while a shared block is copied
        tables = [s.table.blocks for s in state.sequences if s.table is not None]
        counts = []
        for group in range(pool.num_groups):
            held = {block for table in tables for block in table[group :: pool.num_groups] if block != NO_BLOCK}
            counts.append(max(0, pool.max_blocks(group, num_each, width) - len(held)))
        return counts

    def collect(self, sequence: SequenceRecord, beams: Beams, sample: Sample, now: float) -> None:
        """Adds the candidate tokens of one beam; once all beams have theirs, the search continues or ends."""
        state = sequence.request_state
        if sample.logprobs is None:
            self._requests.end_request(
                state, FinishReason.ERROR, now, error="the engine gave no log-probabilities for beam search"
            )
            return
        if not beams.collect(sequence.seq_id, sample.logprobs[0].top):
            return
        state.num_beam_tokens += len(state.sequences)
        parents = {s.seq_id: s for s in state.sequences}
        kept = beams.advance({seq_id: s.token_ids[state.num_prompt_tokens :] for seq_id, s in parents.items()})
        if beams.is_done:
            self._end(state, beams, now)
            return
        children = [self._requests.carry_on(parents[b.parent_id], place, b.token_id) for place, b in enumerate(kept)]
        for parent in parents.values():
            self._requests.drop(parent)
        state.sequences = children
        beams.start({child.seq_id: beam.logprob for child, beam in zip(children, kept, strict=True)})

    def _end(self, state: RequestState, beams: Beams, now: float) -> None:
        """Ends a beam search with its best answers."""
        prompt, state.first_token_s = state.request.token_ids, now
        self._requests.drop_beams(state)
        for index, found in enumerate(beams.hypotheses[: state.request.sampling.n]):
            answer = self._requests.make_sequence(state, index, [*prompt, *found.token_ids], 0)
            self._requests.answers.append(introduce(answer))
            last = found.token_ids[-1]
            self._requests.events.append(
                Progressed(state.request.request_id, answer.seq_id, index, now, len(found.token_ids), index == 0)
            )
            is_asked_for = found.is_ended and last in state.request.sampling.stop_token_ids
            reason = FinishReason.STOP if found.is_ended else FinishReason.LENGTH
            self._requests.end(answer, reason, now, stop_reason=last if is_asked_for else None)
        if state.num_open:
            self._requests.end_request(state, FinishReason.ERROR, now, error="beam search found fewer answers than n")
