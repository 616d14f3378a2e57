import pytest

from benchmarks.ideal import IdealCache, count_ideal_id_hits
from benchmarks.replay import StepCosts, count_nothing, make_scheduler, replay, replay_one_by_one
from cloister.bench.drive import Timed, make_requests
from cloister.bench.workloads import WorkItem, make_tokens
from cloister.scheduler import SchedulerConfig
from cloister.types.events import Stepped


def item(num_input, num_output, arrival_s=0.0, key=0):
    return WorkItem(arrival_s, make_tokens((key,), num_input, 2000), num_input, num_output)


def scheduler(policy="fcfs", prefix_cache=False, max_num_seqs=4, num_blocks=1000):
    config = SchedulerConfig(4096, max_num_seqs=max_num_seqs, policy=policy, prefix_cache=prefix_cache)
    return make_scheduler(config, num_blocks, 16)


def one_second(step):
    return 1.0


def test_every_request_ends_with_its_length():
    run = replay(scheduler(), make_requests([item(40, 5), item(3, 9)]), one_second)
    assert [r.num_output_tokens for r in run.recorder.records] == [5, 9]
    assert run.recorder.num_open == 0
    assert run.scheduler.pool.num_used == 0


def test_the_runner_counts_each_prompt_token_once_and_each_output_but_the_last():
    run = replay(scheduler(), make_requests([item(40, 5), item(3, 9)]), one_second)
    assert run.runner.num_tokens == 40 + 4 + 3 + 8


def test_static_batches_wait_for_the_longest_where_fcfs_lets_others_join():
    requests = make_requests([item(8, 20 if i == 0 else 2, key=i) for i in range(9)])
    last = {p: max(r.end_s for r in replay(scheduler(p), requests, one_second).recorder.records) for p in ("fcfs", "static")}
    assert last["fcfs"] == 20
    assert last["static"] == 20 + 2 + 2


def test_a_request_waits_for_its_arrival_on_the_virtual_clock():
    run = replay(scheduler(), make_requests([item(4, 1), item(4, 1, arrival_s=100.0)]), one_second)
    assert [r.end_s for r in run.recorder.records] == [1, 101]


def test_step_costs_are_found_again():
    truth = StepCosts(0.004, 1e-5, 2e-4, 3e-6)
    steps = [
        Stepped(0, 0, n, s, s, 0, 0, 0, 999, b)
        for n, s, b in [(1, 1, 3), (512, 1, 80), (16, 16, 200), (40, 8, 31), (9, 9, 400)]
    ]
    measured = [Stepped(*[truth(s) if f == "elapsed_s" else getattr(s, f) for f in s.__struct_fields__]) for s in steps] * 30
    found = StepCosts.fit(measured)
    assert [truth(s) for s in steps] == pytest.approx([found(s) for s in steps], rel=1e-3)


def test_the_cache_hits_what_the_ideal_cache_hits():
    base = make_tokens((9,), 100, 2000)
    prompts = [base, base[:60] + make_tokens((8,), 50, 2000), base, base[:96], make_tokens((7,), 30, 2000)]
    requests = [Timed(0.0, make_requests([WorkItem(0.0, p, len(p), 1)], f"r{i}")[0].request) for i, p in enumerate(prompts)]
    run = replay_one_by_one(scheduler(prefix_cache=True), requests)
    hits = [r.num_cached_tokens for r in run.recorder.records]
    ideal = IdealCache(16)
    assert hits == [ideal.take(prompt) for prompt in prompts] == [0, 48, 96, 80, 0]
    assert run.runner.num_tokens == sum(map(len, prompts)) - sum(hits)


def test_ids_seen_before_are_hits_of_the_trace():
    assert count_ideal_id_hits([(0, 1), (0, 2), (2, 3)]) == (2, 6)


def test_counting_takes_no_time():
    assert count_nothing(Stepped(0, 5, 1, 1, 1, 1, 1, 1, 1)) == 0
