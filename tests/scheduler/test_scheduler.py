import gc

import pytest

from cloister.kv import BlockPool, PrefixKeys
from cloister.scheduler import BudgetConfig, Scheduler, SchedulerConfig
from cloister.scheduler.sequence import SequenceRecord, Status
from cloister.types.events import Ended, Preempted, Progressed, Scheduled
from cloister.types.request import FinishReason, Request, SamplingParams
from cloister.types.scope import LOCAL_SCOPE, Scope, ScopeKind
from cloister.types.step import Sample, StepResult, Stop
from tests.checked_runner import CheckedRunner
from tests.thinning import cover


class Bench:
    """A scheduler and a checked runner, stepped together under a clock that the test moves."""

    def __init__(self, *, num_blocks=64, block_size=4, max_tokens=64, keys=True, public=(), **config):
        self.pool = BlockPool(num_blocks, block_size)
        config.setdefault("max_model_len", 256)
        target_s = config.pop("target_s", None)
        self.scheduler = Scheduler(
            SchedulerConfig(budget=BudgetConfig(max_tokens=max_tokens, target_s=target_s), **config),
            self.pool,
            PrefixKeys("model", block_size, public) if keys else None,
        )
        self.runner = CheckedRunner(num_blocks, block_size)
        self.now = 0.0
        self.events = []
        self.plans = []
        self.wiped, self.touched = [], []

    def add(self, name, prompt, max_tokens=4, **fields):
        sampling = SamplingParams(max_tokens=max_tokens, n=fields.pop("n", 1))
        prompt = list(range(prompt)) if isinstance(prompt, int) else prompt
        self.scheduler.add(Request(request_id=name, token_ids=prompt, sampling=sampling, **fields), self.now)

    def step(self, stops=None):
        self.now += 0.01
        plan = self.scheduler.plan(self.now)
        if plan is None:
            self.events += self.scheduler.take_events()
            return False
        self.plans.append(plan)
        self.wiped += plan.wipes
        self.touched += [block for part in plan.sequences for block in part.new_block_ids]
        self.events += self.scheduler.commit(self.runner.run(plan), stops or {}, self.now)
        self.pool.check()
        return True

    def run(self, limit=2000):
        for _ in range(limit):
            if not self.step():
                assert not self.scheduler.requests, "requests are left and nothing is planned"
                return self
        raise AssertionError("it does not end")

    def cached(self, name):
        return next(e.num_cached_tokens for e in self.events if isinstance(e, Scheduled) and e.request_id == name)

    def ended(self, name=None):
        return [e for e in self.events if isinstance(e, Ended) and name in (None, e.request_id)]

    def of(self, kind):
        return [e for e in self.events if isinstance(e, kind)]


def test_a_request_runs_to_its_length_and_gives_everything_back():
    bench = Bench()
    bench.add("a", 10, max_tokens=5)
    bench.run()
    (end,) = bench.ended()
    assert (end.reason, end.num_output_tokens, end.last) == (FinishReason.LENGTH, 5, True)
    assert bench.pool.num_used == 0


def test_work_counted_in_tokens_is_the_sum_of_the_prompts():
    bench = Bench(max_tokens=1000, keys=False)
    lengths = (3, 17, 40, 1)
    for i, length in enumerate(lengths):
        bench.add(str(i), [i] * length, max_tokens=1)
    bench.step()
    assert bench.plans[0].num_tokens == sum(lengths) == bench.runner.num_computed


def test_a_long_prompt_is_cut_to_the_budget_and_decodes_go_first():
    bench = Bench(max_tokens=16)
    bench.add("short", 4, max_tokens=20)
    bench.step()
    bench.add("long", [9] * 60, max_tokens=1)
    bench.step()
    counts = {part.seq_id: part.num_tokens for part in bench.plans[-1].sequences}
    assert counts == {0: 1, 1: 15}


