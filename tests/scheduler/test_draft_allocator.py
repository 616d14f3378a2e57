"""Drafts take blocks and tokens that nobody needs: others who wait, prefill or are less urgent are served as without drafts."""

import pytest

from cloister.kv import BlockPool, PrefixKeys
from cloister.scheduler import BudgetConfig, Scheduler, SchedulerConfig
from cloister.scheduler.speculation import DrafterLimits, FixedSpeculation
from cloister.types.events import Ended, Preempted, Scheduled
from cloister.types.request import Request, SamplingParams
from tests.checked_runner import CheckedRunner

NUM_DRAFTS = 8


def ask(name, length, max_tokens, priority=0):
    sampling = SamplingParams(max_tokens=max_tokens)
    return Request(request_id=name, token_ids=list(range(length)), sampling=sampling, priority=priority)


def serve(requests, *, num_blocks, block_size, num_drafts=NUM_DRAFTS, policy="fcfs", max_num_seqs=8, max_tokens=64):
    """Serves requests, each with the step that it comes before; returns the plans, each with what happened, to the end."""
    pool = BlockPool(num_blocks, block_size)
    config = SchedulerConfig(
        max_model_len=200, max_num_seqs=max_num_seqs, policy=policy, budget=BudgetConfig(max_tokens=max_tokens)
    )
    speculation = FixedSpeculation("any", num_drafts, DrafterLimits(16)) if num_drafts else None
    scheduler = Scheduler(config, pool, None, speculation)
    runner = CheckedRunner(num_blocks, block_size)
    steps = []
    while len(steps) < 2000:
        for step, request in requests:
            if step == len(steps):
                scheduler.add(request, float(step))
        plan = scheduler.plan(float(len(steps)))
        if plan is None:
            break
        steps.append((plan, scheduler.commit(runner.run(plan), {}, float(len(steps)))))
        pool.check()
    assert not scheduler.requests
    return steps


def when(steps, kind, name):
    return next(i for i, (_, events) in enumerate(steps) for e in events if isinstance(e, kind) and e.request_id == name)


def test_a_sequence_that_a_more_urgent_one_displaced_in_this_step_drafts_nothing():
    num_displaced = 0
    for num_blocks in range(44, 64):
        requests = [(0, ask("now", 4, 24)), (0, ask("later", 40, 4, 1))]
        steps = serve(requests, num_blocks=num_blocks, block_size=1, policy="priority", num_drafts=num_blocks % 4)
        num_displaced += any(isinstance(event, Preempted) for _, events in steps for event in events)
        assert sum(isinstance(event, Ended) for _, events in steps for event in events) == 2
    assert num_displaced


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("max_tokens", [12, 24, 64])
def test_no_block_is_held_for_drafts_in_a_step_that_preempts(block_size, max_tokens):
    num_preempted = 0
    for num_blocks in range(-(-48 // block_size), -(-80 // block_size)):
        requests = [(0, ask("a", 4, 24)), (0, ask("b", 40, 4)), (3, ask("c", 30, 9))]
        for plan, events in serve(requests, num_blocks=num_blocks, block_size=block_size, max_tokens=max_tokens):
            if any(isinstance(event, Preempted) for event in events):
                num_preempted += 1
                for part in plan.sequences:
                    end = part.start + part.num_tokens
                    assert -(-end // block_size) == -(-(end - part.num_drafts) // block_size)
    assert num_preempted


@pytest.mark.parametrize("num_blocks", [27, 1000])
def test_who_waits_is_admitted_as_soon_as_without_drafts(num_blocks):
    requests = [(0, ask("a", 4, 100)), (0, ask("c", 4, 100)), (2, ask("b", 40, 4))]
    for num_drafts in (0, NUM_DRAFTS):
        steps = serve(requests, num_blocks=num_blocks, block_size=4, num_drafts=num_drafts, max_tokens=18)
        assert when(steps, Scheduled, "b") == 2


@pytest.mark.parametrize("length", [8, 9, 10])
def test_the_end_of_a_prompt_is_shown_to_drafters_though_all_but_a_position_was_cached(length):
    pool = BlockPool(20, 4)
    config = SchedulerConfig(max_model_len=40, budget=BudgetConfig(max_tokens=64))
    scheduler = Scheduler(config, pool, PrefixKeys("model", 4), FixedSpeculation("any", 3, DrafterLimits(16)))
    runner = CheckedRunner(20, 4)
    for number in range(2):
        scheduler.add(ask(str(number), length, 6), 0.0)
        plan = scheduler.plan(0.0)
        assert [part.is_watched for part in plan.sequences] == [True]
        scheduler.commit(runner.run(plan), {}, 0.0)
        scheduler.abort(str(number), 0.0)
    assert plan.sequences[0].num_tokens == length - (length - 1) // 4 * 4
