"""The policy `prefill_only` on a virtual clock, beside `fcfs`: who goes first, what the cache keeps, how long anybody waits."""

import random
import statistics

import pytest

from benchmarks.replay import replay
from cloister.bench.drive import Timed
from cloister.kv import BlockPool, PrefixKeys
from cloister.scheduler import BudgetConfig, Scheduler, SchedulerConfig
from cloister.scheduler.policies import prefill_only
from cloister.scheduler.step_cost import StepSize
from cloister.types.events import Stepped
from cloister.types.layerwise import CellLayout
from cloister.types.request import Request, SamplingParams
from tests.checked_runner import CheckedRunner

TOKEN_S, KEY_S = 0.001, 1e-7


def _step_s(step):
    return 0.002 + TOKEN_S * step.num_tokens + KEY_S * step.num_attended


def _prefill_s(num_tokens):
    return 0.002 + TOKEN_S * num_tokens + KEY_S * num_tokens**2 / 2


def _request(name, tokens, output=1):
    sampling = SamplingParams(max_tokens=output, ignore_eos=True)
    return Request(request_id=name, token_ids=tokens, sampling=sampling, timeout_s=1e9)


def _prompt(draw, length):
    return [draw.randrange(1000) for _ in range(length)]


def _warm(draw):
    """Requests from which the scheduler learns what steps cost, before time 10."""
    lengths = (8, 64, 16, 128, 32, 200) * 3
    return [Timed(0.3 * i, _request(f"warm{i}", _prompt(draw, length))) for i, length in enumerate(lengths)]


def _make(policy, *, num_blocks=400, slots=8, max_tokens=256):
    config = SchedulerConfig(max_model_len=4096, max_num_seqs=slots, policy=policy, budget=BudgetConfig(max_tokens=max_tokens))
    return Scheduler(config, BlockPool(num_blocks, 16), PrefixKeys("model", 16))


def _run(policy, requests, **shape):
    """Returns the records of the run by request id, and the run."""
    scheduler = _make(policy, **shape)
    warm = _warm(random.Random(0))
    run = replay(scheduler, [*warm, *requests], _step_s)
    names = [timed.request.request_id for timed in [*warm, *sorted(requests, key=lambda timed: timed.due_s)]]
    return dict(zip(names, run.recorder.records, strict=True)), run


def test_a_short_prompt_goes_before_a_long_one_that_came_earlier():
    draw = random.Random(1)
    requests = [Timed(10.0, _request(name, _prompt(draw, n))) for name, n in (("long", 2000), ("longer", 3000), ("short", 40))]
    records, run = _run("prefill_only", requests)
    assert records["short"].end_s < records["long"].end_s < records["longer"].end_s
    assert records["short"].e2e_s < 1.1 * _prefill_s(256), "it is in the first step"
    assert not sum(run.preemptions.values())
    by_arrival, _ = _run("fcfs", requests)
    assert by_arrival["short"].e2e_s > 10 * records["short"].e2e_s


def test_a_prefill_that_runs_makes_way_for_a_shorter_one_and_goes_on_then():
    draw = random.Random(1)
    requests = [Timed(10.0, _request("long", _prompt(draw, 3000))), Timed(10.3, _request("short", _prompt(draw, 100)))]
    records, run = _run("prefill_only", requests)
    assert records["short"].e2e_s < 2 * _prefill_s(256) + _prefill_s(100), "it waited for more than the step that ran"
    assert records["long"].e2e_s < 1.2 * _prefill_s(3000) + _prefill_s(100)
    assert not sum(run.preemptions.values())


def test_what_is_left_of_a_prefill_counts_and_not_its_length():
    draw = random.Random(1)
    requests = [Timed(10.0, _request("nearly done", _prompt(draw, 2000))), Timed(11.9, _request("new", _prompt(draw, 1000)))]
    records, _ = _run("prefill_only", requests)
    assert records["nearly done"].end_s < records["new"].end_s


def _flooded(seconds):
    """A long prompt at time 10, and from then on short ones that take 90% of the engine."""
    draw, period_s = random.Random(2), _prefill_s(60) / 0.9
    flood = [Timed(10.0 + period_s * i, _request(f"s{i}", _prompt(draw, 60))) for i in range(int(seconds / period_s))]
    return [Timed(10.0, _request("long", _prompt(draw, 1000))), *flood]