def test_a_request_that_comes_later_joins_at_the_next_step():
    bench = Bench()
    bench.add("a", 4, max_tokens=50)
    for _ in range(5):
        bench.step()
    bench.add("b", 4, max_tokens=2)
    bench.run()
    assert [e.request_id for e in bench.ended()] == ["b", "a"]


def hold(bench, name, **fields):
    request = Request(request_id=name, token_ids=[7] * 4, sampling=SamplingParams(max_tokens=2), **fields)
    bench.scheduler.add(request, bench.now, grammar_deadline_s=bench.now + 1.0)
    return bench.scheduler.waiting_for_grammar[name]


def test_a_request_that_is_held_back_runs_once_it_is_released_with_its_rank_of_arrival():
    bench = Bench(max_num_seqs=1)
    held = hold(bench, "held")
    assert not bench.step()
    for name in "abc":
        bench.add(name, 4, max_tokens=2)
    bench.step()
    bench.scheduler.release(held)
    bench.run()
    assert not bench.scheduler.waiting_for_grammar
    assert [e.request_id for e in bench.ended()] == ["a", "held", "b", "c"]


def test_a_request_that_is_held_back_ends_by_abort_by_deadline_and_by_refusal():
    bench = Bench()
    hold(bench, "aborted")
    hold(bench, "late", timeout_s=0.5)
    bench.scheduler.abort("aborted", 0.1)
    bench.now = 0.6
    bench.step()
    sampling = SamplingParams(max_tokens=2, n=1000)
    bench.scheduler.add(Request(request_id="refused", token_ids=[1], sampling=sampling), bench.now, grammar_deadline_s=9.0)
    bench.run()
    assert not bench.scheduler.waiting_for_grammar
    reasons = {e.request_id: e.reason for e in bench.ended()}
    assert reasons == {"aborted": FinishReason.ABORT, "late": FinishReason.TIMEOUT, "refused": FinishReason.REJECTED}


def test_static_batching_lets_nobody_join():
    bench = Bench(policy="static")
    bench.add("a", 4, max_tokens=20)
    bench.step()
    bench.add("b", 4, max_tokens=2)
    bench.run()
    assert [e.request_id for e in bench.ended()] == ["a", "b"]


def test_a_static_batch_fills_up_over_several_steps():
    bench = Bench(policy="static", max_tokens=16, max_num_seqs=3)
    for name in "abcd":
        bench.add(name, [ord(name)] * 14, max_tokens=10)
    for _ in range(8):
        bench.step()
    assert bench.scheduler.num_running == 3


def test_a_stop_ends_the_sequence_and_says_why():
    bench = Bench()
    bench.add("a", 4, max_tokens=50)
    bench.step({0: Stop(1, reason="END")})
    (end,) = bench.ended()
    assert (end.reason, end.stop_reason, end.num_output_tokens) == (FinishReason.STOP, "END", 1)


def test_sequences_of_one_request_share_the_prompt():
    bench = Bench(keys=False)
    bench.add("a", 10, n=4, max_tokens=1)
    bench.step()
    assert bench.runner.num_computed == 10
    assert len(bench.ended("a")) == 4
    assert sum(e.last for e in bench.ended()) == 1


def test_forked_sequences_copy_the_last_block_when_they_write():
    bench = Bench(keys=False)
    bench.add("a", 10, n=3, max_tokens=3)
    bench.step()
    assert bench.pool.num_used == 3
    bench.step()
    assert {target for _, target in bench.plans[-1].copies} == {part.new_block_ids[0] for part in bench.plans[-1].sequences}
    assert bench.pool.num_used == 2 + 3, "full blocks stay shared, and the copied original is free again"
    bench.run()
    assert bench.pool.num_free == bench.pool.num_total


def test_same_scope_hits():
    bench = Bench()
    bench.add("a", 17)
    bench.run()
    bench.add("b", 17)
    bench.run()
    assert [e.num_cached_tokens for e in bench.of(Scheduled)] == [0, 16]
    assert [e.num_queried_tokens for e in bench.of(Scheduled)] == [17, 17]


