"""Policies on a virtual clock: what they are for, beside `fcfs`, and what nobody may suffer under them."""

import random
import statistics
from itertools import accumulate

import pytest

from benchmarks.replay import CountingRunner, VirtualTier, replay
from cloister.bench.drive import Timed
from cloister.kv import BlockPool, PrefixKeys
from cloister.scheduler import BudgetConfig, Scheduler, SchedulerConfig
from cloister.scheduler.policies import cfs, mlfq, qoe, reorder
from cloister.scheduler.policies.qoe import DeliveryTimeline, measure_qoe
from cloister.scheduler.sequence import Status
from cloister.types.request import Request, SamplingParams
from tests.checked_runner import CheckedRunner


def _step_s(step):
    return 0.01 + 0.0002 * step.num_tokens + 1e-7 * step.num_attended


PREEMPTIVE = ["mlfq", "cfs", "qoe"]
NEW = [*PREEMPTIVE, "reorder"]


def _request(name, prompt, output, draw=None):
    tokens = [draw.randrange(50) for _ in range(prompt)] if draw else list(range(prompt))
    sampling = SamplingParams(max_tokens=output, ignore_eos=True)
    return Request(request_id=name, token_ids=tokens, sampling=sampling, timeout_s=1e9)


def _make(policy, *, slots=4, num_blocks=400, keys=True, max_tokens=256):
    config = SchedulerConfig(max_model_len=1024, max_num_seqs=slots, policy=policy, budget=BudgetConfig(max_tokens=max_tokens))
    return Scheduler(config, BlockPool(num_blocks, 16), PrefixKeys("model", 16) if keys else None)


def _run(policy, requests, **shape):
    return replay(_make(policy, **shape), requests, _step_s)


def _heavy_tailed(num, gap_s, seed=3):
    draw = random.Random(seed)
    times = accumulate(draw.expovariate(1 / gap_s) for _ in range(num))
    lengths = [(draw.choice((8, 24)), 600 if draw.random() < 0.04 else draw.randrange(4, 16)) for _ in range(num)]
    return [Timed(at_s, _request(f"r{i}", *pair, draw)) for i, (at_s, pair) in enumerate(zip(times, lengths, strict=True))]


def _mean_e2e_s(run):
    return statistics.fmean(record.e2e_s for record in run.recorder.records)


def _longest_pause_s(run):
    return max(pause_s for record in run.recorder.records for pause_s in (record.ttft_s, *record.gaps_s))


def test_mlfq_answers_a_heavy_tailed_load_sooner_on_average_than_arrival():
    requests = _heavy_tailed(150, 0.2, seed=5)
    assert _mean_e2e_s(_run("mlfq", requests, slots=1)) < 0.5 * _mean_e2e_s(_run("fcfs", requests, slots=1))


def test_mlfq_lets_a_short_prompt_join_above_a_long_one():
    warm = [Timed(0.0, _request("warm", 4, 20))]
    long, short = Timed(5.0, _request("long", 900, 2)), Timed(5.0, _request("short", 4, 2))
    run = _run("mlfq", [*warm, long, short], slots=1)
    assert run.recorder.records[2].e2e_s < run.recorder.records[1].ttft_s
    assert run.preemptions["long"] == 0, "it should not have started at all"


@pytest.mark.parametrize("policy", PREEMPTIVE)
def test_a_flood_of_short_requests_starves_no_long_one(policy):
    flood = [Timed(0.1 + 0.11 * i, _request(f"s{i}", 8, 8)) for i in range(900)]  # about as much as one slot computes
    run = _run(policy, [Timed(0.0, _request("long", 64, 300)), *flood], slots=1)
    last_s = max(record.end_s for record in run.recorder.records)
    assert run.recorder.records[0].e2e_s < last_s / 2, "it ended with the flood only"


def test_who_waits_rises_in_mlfq_after_a_multiple_of_the_quantum():
    flood = [Timed(0.1 + 0.05 * i, _request(f"s{i}", 8, 8)) for i in range(600)]  # more than the slot computes
    run = _run("mlfq", [Timed(0.0, _request("long", 64, 300)), *flood], slots=1)
    served_s = 0.011 * 300
    assert max(run.recorder.records[0].gaps_s) < 2.5 * mlfq.PATIENCE * served_s


