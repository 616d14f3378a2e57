"""What streams feel of prompts, in replays whose steps cost what those of a model of 0.5B in int8 cost on two cores."""

from itertools import pairwise

import pytest

from cloister.bench.drive import Timed, make_requests
from cloister.bench.replay import StepCosts, make_scheduler, replay
from cloister.bench.workloads import WorkItem
from cloister.sched import BudgetConfig, SchedulerConfig
from cloister.types.request import Request, SamplingParams

COSTS = StepCosts(step_s=0.0175, token_s=2.07e-4, sample_s=3e-4, key_s=6.65e-8)
BURST = BudgetConfig()
NEVER_PACED = BudgetConfig(max_stall=1e6)
ALWAYS_PACED = BudgetConfig(burst_stall=1.0)
START_S = 5.0
"""When all is over that teaches the scheduler what a step costs."""


def run(requests, budget, policy="fcfs"):
    """Replays requests behind two that teach; returns the records of the requests, and the steps since `START_S`."""
    config = SchedulerConfig(8192, budget=budget, policy=policy, prefix_cache=False)
    lessons = make_requests([WorkItem(0.0, [5] * length, length, 8) for length in (64, 520)], "lesson")
    done = replay(make_scheduler(config, 2000, 16), [*lessons, *requests], COSTS).recorder
    return done.records[len(lessons) :], [step for step in done.steps if step.now_s > START_S]


def burst(apart_s=0.0):
    lengths = [128 + 384 * place // 15 for place in range(16)]
    items = [WorkItem(START_S + place * apart_s, [5] * length, length, 128) for place, length in enumerate(lengths)]
    return make_requests(items, "burst")


def request(name, due_s, length, num_new, urgency=0):
    sampling = SamplingParams(max_tokens=num_new)
    return Timed(due_s, Request(request_id=name, token_ids=[5] * length, sampling=sampling, priority=urgency))


def seconds(steps):
    return steps[-1].now_s - START_S


@pytest.mark.parametrize("apart_s", [0.0, 0.003])
def test_prompts_that_arrive_at_once_lose_less_than_a_tenth_of_their_throughput_to_pacing(apart_s):
    _, free = run(burst(apart_s), NEVER_PACED)
    _, steps = run(burst(apart_s), BURST)
    _, paced = run(burst(apart_s), ALWAYS_PACED)
    assert seconds(free) / seconds(steps) > 0.9 > seconds(free) / seconds(paced)


def gaps(records):
    times = [[time_s for time_s, _ in record.deliveries] for record in records]
    return [after - before for stream in times for before, after in pairwise(stream)]


def test_streams_of_a_burst_never_wait_longer_than_its_stall():
    records, steps = run(burst(0.003), BURST)
    quiet_s = max(step.elapsed_s for step in steps if step.num_tokens == step.num_samples)
    assert 2.0 * quiet_s < max(gaps(records)) < 1.1 * BURST.burst_stall * quiet_s


def test_a_prompt_that_comes_while_streams_run_is_paced():
    streams = [request(f"stream-{place}", START_S, 128, 400) for place in range(8)]
    records, _ = run([*streams, request("long", START_S + 5.0, 4000, 2)], BURST)
    *streams, long = records
    arrived = [[t for t, _ in stream.deliveries if t > START_S + 5.0] for stream in streams]
    loaded = [b - a for times in arrived for a, b in pairwise(times)]
    quiet_s = COSTS.step_s + 8 * (COSTS.token_s + COSTS.sample_s + 700 * COSTS.key_s)
    assert long.ttft_s > 0.5
    assert max(loaded) < 1.1 * BURST.max_stall * quiet_s


def test_a_stream_that_began_before_protects_itself_from_a_burst_that_others_are_part_of():
    first = request("first", START_S, 128, 600)
    records, _ = run([first, *(Timed(timed.due_s + 2.0, timed.request) for timed in burst())], BURST)
    quiet_s = COSTS.step_s + 17 * (COSTS.token_s + COSTS.sample_s + 700 * COSTS.key_s)
    assert max(gaps(records[:1])) < 1.1 * BURST.max_stall * quiet_s


def test_a_flood_of_a_less_urgent_class_is_paced_even_if_it_had_been_there_before():
    flood = [request(f"flood-{place}", START_S, 4000, 2, urgency=1) for place in range(6)]
    records, _ = run([*flood, request("urgent", START_S + 1.0, 64, 60)], BURST, policy="priority")
    quiet_s = COSTS.step_s + 2 * (COSTS.token_s + COSTS.sample_s) + 200 * COSTS.key_s
    assert max(gaps(records[-1:])) < 1.1 * BURST.max_stall * quiet_s