def test_another_scope_misses():
    bench = Bench()
    bench.add("a", 17)
    bench.run()
    bench.add("b", 17, scope=Scope(ScopeKind.TENANT, b"b"))
    bench.run()
    assert [e.num_cached_tokens for e in bench.of(Scheduled)] == [0, 0]


def test_nothing_of_a_request_scope_stays_when_its_request_ends():
    bench = Bench()
    bench.add("a", 33, max_tokens=9, n=2, scope=Scope(ScopeKind.REQUEST, b"once"))
    bench.run()
    assert bench.pool.num_free == bench.pool.num_total
    assert len(bench.scheduler.prefix_cache) == 0
    assert sorted(set(bench.wiped)) == sorted(set(bench.touched)), "every block that held KV was wiped"


def test_a_whole_prompt_in_the_cache_still_computes_its_last_token():
    bench = Bench()
    bench.add("a", 16)
    bench.run()
    bench.add("b", 16, max_tokens=1)
    bench.run()
    assert bench.of(Scheduled)[-1].num_cached_tokens == 12
    assert bench.ended("b")[0].num_output_tokens == 1


def test_a_request_for_prompt_logprobs_reads_no_hits():
    bench = Bench()
    bench.add("a", 17)
    bench.run()
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    bench.scheduler.add(Request(request_id="b", token_ids=list(range(17)), sampling=sampling), bench.now)
    bench.run()
    assert bench.of(Scheduled)[-1].num_cached_tokens == 0
    assert bench.of(Scheduled)[-1].num_queried_tokens == 0, "a request that never looks must not spoil the rate of hits"


@pytest.mark.parametrize("scores", [None, 0])
def test_answers_that_are_queued_score_no_prompt_again(scores):
    bench = Bench(num_blocks=1024, max_num_seqs=4, max_model_len=1000, max_tokens=1000)
    for number in range(3):
        bench.add(f"busy{number}", [9, number], max_tokens=40)
    bench.step()
    sampling = SamplingParams(n=4, max_tokens=4, logprobs=0, prompt_logprobs=scores)
    bench.scheduler.add(Request(request_id="a", token_ids=[1] * 600, sampling=sampling), bench.now)
    bench.run()
    assert len(bench.ended("a")) == 4
    assert [new.index for plan in bench.plans for new in plan.arrivals if new.sampling.prompt_logprobs is not None] == (
        [] if scores is None else [0]
    )
    computed = sum(part.num_tokens for plan in bench.plans for part in plan.sequences if part.num_tokens > 1)
    assert computed < 600 + 3 * 8


def test_the_time_of_a_step_that_left_rows_out_teaches_nothing():
    bench = Bench()
    bench.add("a", 8, max_tokens=9)
    bench.step()
    scheduler, (seq_id,) = bench.scheduler, bench.scheduler._requests.running
    plans = [scheduler.plan(0.02), scheduler.plan(0.02)]
    assert [[part.start for part in plan.sequences] for plan in plans] == [[8], [9]]
    learned, left_out = [], set()
    for plan in [*plans, None]:
        plan = plan or scheduler.plan(0.03)
        assert plan.sequences[0].seq_id == seq_id
        result = StepResult(plan_id=plan.plan_id, deferred={seq_id}, left_out=left_out, elapsed_s=0.01)
        scheduler.commit(result, {}, 0.03)
        learned.append(scheduler.cost.num_learned)
        left_out = {seq_id} - left_out
    assert learned == [2, 2, 3]  # the second one was made before it was known that the first one's token is late


def test_positions_that_a_step_left_out_are_charged_to_nobody(monkeypatch):
    bench = Bench()
    charged = []
    monkeypatch.setattr(bench.scheduler._policy, "charge", lambda sequence, *counts: charged.append(counts))
    bench.add("a", 8, max_tokens=9)
    scheduler = bench.scheduler
    for left_out in (True, True, False):  # the last position of its prompt, then all that there is of it
        plan = scheduler.plan(bench.now)
        (part,) = plan.sequences
        if left_out:
            result = StepResult(plan_id=plan.plan_id, deferred={part.seq_id}, left_out={part.seq_id})
        else:
            result = StepResult(plan_id=plan.plan_id, samples=[Sample(part.seq_id, [5])])
        scheduler.commit(result, {}, bench.now)
    assert charged == [(7, 0), (0, 1)]