def test_cfs_gives_a_burst_its_first_tokens_long_before_arrival_does():
    burst = [Timed(0.0, _request(f"r{i}", 16, 200)) for i in range(24)]
    worst = {name: max(record.ttft_s for record in _run(name, burst).recorder.records) for name in ("cfs", "fcfs")}
    assert worst["cfs"] < 0.3 * worst["fcfs"]


def test_under_cfs_nobody_is_more_than_two_slices_ahead():
    scheduler, runner = _make("cfs", slots=2), CountingRunner()
    for i in range(6):
        scheduler.add(_request(f"r{i}", 16, 400), 0.0)
    for step in range(900):
        plan = scheduler.plan(0.01 * step)
        scheduler.commit(runner.run(plan), {}, 0.01 * step)
        counts = [state.sequences[0].num_output for state in scheduler.requests.values()]
        assert max(counts) - min(counts) <= 2 * cfs.SLICE_TOKENS


def test_a_request_that_comes_late_gets_no_credit_for_absence_from_cfs():
    early = [Timed(0.0, _request(f"r{i}", 16, 200)) for i in range(2)]
    run = _run("cfs", [*early, Timed(1.5, _request("late", 16, 200))], slots=2)
    ends = [record.end_s for record in run.recorder.records]
    assert ends[2] > max(ends[:2]) - 0.5, "it went first until it had caught up"


def test_short_requests_pass_one_that_does_not_fit_and_memory_is_full():
    draw = random.Random(1)
    requests = [
        Timed(0.01 * i, _request(f"r{i}", 400 if i % 6 == 1 else draw.randrange(16, 64), draw.randrange(30, 90), draw))
        for i in range(60)
    ]
    runs = {name: _run(name, requests, slots=32, num_blocks=40, keys=False) for name in ("fcfs", "reorder")}
    assert runs["reorder"].occupancy > runs["fcfs"].occupancy + 0.02
    assert runs["reorder"].clock.now() <= runs["fcfs"].clock.now()
    means = {name: statistics.fmean(record.ttft_s for record in run.recorder.records) for name, run in runs.items()}
    assert means["reorder"] < means["fcfs"]


def test_what_passed_makes_room_as_soon_as_that_suffices():
    first = Timed(0.0, _request("first", 112, 40))
    blocked = Timed(0.02, _request("blocked", 560, 4))  # 36 blocks of 40
    passing = [Timed(0.03, _request(f"p{i}", 64, 400)) for i in range(4)]
    run = _run("reorder", [first, blocked, *passing], slots=8, num_blocks=40, keys=False)
    by_name = dict(zip(["first", "blocked", "p0", "p1", "p2", "p3"], run.recorder.records, strict=True))
    assert by_name["p0"].ttft_s < by_name["blocked"].ttft_s
    assert by_name["blocked"].ttft_s < by_name["first"].e2e_s + 0.5, "it waited for those that passed it"
    assert run.preemptions["first"] == 0
    assert sum(run.preemptions.values()) >= 3


def test_a_bounded_number_passes_one_request():
    scheduler, runner = _make("reorder", slots=64, num_blocks=40, keys=False), CountingRunner()
    scheduler.add(_request("holder", 16, 600), 0.0)
    scheduler.commit(runner.run(scheduler.plan(0.0)), {}, 0.0)
    scheduler.add(_request("blocked", 600, 4), 0.0)
    for i in range(200):
        scheduler.add(_request(f"p{i}", 4, 2), 0.0)
    for step in range(150):
        if (plan := scheduler.plan(0.01 * step)) is not None:
            scheduler.commit(runner.run(plan), {}, 0.01 * step)
    started = [name for name in (f"p{i}" for i in range(200)) if name not in scheduler.requests]
    assert "blocked" in scheduler.requests
    assert len(started) == reorder.MAX_PASSES


# The metric of Andes


def test_an_answer_at_reading_speed_is_perfect_and_one_that_comes_sooner_is_no_better():
    period_s = 1 / qoe.READING_SPEED
    on_time = [(10.0 + qoe.EXPECTED_TTFT_S + period_s * i, 1) for i in range(50)]
    assert measure_qoe(10.0, on_time) == pytest.approx(1.0, abs=0.02)
    assert measure_qoe(10.0, [(10.5, 50)]) == 1.0