def test_a_flood_of_short_requests_starves_nobody_since_waiting_outweighs_length(monkeypatch):
    monkeypatch.setattr(prefill_only, "FAIRNESS", 0.05)
    records, run = _run("prefill_only", _flooded(80.0), slots=1)
    longest_s = _prefill_s(1000) / prefill_only.FAIRNESS
    work_s = longest_s * 0.9 + 2 * _prefill_s(1000)
    assert records["long"].e2e_s < longest_s + work_s, "what came later than that passed it"
    assert records["long"].e2e_s < run.clock.now() - 10.0 - 20.0, "the flood must outlast it, else this shows nothing"


def test_without_the_weight_of_waiting_it_ends_with_the_flood(monkeypatch):
    monkeypatch.setattr(prefill_only, "FAIRNESS", 0.0)
    draw, period_s = random.Random(2), _prefill_s(60) / 1.05  # a little more than the engine computes
    flood = [Timed(10.0 + period_s * i, _request(f"s{i}", _prompt(draw, 60))) for i in range(600)]
    records, run = _run("prefill_only", [Timed(10.001, _request("long", _prompt(draw, 1000))), *flood], slots=1)
    assert records["long"].end_s == pytest.approx(run.clock.now(), abs=0.1)


def test_those_who_wait_longest_go_first_if_all_are_equally_long():
    draw = random.Random(4)
    requests = [Timed(10.0 + 0.01 * i, _request(f"r{i}", _prompt(draw, 100))) for i in range(40)]
    records, _ = _run("prefill_only", requests, slots=1)
    ends = [records[f"r{i}"].end_s for i in range(40)]
    assert ends == sorted(ends)


def _recommendations(num_users, num_items, draw):
    """Each user's profile with each item behind it; items of all users in turn."""
    profiles = [_prompt(draw, 640) for _ in range(num_users)]
    pairs = [(user, item) for item in range(num_items) for user in range(num_users)]
    return [
        Timed(10.0 + 0.001 * i, _request(f"u{user}i{item}", profiles[user] + _prompt(draw, 32)))
        for i, (user, item) in enumerate(pairs)
    ]


def test_requests_with_one_prefix_run_together_before_it_is_evicted():
    requests = _recommendations(6, 10, random.Random(5))
    runs = {name: _run(name, requests, num_blocks=100, slots=1) for name in ("fcfs", "prefill_only")}  # two profiles fit
    hits = {name: sum(r.num_cached_tokens for r in records.values()) for name, (records, _) in runs.items()}
    assert hits["prefill_only"] == 6 * 9 * 640, "each profile is computed once"
    assert hits["fcfs"] < 0.2 * hits["prefill_only"]
    means = {name: statistics.fmean(r.e2e_s for r in records.values()) for name, (records, _) in runs.items()}
    assert means["prefill_only"] < 0.3 * means["fcfs"]


def test_the_estimate_is_taken_anew_before_every_choice():
    draw = random.Random(6)
    profile, other = _prompt(draw, 640), _prompt(draw, 400)
    requests = [
        Timed(10.0, _request("first", profile + _prompt(draw, 16))),
        Timed(10.05, _request("other", other)),  # shorter than those below as long as nothing is cached
        Timed(10.05, _request("same profile", profile + _prompt(draw, 32))),
    ]
    records, _ = _run("prefill_only", requests, slots=1)
    assert records["first"].end_s < records["same profile"].end_s < records["other"].end_s
    assert records["same profile"].num_cached_tokens == 640
    records, _ = _run("prefill_only", requests[1:], slots=1)
    assert records["other"].end_s < records["same profile"].end_s


def test_streams_that_decode_are_not_delayed_more_than_under_arrival():
    draw = random.Random(7)
    prompts = [Timed(10.5 + 0.05 * i, _request(f"p{i}", _prompt(draw, 300 if i % 2 else 40))) for i in range(40)]
    gaps = {}
    for policy in ("fcfs", "prefill_only"):
        records, _ = _run(policy, [Timed(10.0, _request("stream", _prompt(draw, 16), 300)), *prompts])
        gaps[policy] = sorted(records["stream"].gaps_s)
    assert gaps["prefill_only"][-3] <= 1.7 * gaps["fcfs"][-3]