def test_nothing_is_looked_up_where_there_is_no_prefix_cache():
    bench = Bench(keys=False)
    bench.add("a", 17)
    bench.run()
    assert bench.of(Scheduled)[-1].num_queried_tokens == 0


def test_a_prompt_that_is_scored_comes_in_small_chunks():
    bench = Bench(num_blocks=300, max_model_len=1000, max_tokens=1000)
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    bench.scheduler.add(Request(request_id="a", token_ids=[1] * 600, sampling=sampling), 0.0)
    bench.run()
    assert max(plan.num_tokens for plan in bench.plans) == 256


def test_answers_are_cached_for_the_next_turn():
    bench = Bench()
    bench.add("a", 8, max_tokens=9)
    bench.run()
    tokens = [*range(8)]
    for _ in range(9):
        tokens.append(hash((tuple(tokens), 0)) % 50)
    bench.add("b", [*tokens, 1, 2], max_tokens=1)
    bench.run()
    assert bench.of(Scheduled)[-1].num_cached_tokens == 16


def test_without_room_the_latest_is_preempted_and_finishes_later_with_the_same_tokens():
    roomy, tight = Bench(num_blocks=64), Bench(num_blocks=12)
    for bench in (roomy, tight):
        for name in "abc":
            bench.add(name, [ord(name)] * 8, max_tokens=20, scope=LOCAL_SCOPE)
        bench.run()
    assert tight.of(Preempted)
    assert not roomy.of(Preempted)
    assert {e.request_id: e.num_output_tokens for e in tight.ended()} == dict.fromkeys("abc", 20)
    assert tight.ended()[0].request_id == "a"


def test_one_that_can_never_fit_is_refused_with_the_figure_that_would():
    bench = Bench(num_blocks=4, block_size=4)
    bench.add("a", 10, max_tokens=10)
    bench.run()
    (end,) = bench.ended()
    assert end.reason is FinishReason.REJECTED
    assert "max_tokens to 7 or less" in end.error


@pytest.mark.parametrize(("prompt", "max_tokens"), [(16, 0), (16, 1), (10, 7), (1, 16)])
def test_one_that_just_fits_runs(prompt, max_tokens):
    bench = Bench(num_blocks=4, block_size=4)
    bench.add("a", prompt, max_tokens=max_tokens)
    bench.run()
    assert bench.ended()[0].reason is FinishReason.LENGTH


@pytest.mark.parametrize(("prompt", "words"), [(0, "empty"), (256, "256 tokens")])
def test_prompts_that_do_not_fit_the_window_are_refused(prompt, words):
    bench = Bench(num_blocks=256)
    bench.add("a", prompt)
    bench.run()
    assert words in bench.ended()[0].error


def test_more_sequences_than_may_run_are_refused():
    bench = Bench(max_num_seqs=2)
    bench.add("a", 4, n=3)
    bench.run()
    assert [e.reason for e in bench.ended()] == [FinishReason.REJECTED] * 3


def test_an_aborted_request_gives_its_blocks_back_at_once():
    bench = Bench()
    bench.add("a", 40, max_tokens=50)
    bench.step()
    bench.scheduler.abort("a", bench.now)
    assert bench.pool.num_used == 0
    bench.run()
    assert bench.ended()[0].reason is FinishReason.ABORT


def test_aborting_twice_ends_once():
    bench = Bench()
    bench.add("a", 4)
    bench.scheduler.abort("a", bench.now)
    bench.scheduler.abort("a", bench.now)
    bench.run()
    assert len(bench.ended()) == 1


