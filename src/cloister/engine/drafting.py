"""Draft counts of one step, for the event stream (the source of all metrics)."""

from __future__ import annotations

from cloister.scheduler import StepCost, StepSize
from cloister.types.events import Drafting
from cloister.types.step import StepPlan, StepResult


def describe_drafting(plan: StepPlan, result: StepResult) -> tuple[Drafting, ...]:
    """Returns the counts of drafted and accepted tokens for each drafter of a step; empty if the step used no drafters."""
    drafter_of = {part.seq_id: part.drafter for part in plan.sequences if part.num_drafts}
    drafted: dict[str, list[int]] = {}
    accepted: dict[str, list[int]] = {}
    num_drafts: dict[str, int] = {}
    for sample in result.samples:
        name = drafter_of.get(sample.seq_id)
        if name is None or not sample.num_drafted:
            continue
        num_drafts[name] = num_drafts.get(name, 0) + 1
        _count(drafted.setdefault(name, []), range(sample.num_drafted))
        _count(accepted.setdefault(name, []), sample.accepted)
    names = sorted({*drafted, *result.draft_s})
    return tuple(
        Drafting(
            drafter=name,
            num_drafts=num_drafts.get(name, 0),
            drafted=tuple(drafted.get(name, ())),
            accepted=tuple(accepted.get(name, ())),
            draft_s=result.draft_s.get(name, 0.0),
        )
        for name in names
    )


def measure(plan: StepPlan, result: StepResult) -> tuple[int, float]:
    """Returns the positions that a step computed and the keys that they attended to. A plan may reserve more drafts than were
    made."""
    num_drafted = {sample.seq_id: sample.num_drafted for sample in result.samples if sample.num_drafted}
    size = StepSize()
    for part in plan.sequences:
        size = size.plus(part.start, part.num_tokens - part.num_drafts + num_drafted.get(part.seq_id, 0))
    return int(size.num_tokens), size.num_attended


def weigh(drafting: tuple[Drafting, ...], plan: StepPlan, result: StepResult, cost: StepCost) -> tuple[float, float]:
    """Returns the seconds that drafts saved in a step, and those that they cost.

    Saved: the predicted time of the steps without drafts that the accepted drafts replace. Such a step yields one token for
    each sequence that samples. Cost: the time of this step minus the predicted time of the same step without drafts; negative
    if it was faster than predicted.
    """
    num_accepted = sum(sum(drafter.accepted) for drafter in drafting)
    plain_size = StepSize()
    for part in plan.sequences:
        plain_size = plain_size.plus(part.start, part.num_tokens - part.num_drafts)
    plain_s = cost.predict(plain_size)
    gained_s = plain_s * num_accepted / max(1, len(result.samples))
    return gained_s, result.elapsed_s - plain_s


def _count(counts: list[int], places: range | tuple[int, ...]) -> None:
    for place in places:
        if place >= len(counts):
            counts.extend([0] * (place + 1 - len(counts)))
        counts[place] += 1
