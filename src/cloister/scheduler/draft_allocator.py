"""Allocates drafts to the sequences of a step, and processes which were accepted."""

from __future__ import annotations

from cloister.scheduler.planned_step import PlannedStep
from cloister.scheduler.policies.base import SchedulingPolicy
from cloister.scheduler.request_table import RequestTable
from cloister.scheduler.sequence import SequenceRecord, Status, table_of
from cloister.scheduler.speculation import DraftDecision, Speculation
from cloister.scheduler.step_cost import StepCost, StepSize
from cloister.types.step import Sample, StepResult


class DraftAllocator:
    """Gives drafts the capacity that nothing else needs, and releases it when they are rejected.

    Args:
        speculation: decides how many tokens to draft.
        requests: table of requests.
        policy: decides which sequence is next.
        cost: cost model of steps.
        max_num_seqs: maximum number of running sequences.
    """

    def __init__(
        self, speculation: Speculation, requests: RequestTable, policy: SchedulingPolicy, cost: StepCost, max_num_seqs: int
    ) -> None:
        self._speculation = speculation
        self._requests = requests
        self._pool = requests.pool
        self._policy = policy
        self._cost = cost
        self._max_num_seqs = max_num_seqs

    def choose(self, step: PlannedStep, decodes: list[SequenceRecord], plain: StepSize) -> list[DraftDecision]:
        """Returns the draft decision of each sequence.

        Drafts displace nothing: they use spare blocks only, and leave half of the step's tokens and three quarters of the time
        by which it may grow to other work.

        Args:
            plain: size of the step with one token for each decode and no drafts.
        """
        num_left, num_spare = step.budget.num_left - len(decodes), self._pool.num_available
        for sequence in decodes:
            num_spare -= 1 + table_of(sequence).num_missing(sequence.num_planned + 1)
        has_others = bool(self._requests.num_waiting) or len(self._requests.running) > len(decodes)
        if has_others:
            num_others, num_blocks = self._count_others(step, decodes, num_spare)
            has_others = num_others > 0
            num_left = (num_left - num_others) // 2 if num_others else num_left
            num_spare -= num_blocks
        choices = self._speculation.choose(decodes, self._cost, plain, num_left)
        if has_others:
            drafted = plain
            for sequence, choice in zip(decodes, choices, strict=True):
                drafted = drafted.minus(sequence.num_planned, 1).plus(sequence.num_planned, 1 + choice.num_drafts)
            share = step.budget.share_for_drafts(plain, drafted)
            if share < 1.0:
                choices = [choice._replace(num_drafts=int(share * choice.num_drafts)) for choice in choices]
        for place, (sequence, choice) in enumerate(zip(decodes, choices, strict=True)):
            num_drafts = min(choice.num_drafts, sequence.max_drafts)
            table, start = table_of(sequence), sequence.num_planned + 1
            num_missing = table.num_missing(start)
            while num_drafts and table.num_missing(start + num_drafts) - num_missing > num_spare:
                num_drafts -= 1
            num_spare -= table.num_missing(start + num_drafts) - num_missing
            if num_drafts != choice.num_drafts:
                choices[place] = choice._replace(num_drafts=num_drafts)
        return choices

    def _count_others(self, step: PlannedStep, decodes: list[SequenceRecord], num_spare: int) -> tuple[int, int]:
        """Returns the number of sequences that may join a step in addition to its decodes, and the blocks that they need.

        Args:
            num_spare: spare blocks after those of the decodes. The next waiting sequence counts only if they suffice for it.
        """
        running = self._requests.running
        in_step = step.planned() | {sequence.seq_id for sequence in decodes}
        others = [sequence for seq_id, sequence in running.items() if seq_id not in in_step]
        num_blocks = sum(1 + table_of(s).num_missing(len(s.token_ids) + s.num_pending) for s in others)
        may_come = self._requests.num_waiting and step.may_admit and len(running) < self._max_num_seqs
        first = self._policy.peek() if may_come else None
        if first is None:
            return len(others), num_blocks
        # as in admission: one more block for each running sequence
        num_more = -(-(len(first.token_ids) + 1) // self._pool.block_size) + len(running)
        if num_more > num_spare - num_blocks:
            return len(others), num_blocks
        return len(others) + 1, num_blocks + num_more

    def release_rejected(self, step: PlannedStep, result: StepResult) -> StepSize:
        """Reads which drafts were accepted, and releases the blocks of the others immediately. Returns the actual size of the
        step, without planned drafts that were not made."""
        samples = {sample.seq_id: sample for sample in result.samples}
        size = step.budget.size
        asked: dict[str, tuple[int, int]] = {}
        for place, (sequence, _, planned_end, _) in enumerate(step.parts):
            choice = step.choices.get(sequence.seq_id)
            if choice is None or not choice.num_drafts:
                continue
            start = planned_end - 1 - choice.num_drafts
            sample = samples.get(sequence.seq_id) or Sample(sequence.seq_id, [])
            size = size.minus(start, 1 + choice.num_drafts).plus(start, 1 + sample.num_drafted)
            num_asked, num_drafts = asked.get(choice.drafter, (0, 0))
            asked[choice.drafter] = (num_asked + 1, num_drafts + choice.num_drafts)
            end = start + 1 + len(sample.accepted)
            step.parts[place] = (sequence, start, end, 0)
            if sequence.status is Status.RUNNING:
                sequence.num_planned = end
                table_of(sequence).shrink(end)
                self._speculation.learn(sequence, choice, sample)
        if step.only_decodes:  # drafters process prompts too, in a time that is not reported
            self._speculation.learn_cost(asked, result.draft_s)
        return size

    def learn(self, step: PlannedStep, size: StepSize, result: StepResult, elapsed_s: float) -> None:
        """Adds the measured time of a step.

        Args:
            size: its size, without planned drafts that were not made.
            elapsed_s: its time without drafting.
        """
        if step.only_decodes:
            self._speculation.learn_step(size, sum(sample.num_drafted for sample in result.samples), elapsed_s)
