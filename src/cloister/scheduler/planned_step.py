"""A step while it is filled, and until it is committed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloister.scheduler.budget import StepBudget
from cloister.scheduler.sequence import SequenceRecord
from cloister.scheduler.speculation import DraftDecision
from cloister.types.step import StepPlan

if TYPE_CHECKING:
    from cloister.scheduler.kv_load import KVLoad


class PlannedStep:
    """A step while it is filled, and until it is committed."""

    __slots__ = (
        "budget",
        "choices",
        "forked",
        "level_slack",
        "loads",
        "may_admit",
        "now",
        "parts",
        "plan",
        "prefill_level",
        "yields_to_prefill",
    )

    def __init__(self, plan: StepPlan, budget: StepBudget, now: float, level_slack: float | None) -> None:
        self.plan = plan
        self.budget = budget
        self.now = now
        self.level_slack = level_slack
        """As in `SchedulingPolicy`."""
        self.parts: list[tuple[SequenceRecord, int, int, int]] = []
        """(sequence, first position behind its part, positions of the part that are prefill)"""
        self.choices: dict[int, DraftDecision] = {}
        """Draft decisions of this step, by sequence id."""
        self.forked: list[SequenceRecord] = []
        self.loads: list[tuple[KVLoad, int]] = []
        """(load, entry that it brings)"""
        self.prefill_level: int | None = None
        """Most urgent level with prefill in this step."""
        self.yields_to_prefill = False
        """Planning has reached levels less urgent than that of a prompt in this step, and may lengthen the step only by
        `level_slack`."""
        self.may_admit = True

    @property
    def only_decodes(self) -> bool:
        """Whether it computes no prompt."""
        return not any(num_prefill for *_, num_prefill in self.parts)

    def keep_images_whole(self, sequence: SequenceRecord, num_tokens: int, *, strict: bool) -> int:
        """Returns the size of a chunk of at most `num_tokens` positions that does not end inside an image whose positions see
        each other; the chunk ends before such an image.

        Args:
            strict: False: an image at the beginning of the chunk is computed whatever its time, if the step's tokens suffice.
        """
        start = sequence.num_planned
        for image in sequence.request_state.request.images:
            if image.bidirectional and image.offset < start + num_tokens < image.end:
                if image.offset > start:
                    return image.offset - start
                return 0 if strict or image.end - start > self.budget.num_left else image.end - start
        return num_tokens

    def planned(self) -> set[int]:
        """Returns the ids of the sequences that are in this step."""
        return {part[0].seq_id for part in self.parts} | {sequence.seq_id for sequence in self.forked}

    def enter(self, level: int) -> None:
        """Starts planning sequences of `level`, which must not slow down the prefill of a more urgent level."""
        if self.level_slack is None or self.prefill_level is None:
            return
        if level > self.prefill_level and not self.yields_to_prefill:
            self.yields_to_prefill = True
            self.budget.bound_by_slack(self.level_slack)
