"""What streams feel of prompts, in replays whose steps cost what those of a model of 0.5B in int8 cost on two cores."""

from itertools import pairwise

import pytest

from benchmarks.replay import StepCosts, make_scheduler, replay
from cloister.bench.drive import Timed, make_requests
from cloister.bench.workloads import WorkItem
from cloister.scheduler import BudgetConfig, SchedulerConfig
from cloister.scheduler.step_planner import BURST_LASTS_S
from cloister.types.config import EngineConfig
from cloister.types.request import Request, SamplingParams
from tests.thinning import cover

COSTS = StepCosts(step_s=0.0175, token_s=2.07e-4, sample_s=3e-4, key_s=6.65e-8)
LARGE_COSTS = StepCosts(step_s=0.2, token_s=2.4e-3, sample_s=2e-3, key_s=6.65e-7)
"""Of a model of ten times the size."""
FLOOR = BudgetConfig(floor_s=0.2)
DEFAULT = BudgetConfig(floor_s=EngineConfig().stall_floor_ms / 1e3)
NEVER_PACED = BudgetConfig(max_stall=1e6)
ALWAYS_PACED = BudgetConfig()
START_S = 5.0
"""When all is over that teaches the scheduler what a step costs."""


def run(requests, budget, costs=COSTS):
    """Replays requests behind two that teach; returns the records of the requests, and the steps since `START_S`."""
    config = SchedulerConfig(8192, budget=budget, prefix_cache=False)
    lessons = make_requests([WorkItem(0.0, [5] * length, length, 8) for length in (64, 520)], "lesson")
    done = replay(make_scheduler(config, 2000, 16), [*lessons, *requests], costs).recorder
    return done.records[len(lessons) :], [step for step in done.steps if step.now_s > START_S]


def burst(apart_s=0.0):
    lengths = [128 + 384 * place // 15 for place in range(16)]
    items = [WorkItem(START_S + place * apart_s, [5] * length, length, 128) for place, length in enumerate(lengths)]
    return make_requests(items, "burst")


def request(name, due_s, length, num_new, tenant="local"):
    sampling = SamplingParams(max_tokens=num_new)
    return Timed(due_s, Request(request_id=name, token_ids=[5] * length, sampling=sampling, tenant=tenant))


def seconds(steps):
    return steps[-1].now_s - START_S


def gaps(records):
    times = [[time_s for time_s, _ in record.deliveries] for record in records]
    return [after - before for stream in times for before, after in pairwise(stream)]


@pytest.mark.parametrize("apart_s", [0.0, 0.003, 0.02])
def test_prompts_that_come_together_lose_next_to_no_throughput_to_pacing(apart_s):
    _, free = run(burst(apart_s), NEVER_PACED)
    _, steps = run(burst(apart_s), DEFAULT)
    assert seconds(free) / seconds(steps) > 0.95


def test_prompts_that_come_one_after_the_other_lose_a_tenth_and_keep_their_pace():
    _, free = run(burst(0.1), NEVER_PACED)
    records, steps = run(burst(0.1), DEFAULT)
    assert seconds(free) / seconds(steps) > 0.87
    assert max(gaps(records[:4])) < 0.08


def test_a_burst_does_not_hold_up_a_stream_that_runs_already():
    stream = request("stream", START_S, 128, 400)
    records, _ = run([stream, *(Timed(timed.due_s + 2.0, timed.request) for timed in burst(0.003))], DEFAULT)
    assert 0.03 < max(gaps(records[:1])) < 1.1 * DEFAULT.floor_s
    assert max(gaps(records[1:])) < 1.1 * DEFAULT.floor_s


def test_who_comes_in_a_burst_is_held_up_in_its_first_second_only_and_by_a_fifth_of_one():
    records, _ = run(burst(0.003), DEFAULT)
    for record in records:
        times = [time_s for time_s, _ in record.deliveries]
        held = [
            (after - times[0], after - before) for before, after in pairwise(times) if after - before > 1.1 * DEFAULT.floor_s
        ]
        assert all(age_s < 1.3 and gap_s < 0.22 for age_s, gap_s in held)


def test_a_step_of_short_decodes_is_filled_to_the_floor_and_no_further():
    stream = request("stream", START_S, 16, 400)
    records, steps = run([stream, request("long", START_S + 2.0, 4000, 2)], FLOOR)
    quiet_s = max(step.elapsed_s for step in steps if step.num_tokens == step.num_samples)
    assert 2.0 * FLOOR.max_stall * quiet_s < max(gaps(records[:1])) < 1.1 * FLOOR.floor_s


@pytest.mark.parametrize(("budget", "costs"), [(ALWAYS_PACED, COSTS), (FLOOR, LARGE_COSTS)])
def test_where_decodes_take_longer_than_the_floor_a_prompt_that_comes_while_they_run_stretches_them_by_the_stall(budget, costs):
    streams = [request(f"stream-{place}", START_S, 128, 400) for place in range(8)]
    records, steps = run([*streams, request("long", START_S + 30.0 * costs.step_s / COSTS.step_s / 10, 4000, 2)], budget, costs)
    quiet_s = max(step.elapsed_s for step in steps if step.num_tokens == step.num_samples)
    *streams, long = records
    loaded = [
        after - before
        for stream in streams
        for before, after in pairwise([t for t, _ in stream.deliveries if long.due_s < t < long.due_s + long.ttft_s])
    ]
    assert 1.2 * quiet_s < max(loaded) < 1.1 * budget.max_stall * quiet_s


def test_a_burst_of_another_class_does_not_hold_up_a_stream_either():
    config = SchedulerConfig(8192, budget=DEFAULT, prefix_cache=False, policy="priority")
    lessons = make_requests([WorkItem(0.0, [5] * length, length, 8) for length in (64, 520)], "lesson")
    urgent = request("urgent", START_S, 128, 300)
    others = [
        Timed(START_S + 1.7, Request(request_id=f"b{i}", token_ids=[5] * n, sampling=SamplingParams(max_tokens=40), priority=5))
        for i, n in enumerate((64, 64, 1500, 1500, 1500, 1500))
    ]
    done = replay(make_scheduler(config, 4000, 16), [*lessons, urgent, *others], COSTS).recorder
    assert max(gaps([done.record_of("urgent")])) < 1.1 * DEFAULT.floor_s


@pytest.mark.parametrize(("apart", "costs"), cover([8.0, 7.3, 6.1], [COSTS, StepCosts(0.008, 1.0e-3, 5e-4, 5e-8)]))
def test_a_flood_by_one_tenant_adds_a_step_to_what_another_waits_for_its_first_token(costs, apart):
    config = SchedulerConfig(1024, budget=DEFAULT, prefix_cache=False, policy="fair", max_num_seqs=16)
    one_s = costs.step_s + 512 * costs.token_s
    flood = [request(f"flood-{n}", START_S, 512, 64, tenant="flood") for n in range(200)]
    begin_s = START_S + 3 * BURST_LASTS_S  # at its beginning a burst may take steps of 0.2 s
    victims = [request(f"victim-{n}", begin_s + n * apart * one_s, 512, 16, tenant="victim") for n in range(8)]
    lessons = make_requests([WorkItem(0.0, [5] * length, length, 8) for length in (64, 520)], "lesson")
    done = replay(make_scheduler(config, 2000, 16), [*lessons, *flood, *victims], costs).recorder
    waits = [record.ttft_s for record in done.records[-len(victims) :]]
    assert max(waits) < one_s + 2 * DEFAULT.floor_s
