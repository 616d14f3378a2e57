"""Beam searches that run: what may follow each beam comes in, new beams share blocks, the best answers go out. Pure."""

from __future__ import annotations

from cloister.scheduler.admission import count_positions
from cloister.scheduler.beams import Beams
from cloister.scheduler.request_table import RequestTable
from cloister.scheduler.sequence import RequestState, Sequence, introduce
from cloister.types.events import Progressed
from cloister.types.request import FinishReason
from cloister.types.step import Sample


class BeamSearches:
    """Carries the searches of a scheduler on.

    Args:
        requests: who is there; the beams are sequences there, and their answers go there.
    """

    def __init__(self, requests: RequestTable) -> None:
        self._requests = requests

    def count_promised(self) -> int:
        """Returns the blocks that all searches may still need."""
        return sum(self.count_blocks(group) for group in self._searching())

    def _searching(self) -> list[RequestState]:
        """Returns the requests whose beams run."""
        groups = {s.group.order: s.group for s in self._requests.running.values() if s.group.beams is not None}
        return list(groups.values())

    def count_blocks(self, group: RequestState) -> int:
        """Returns the blocks that the beams of a request may still need if they share nothing.

        None of them is preempted: the others would wait for it with what they hold.
        """
        assert group.beams is not None
        width = group.beams.search.width
        num_positions = count_positions(group.num_prompt_tokens, group.sequences[0].max_output)
        num_each = -(-num_positions // self._requests.pool.block_size) + 1  # one more while a shared block is copied
        held = {block for s in group.sequences if s.table is not None for block in s.table.blocks}
        return max(0, width * num_each - len(held))

    def take(self, sequence: Sequence, beams: Beams, sample: Sample, now: float) -> None:
        """Takes what may follow one beam; with those of all beams the search goes on, or ends."""
        group = sequence.group
        if sample.logprobs is None:
            self._requests.end_group(
                group, FinishReason.ERROR, now, error="the engine gave no log-probabilities for beam search"
            )
            return
        if not beams.take(sequence.seq_id, sample.logprobs[0].top):
            return
        parents = {s.seq_id: s for s in group.sequences}
        kept = beams.advance({seq_id: s.token_ids[group.num_prompt_tokens :] for seq_id, s in parents.items()})
        if beams.is_done:
            self._end(group, beams, now)
            return
        children = [self._requests.carry_on(parents[b.parent_id], place, b.token_id) for place, b in enumerate(kept)]
        for parent in parents.values():
            self._requests.drop(parent)
        group.sequences = children
        beams.start({child.seq_id: beam.logprob for child, beam in zip(children, kept, strict=True)})

    def _end(self, group: RequestState, beams: Beams, now: float) -> None:
        """Ends a beam search with its best answers."""
        prompt, group.first_token_s = group.request.token_ids, now
        self._requests.drop_beams(group)
        for index, found in enumerate(beams.hypotheses[: group.request.sampling.n]):
            answer = self._requests.make_sequence(group, index, [*prompt, *found.token_ids], 0)
            self._requests.answers.append(introduce(answer))
            last = found.token_ids[-1]
            self._requests.events.append(
                Progressed(group.request.request_id, answer.seq_id, index, now, len(found.token_ids), index == 0)
            )
            is_asked_for = found.is_ended and last in group.request.sampling.stop_token_ids
            reason = FinishReason.STOP if found.is_ended else FinishReason.LENGTH
            self._requests.end(answer, reason, now, stop_reason=last if is_asked_for else None)
        if group.num_open:
            self._requests.end_group(group, FinishReason.ERROR, now, error="beam search found fewer answers than n")