def test_every_request_ends_and_blocks_return_when_memory_is_short():
    draw = random.Random(8)
    scheduler, runner = _make("prefill_only", num_blocks=40, slots=16), CheckedRunner(40, 16)
    lengths = [(draw.randrange(4, 400), draw.randrange(1, 40)) for _ in range(60)]
    requests = [Timed(0.02 * i, _request(f"r{i}", _prompt(draw, n), output)) for i, (n, output) in enumerate(lengths)]
    run = replay(scheduler, requests, _step_s, runner=runner)
    assert [r.num_output_tokens for r in run.recorder.records] == [t.request.sampling.max_tokens for t in requests]
    assert scheduler.pool.num_used == 0
    scheduler.pool.check()


def test_a_queue_longer_than_the_window_is_served_to_its_end_shortest_first():
    draw = random.Random(9)
    lengths = [draw.randrange(200, 900) for _ in range(150)]
    requests = [Timed(10.0 + 1e-6 * i, _request(f"r{i}", _prompt(draw, n))) for i, n in enumerate([*lengths, 8])]
    records, _ = _run("prefill_only", requests, slots=1, num_blocks=80)
    ends = sorted(record.end_s for name, record in records.items() if name.startswith("r"))
    assert records["r150"].end_s == ends[1], "it was the last to come, while the first one ran"


def test_scores_follow_the_measured_cost():
    scheduler = _make("prefill_only")
    replay(scheduler, _warm(random.Random(0)), _step_s)
    assert scheduler.cost.predict(StepSize().plus(0, 200)) == pytest.approx(_prefill_s(200), rel=0.1)


# Layer by layer (bits: tests/executor/test_layerwise.py)


@pytest.mark.parametrize("policy", ["fcfs", "prefill_only", "fair", "mlfq"])
def test_prompts_longer_than_memory_end_among_others_in_memory_of_their_own(policy):
    draw = random.Random(8)
    config = SchedulerConfig(
        max_model_len=300, max_num_seqs=4, policy=policy, budget=BudgetConfig(max_tokens=64), max_prefill_only_len=1600
    )
    cells = CellLayout(num_layers=12, num_blocks=30, num_residual=1, hidden_size=8)
    scheduler, runner = Scheduler(config, BlockPool(30, 16), PrefixKeys("model", 16), cells=cells), CheckedRunner(30, 16)
    shared = _prompt(draw, 100)
    lengths = [(1500, 1) if i % 9 == 4 else (draw.randrange(8, 150), draw.randrange(1, 100)) for i in range(40)]
    requests = [
        Timed(0.05 * i, _request(f"r{i}", (shared + _prompt(draw, n))[:n], output)) for i, (n, output) in enumerate(lengths)
    ]
    run = replay(scheduler, requests, _step_s, runner=runner)
    assert [r.num_output_tokens for r in run.recorder.records] == [output for _, output in lengths]
    assert runner.num_layerwise > 3000
    long_hits = [r.num_cached_tokens for r in run.recorder.records if r.num_input_tokens == 1500]
    assert max(long_hits) >= 96, "none of them found the prefix that all share"
    assert scheduler.pool.num_used == 0
    scheduler.pool.check()


def test_a_prompt_of_many_times_the_memory_needs_a_bounded_time_beside_decodes():
    draw = random.Random(9)
    config = SchedulerConfig(max_model_len=300, max_num_seqs=4, budget=BudgetConfig(256), max_prefill_only_len=1600)
    cells = CellLayout(num_layers=12, num_blocks=60, num_residual=1, hidden_size=8)
    scheduler = Scheduler(config, BlockPool(60, 16), PrefixKeys("model", 16), cells=cells)
    stream = Timed(10.0, _request("stream", _prompt(draw, 16), 280))
    records = replay(
        scheduler, [*_warm(draw), stream, Timed(10.6, _request("long", _prompt(draw, 1500)))], _step_s
    ).recorder.records
    decode_s = _step_s(Stepped(0.0, 0.0, 1, 1, 1, 0, 0, 0, 0, num_attended=100.0))
    assert max(records[-2].gaps_s) < 3 * decode_s + _prefill_s(8), "its chunks stretched a step by more than any prefill may"
    assert records[-1].num_output_tokens == 1