def test_a_late_answer_is_worth_the_ratio_of_areas():
    delay_s, num_tokens = 9.0, 48
    reading_s = num_tokens / qoe.READING_SPEED
    end_s = delay_s + reading_s
    read = num_tokens * reading_s / 2
    expected = num_tokens * reading_s / 2 + num_tokens * (end_s - qoe.EXPECTED_TTFT_S - reading_s)
    assert measure_qoe(0.0, [(delay_s, num_tokens)]) == pytest.approx(read / expected)


def test_a_reader_never_reads_what_has_not_come():
    timeline = DeliveryTimeline(0.0)
    timeline.advance(1.0, 3)
    timeline.advance(60.0, 3)
    assert timeline.num_read == pytest.approx(3.0)
    assert timeline.read_area == pytest.approx(3 * 59 - 3 * 3 / qoe.READING_SPEED / 2)
    assert timeline.predict_area(5.0, 100.0, 5.0) == pytest.approx(timeline.read_area + 15)
    assert timeline.predict_area(0.0, 2.0, 5.0) == pytest.approx(timeline.read_area + 15 + 2 * 25 / 2)


def test_qoe_serves_readers_better_than_arrival_when_there_is_too_much():
    draw = random.Random(2)
    requests = [Timed(0.25 * i, _request(f"r{i}", 32, draw.randrange(50, 250), draw)) for i in range(60)]
    runs = {name: _run(name, requests, slots=3) for name in ("fcfs", "qoe")}
    means = {n: statistics.fmean(measure_qoe(r.due_s, r.deliveries) for r in run.recorder.records) for n, run in runs.items()}
    assert means["qoe"] > means["fcfs"] + 0.1
    assert 0 < max(runs["qoe"].preemptions.values()) <= qoe.MAX_PREEMPTIONS


# What holds under each


def test_what_is_preempted_starts_again_only_behind_all_decodes_of_the_step_so_that_it_is_planned_once():
    scheduler, runner = _make("mlfq", slots=1), CheckedRunner(400, 16)
    scheduler.add(_request("long", 64, 200), 0.0)
    for step in range(100):
        result = runner.run(scheduler.plan(0.01 * step))
        scheduler.commit(result, {}, 0.01 * (step + 1))
    (sequence,) = scheduler.requests["long"].sequences
    scheduler.add(_request("short", 4, 2, random.Random(1)), 1.0)
    scheduler.plan(1.0)
    assert sequence.status is Status.WAITING
    assert scheduler._policy.level(sequence) > 1 + mlfq.NUM_LEVELS


@pytest.mark.parametrize("policy", NEW)
def test_a_request_that_comes_to_an_idle_engine_starts_at_once(policy):
    run = _run(policy, [Timed(0.0, _request("early", 16, 4)), Timed(500.0, _request("late", 16, 4))])
    assert run.recorder.records[1].ttft_s < 0.1


@pytest.mark.parametrize("policy", PREEMPTIVE)
def test_what_is_computed_again_is_bounded_without_a_prefix_cache(policy):
    requests = [Timed(0.02 * i, _request(f"r{i}", 60 if i % 3 else 200, 60)) for i in range(60)]
    run = _run(policy, requests, slots=4, num_blocks=60, keys=False)
    needed = sum(r.num_input_tokens + r.num_output_tokens - 1 for r in run.recorder.records)
    assert sum(run.preemptions.values()) > 10, "the test must be tight enough"
    assert run.num_computed <= 3 * needed


@pytest.mark.parametrize("num_slots", [0, 400])
@pytest.mark.parametrize("policy", NEW)
def test_every_policy_ends_every_request_and_reads_only_its_own_kv(policy, num_slots):
    draw = random.Random(7)
    scheduler = _make(policy, slots=3 if policy in PREEMPTIVE else 16, num_blocks=30)
    runner = CheckedRunner(30, 16)
    tier = VirtualTier(scheduler, runner, 1000, num_slots, byte_s=1e-6) if num_slots else None
    requests = [Timed(0.03 * i, _request(f"r{i}", draw.randrange(4, 120), draw.randrange(2, 120), draw)) for i in range(40)]
    run = replay(scheduler, requests, _step_s, runner=runner, tier=tier)
    assert [r.num_output_tokens for r in run.recorder.records] == [t.request.sampling.max_tokens for t in requests]
    assert sum(run.preemptions.values()) > 0
    assert scheduler.pool.num_used == 0
    if tier is not None:
        tier.index.check()
        assert tier.num_loaded > 0
