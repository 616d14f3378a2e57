"""What a step drafted, as counts in the event stream."""

import pytest

from cloister.engine.drafting import describe_drafting, measure, weigh
from cloister.scheduler import StepCost, StepSize
from cloister.types.events import Drafting
from cloister.types.step import Sample, SequencePlan, StepPlan, StepResult


def part(seq_id: int, num_drafts: int = 0, drafter: str = "") -> SequencePlan:
    return SequencePlan(
        seq_id=seq_id, start=100, num_tokens=1 + num_drafts, table_start=0, new_block_ids=[], num_samples=1,
        num_drafts=num_drafts, drafter=drafter,
    )  # fmt: skip


def sample(seq_id: int, num_drafted: int = 0, accepted: tuple[int, ...] = ()) -> Sample:
    return Sample(seq_id, [0] * (1 + len(accepted)), None, num_drafted, accepted)


PLAN = StepPlan(plan_id=0, sequences=[part(1, 4, "medusa"), part(2, 4, "medusa"), part(3, 3, "ngram"), part(4)])
RESULT = StepResult(
    plan_id=0,
    samples=[sample(1, 4, (0, 2)), sample(2, 2), sample(3), sample(4)],
    elapsed_s=0.016,
    draft_s={"medusa": 0.003, "ngram": 0.001},
)


def test_a_steps_drafts_are_counted_by_drafter_and_place() -> None:
    assert describe_drafting(PLAN, RESULT) == (
        Drafting("medusa", 2, (2, 2, 1, 1), (1, 0, 1), 0.003),
        Drafting("ngram", 0, (), (), 0.001),
    )


def test_a_step_without_drafters_says_nothing() -> None:
    assert describe_drafting(StepPlan(plan_id=0, sequences=[part(4)]), StepResult(plan_id=0, samples=[sample(4)])) == ()


def test_positions_that_nobody_drafted_are_not_counted() -> None:
    assert PLAN.num_tokens == 15
    num_tokens, num_attended = measure(PLAN, RESULT)
    assert num_tokens == 10
    assert num_attended == 5 * 103 + 3 * 102 + 2 * 101


def test_time_gained_is_that_of_steps_made_needless_and_time_spent_what_the_step_took_longer() -> None:
    cost = StepCost()
    for _ in range(200):
        for num in (1, 4, 64):
            cost.learn(StepSize(num, 0, 0), 0.008 + 0.0005 * num)
    gained_s, spent_s = weigh(describe_drafting(PLAN, RESULT), PLAN, RESULT, cost)
    assert gained_s == pytest.approx(0.010 * 2 / 4, rel=0.02), "two tokens more, of four sequences"
    assert spent_s == pytest.approx(0.016 - 0.010, rel=0.03)