@pytest.mark.parametrize("running", [True, False])
def test_a_deadline_ends_a_request_wherever_it_waits(running):
    bench = Bench(max_num_seqs=1)
    if not running:
        bench.add("first", 4, max_tokens=100)
    bench.add("a", 4, max_tokens=100, timeout_s=0.05)
    for _ in range(10):
        bench.step()
    (end,) = bench.ended("a")
    assert end.reason is FinishReason.TIMEOUT
    assert "deadline" in end.error


def test_blocks_of_a_cancelled_request_are_free_only_when_the_last_plan_that_names_it_is_committed():
    bench = Bench()
    bench.add("a", 8, max_tokens=50)
    first = bench.scheduler.plan(0.0)
    second = bench.scheduler.plan(0.0)
    bench.scheduler.abort("a", 0.0)
    assert bench.pool.num_used > 0
    bench.scheduler.commit(bench.runner.run(first), {}, 0.0)
    assert bench.pool.num_used > 0
    bench.scheduler.commit(bench.runner.run(second), {}, 0.0)
    assert bench.pool.num_used == 0


def test_two_plans_in_flight_give_the_same_tokens_as_one():
    def run(depth):
        bench = Bench()
        for name in "ab":
            bench.add(name, [ord(name)] * 9, max_tokens=12)
        flights = []
        for _ in range(40):
            if len(flights) < depth and (plan := bench.scheduler.plan(0.0)) is not None:
                flights.append(plan)
                continue
            if not flights:
                break
            bench.events += bench.scheduler.commit(bench.runner.run(flights.pop(0)), {}, 0.0)
        return [(e.request_id, e.num_output_tokens) for e in bench.ended()], bench.runner.num_computed

    assert run(1) == run(2)


def test_a_failed_step_ends_its_requests_and_loses_no_block():
    bench = Bench()
    bench.add("a", 8, max_tokens=50, n=2)
    bench.add("b", 8, max_tokens=50)
    bench.step()
    bench.scheduler.plan(bench.now)
    bench.scheduler.fail("the step failed", bench.now)
    bench.runner.tokens.clear()
    bench.add("c", 8, max_tokens=2)
    bench.run()
    assert {e.request_id: e.reason for e in bench.ended()} == {
        "a": FinishReason.ERROR,
        "b": FinishReason.ERROR,
        "c": FinishReason.LENGTH,
    }
    assert bench.pool.num_used == 0


@pytest.mark.parametrize("is_unsupported", [False, True])
def test_a_sequence_whose_logits_failed_ends_alone(is_unsupported):
    bench = Bench()
    bench.add("a", 8)
    bench.add("b", [1, 2, 3])
    plan = bench.scheduler.plan(0.0)
    result = bench.runner.run(plan)
    result.samples = [s for s in result.samples if s.seq_id != 0]
    result.failures = {0: "the model gave no number"}
    if is_unsupported:
        result.unsupported = {0}
    bench.events += bench.scheduler.commit(result, {}, 0.0)
    bench.run()
    assert {e.request_id: e.reason for e in bench.ended()} == {
        "a": FinishReason.UNSUPPORTED if is_unsupported else FinishReason.ERROR,
        "b": FinishReason.LENGTH,
    }


def test_scoring_without_output_ends_after_the_prompt():
    bench = Bench()
    bench.add("a", 10, max_tokens=0)
    bench.run()
    (end,) = bench.ended()
    assert (end.reason, end.num_output_tokens) == (FinishReason.LENGTH, 0)
    assert not bench.of(Progressed)


def test_a_more_urgent_class_takes_the_place_of_a_less_urgent_one():
    bench = Bench(policy="priority", max_num_seqs=1)
    bench.add("slow", 4, max_tokens=30, priority=5)
    bench.step()
    bench.add("urgent", 4, max_tokens=2, priority=0)
    bench.run()
    assert [e.request_id for e in bench.ended()] == ["urgent", "slow"]
    assert bench.of(Preempted)


def test_inside_a_class_the_earlier_deadline_goes_first():
    bench = Bench(policy="priority", max_num_seqs=1)
    bench.add("patient", 4, timeout_s=500)
    bench.add("hurried", 4, timeout_s=50)
    bench.run()
    assert [e.request_id for e in bench.ended()] == ["hurried", "patient"]


def test_a_flood_leaves_others_alone():
    bench = Bench(policy="fair", max_num_seqs=4, num_blocks=512, max_tokens=64)
    for i in range(200):
        bench.add(f"flood{i}", [i] * 100, max_tokens=20, tenant="flood")
    for _ in range(400):
        bench.step()
    before = len(bench.plans)
    bench.add("victim", 60, max_tokens=1, tenant="victim")
    while not bench.ended("victim"):
        bench.step()
    assert len(bench.plans) - before <= 2


def plans_until_first_token(bench, name):
    before = len(bench.plans)
    while not any(e.request_id == name for e in bench.of(Progressed)):
        bench.step()
    return len(bench.plans) - before


FLOODED = {"max_num_seqs": 8, "num_blocks": 1024, "block_size": 16, "max_tokens": 256, "max_model_len": 1024}


@pytest.mark.parametrize(("num_earlier", "num_steps"), cover([0, 1, 40], [1, 2, 3, 8, 40, 200]))
def test_what_a_tenant_asked_of_an_idle_engine_does_not_count_when_a_newcomer_floods_it(num_earlier, num_steps):
    bench = Bench(policy="fair", keys=False, **FLOODED)
    for i in range(num_earlier):
        bench.add(f"earlier{i}", [1] * 512, max_tokens=16, tenant="victim")
        bench.run()
    for i in range(200):
        bench.add(f"flood{i}", [2] * 512, max_tokens=64, tenant="flood")
    for _ in range(num_steps):
        bench.step()
    bench.add("victim", [1] * 512, max_tokens=4, tenant="victim")
    assert plans_until_first_token(bench, "victim") <= 2 + 3  # its own chunks, and what one prompt of the flood has begun


def test_a_tenant_that_floods_after_a_rest_goes_before_nobody_who_worked_meanwhile():
    bench = Bench(policy="fair", keys=False, **FLOODED)
    bench.add("long ago", 10, max_tokens=1, tenant="rested")
    bench.run()
    for i in range(40):
        bench.add(f"busy{i}", [1] * 512, max_tokens=16, tenant="busy")
        bench.run()
    bench.add("stream", 10, max_tokens=400, tenant="busy")  # one answer on an engine with room is no flood either
    for _ in range(200):
        bench.step()
    for i in range(100):
        bench.add(f"flood{i}", [2] * 512, max_tokens=64, tenant="rested")
    bench.step()
    bench.add("next", [1] * 512, max_tokens=4, tenant="busy")
    assert plans_until_first_token(bench, "next") <= 2 + 3


def test_fair_tenants_get_equal_work():
    bench = Bench(policy="fair", max_num_seqs=4, num_blocks=512, max_tokens=64, keys=False)
    for i in range(60):
        bench.add(f"long{i}", [i] * 100, max_tokens=20, tenant="long")
        bench.add(f"short{i}", [i] * 10, max_tokens=2, tenant="short")
        bench.add(f"short{i}b", [i] * 10, max_tokens=2, tenant="short")
    for _ in range(120):
        bench.step()
    ends = bench.ended()
    assert sum(e.request_id.startswith("short") for e in ends) > 2 * sum(e.request_id.startswith("long") for e in ends)


def test_what_is_in_the_cache_goes_first_and_of_equals_the_oldest():
    bench = Bench(policy="lpm", max_num_seqs=1)
    bench.add("first", [1] * 40, max_tokens=2)
    bench.run()
    bench.add("running", [9] * 8, max_tokens=4)
    bench.step()
    for name, prompt in (("other", [2] * 40), ("short", [1] * 12 + [3] * 20), ("long", [1] * 40), ("late", [5] * 40)):
        bench.add(name, prompt, max_tokens=1)
    bench.run()
    assert [e.request_id for e in bench.ended()] == ["first", "running", "long", "short", "other", "late"]


def test_a_request_without_hits_is_passed_a_bounded_number_of_times():
    bench = Bench(policy="lpm", max_num_seqs=1, num_blocks=256)
    bench.add("warm", [1] * 40, max_tokens=1)
    bench.run()
    bench.add("running", [9] * 8, max_tokens=4)
    bench.step()
    for i in range(3):
        bench.add(f"cold{i}", [2 + i] * 40, max_tokens=1)
    for i in range(200):
        bench.add(f"hit{i}", [1] * 40, max_tokens=1)
    bench.run()
    order = [e.request_id for e in bench.ended()]
    assert [order.index(f"cold{i}") for i in range(3)] == [2 + 64 + i for i in range(3)]


def test_an_idle_scheduler_plans_nothing_and_names_no_deadline():
    bench = Bench()
    assert bench.scheduler.plan(0.0) is None
    assert bench.scheduler.next_deadline_s is None


def test_the_next_deadline_is_the_earliest_one():
    bench = Bench()
    bench.add("a", 4, timeout_s=9)
    bench.add("b", 4, timeout_s=3)
    assert bench.scheduler.next_deadline_s == 3


def test_two_tenants_with_long_prompts_do_not_displace_each_other_for_ever():
    bench = Bench(policy="fair", max_num_seqs=1, num_blocks=512, block_size=16, max_tokens=1024, max_model_len=8192, keys=False)
    for tenant in ("a", "b"):
        bench.add(tenant, [1] * 6000, max_tokens=100, tenant=tenant)
    bench.run(limit=400)
    assert bench.runner.num_computed < 1.1 * 2 * 6100


def test_who_comes_while_all_rest_gains_nothing_from_what_others_did_before():
    bench = Bench(policy="fair", max_num_seqs=1, num_blocks=64, block_size=16, max_tokens=1024, max_model_len=1024, keys=False)
    for i in range(60):
        bench.add(f"old{i}", [1] * 1000, max_tokens=1, tenant="old")
    bench.run()
    for i in range(60):
        bench.add(f"new{i}", [1] * 1000, max_tokens=1, tenant="new")
    bench.add("back", [1] * 1000, max_tokens=1, tenant="old")
    bench.run()
    order = [e.request_id for e in bench.ended()]
    assert order.index("back") < order.index("new20")  # its burst, not all of the old work


def test_one_who_is_displaced_waits_and_ends_though_others_worked_more_before():
    fields = {"max_num_seqs": 2, "num_blocks": 1024, "block_size": 16, "max_tokens": 1024, "max_model_len": 8192}
    bench = Bench(policy="fair", keys=False, **fields)
    bench.add("stream", 10, max_tokens=1200, tenant="slow")
    for i in range(40):
        bench.add(f"flood{i}", [1] * 1000, max_tokens=1, tenant="flood")
    while not bench.ended("flood39"):
        bench.step()
    bench.add("flood", 10, max_tokens=1, tenant="flood")  # back from a rest, far ahead of all
    while not bench.ended("flood"):
        bench.step()
    bench.add("first", [1] * 7000, max_tokens=1, tenant="busy")
    bench.add("second", [1] * 1000, max_tokens=500, tenant="busy")
    while not bench.ended("first"):
        bench.step()
    for _ in range(5):
        bench.step()
    bench.add("urgent", 10, max_tokens=5, tenant="slow")
    bench.run(limit=5000)
    assert bench.of(Preempted)
    assert bench.ended("second")


def test_equal_prompts_side_by_side_leave_no_block_that_admission_counts_and_nobody_can_have():
    bench = Bench(num_blocks=26, max_tokens=256)
    bench.add("first", [7] * 40, max_tokens=1)
    bench.add("twin", [7] * 40, max_tokens=40)
    for _ in range(7):
        bench.step()
    bench.add("other", [9] * 36, max_tokens=2)
    bench.run()
    assert [e.request_id for e in bench.ended()] == ["first", "other", "twin"]
    assert not bench.of(Preempted)


@pytest.mark.parametrize("ending", ["the first answer ends first", "abort"])
def test_nothing_of_a_request_scope_stays_when_its_forks_end_one_by_one(ending):
    bench = Bench(num_blocks=32)
    bench.add("a", 8, max_tokens=3, n=2, scope=Scope(ScopeKind.REQUEST, b"once"))
    bench.step()
    if ending == "abort":
        bench.scheduler.abort("a", bench.now)
    else:
        bench.step({0: Stop(1)})
    bench.run()
    assert bench.pool.num_free == bench.pool.num_total


def test_a_negative_length_is_refused():
    bench = Bench()
    bench.add("a", 8, max_tokens=-1)
    (end,) = bench.scheduler.take_events()[1:]
    assert end.reason is FinishReason.REJECTED
    assert "max_tokens" in end.error


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"min_p": 2.0},
        {"top_k": -1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 5e-324},
        {"presence_penalty": float("inf")},
        {"logprobs": -1},
    ],
    ids=str,
)
def test_sampling_without_meaning_is_refused_and_named(wrong):
    bench = Bench()
    sampling = SamplingParams(**{"max_tokens": 1, **wrong})
    bench.scheduler.add(Request(request_id="a", token_ids=[1], sampling=sampling), 0.0)
    bench.run()
    assert all(next(iter(wrong)) in end.error for end in bench.ended())


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "static", "lpm", "prefill_only"])
def test_requests_that_gave_up_waiting_do_not_pile_up(policy):
    bench = Bench(policy=policy, max_num_seqs=1)
    bench.add("first", 4, max_tokens=200)
    bench.step()
    for i in range(1000):
        bench.add(f"r{i}", 4, priority=5)
        bench.scheduler.abort(f"r{i}", bench.now)
    gc.collect()
    held = [s for s in gc.get_objects() if type(s) is SequenceRecord and s.status is Status.ENDED]
    assert len(held) < 200


def test_a_request_for_no_sequence_is_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="at least one sequence"):
        Bench().add("a", 4, n=0)


def test_a_session_is_found_again_within_five_minutes_and_wiped_after_them():
    session = Scope(ScopeKind.SESSION, b"secret", lifetime_s=300.0)
    bench = Bench()
    bench.add("first", 40, scope=session)
    bench.run()
    bench.now += 299
    bench.add("second", 40, scope=session)
    bench.run()
    assert bench.cached("second") == 36
    bench.now += 301
    bench.wiped.clear()
    assert bench.step(), "an idle engine wakes for it"
    assert bench.plans[-1].wipes
    assert bench.pool.num_free == bench.pool.num_total
    bench.add("third", 40, scope=session)
    bench.run()
    assert bench.cached("third") == 0


def test_a_prompt_that_begins_as_the_release_does_finds_that_much():
    bench = Bench(public=[list(range(18))])
    for name in ("ann", "ben"):
        bench.add(name, 40, scope=Scope(ScopeKind.REQUEST, name.encode()))
        bench.run()
    assert (bench.cached("ann"), bench.cached("ben")) == (0, 16)


def test_what_the_release_keeps_is_no_room_for_requests():
    bench = Bench(num_blocks=8, public=[list(range(16))])
    bench.add("ann", 24)
    bench.run()
    (ended,) = bench.ended("ann")
    assert ended.reason is FinishReason.REJECTED


def test_a_backlog_is_gone_when_all_that_a_tenant_asked_for_has_ended():
    bench = Bench(policy="fair", keys=False, **FLOODED)
    for i in range(40):
        bench.add(f"flood{i}", [2] * 200, max_tokens=100, tenant="flood")
    for _ in range(20):
        bench.step()
    bench.add("victim", [1] * 64, max_tokens=4, tenant="victim")
    bench.scheduler.abort("flood39", bench.now)  # one that waits
    bench.step()
    bench.scheduler.abort("flood0", bench.now)
    bench.run()
    assert bench.of(Preempted)
    assert {name: tenant.backlog for name, tenant in bench.scheduler._policy._tenants.items()} == {"flood": 0, "victim": 0}
