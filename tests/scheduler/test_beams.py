"""Beam search over a scheduler: blocks are shared, each request ends once, and nothing is left."""

import gc

import pytest

from cloister.kv import BlockGroup, BlockPool, PrefixKeys
from cloister.scheduler import POLICIES, BudgetConfig, Scheduler, SchedulerConfig
from cloister.scheduler.beam_search import Beams
from cloister.scheduler.policies import fair
from cloister.scheduler.sequence import RequestState
from cloister.types.events import Ended, Preempted
from cloister.types.request import BeamSearch, FinishReason, Request, SamplingParams, TokenLogprobs
from cloister.types.step import Sample, StepResult

VOCAB = 23


def likely(tokens, num):
    """A made-up model: the likeliest next tokens after `tokens`, and what they cost."""
    base = (sum(tokens) * 7 + len(tokens) * 3) % VOCAB
    return tuple(((base + 5 * i) % VOCAB, -0.3 * i - 0.01 * ((base + i) % 5)) for i in range(num))


class Bench:
    def __init__(self, num_blocks=256, block_size=4, max_tokens=64, ends=(), keys=True, **config):
        self.pool = BlockPool(num_blocks, block_size)
        config = {"max_model_len": 128, "eos_token_ids": ends, **config}
        self.scheduler = Scheduler(
            SchedulerConfig(budget=BudgetConfig(max_tokens=max_tokens), **config), self.pool,
            PrefixKeys("model", block_size) if keys else None,
        )  # fmt: skip
        self.now, self.events, self.held, self.answers, self.most_used = 0.0, [], {}, {}, 0

    def add(self, name, prompt, width, max_tokens=8, n=1, tenant="", **search):
        sampling = SamplingParams(n=n, max_tokens=max_tokens, temperature=0.0, beams=BeamSearch(width=width, **search))
        self.scheduler.add(Request(request_id=name, token_ids=prompt, sampling=sampling, tenant=tenant), self.now)

    def ask(self, name, prompt, max_tokens=1, **fields):
        """Adds a request without a search."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add(Request(request_id=name, token_ids=prompt, sampling=sampling, **fields), self.now)

    def step(self):
        self.now += 0.01
        plan = self.scheduler.plan(self.now)
        if plan is None:
            self.events += self.scheduler.take_events()
            return False
        for seq_id in plan.departures:
            self.held.pop(seq_id, None)
        for new in plan.arrivals:
            assert new.seq_id not in self.held
            self.held[new.seq_id] = (list(new.token_ids), new.sampling.logprobs or 0)
        samples = []
        for part in plan.sequences:
            tokens, num = self.held[part.seq_id]
            if part.num_samples:
                assert part.start + part.num_tokens == len(tokens)
                top = likely(tokens, max(1, num))
                token = top[0][0]
                samples.append(
                    Sample(part.seq_id, [token], [TokenLogprobs(token_id=token, logprob=0.0, top=top)] if num else None)
                )
                if not num:  # a beam's next token is chosen later
                    tokens.append(token)
        self.most_used = max(self.most_used, self.pool.num_used)
        self.events += self.scheduler.commit(StepResult(plan_id=plan.plan_id, samples=samples, elapsed_s=0.01), {}, self.now)
        for new in self.scheduler.take_answers():
            self.answers[new.seq_id] = new.token_ids[new.num_prompt_tokens :]
        self.pool.check()
        return True

    def run(self, limit=500):
        for _ in range(limit):
            if not self.step():
                assert not self.scheduler.requests
                return self
        raise AssertionError("it does not end")

    def ended(self, name):
        return [e for e in self.events if isinstance(e, Ended) and e.request_id == name]

    def found(self, name):
        return [self.answers[e.seq_id] for e in self.ended(name)]


def search(prompt, width, max_output, ends=(), penalty=1.0, early=False):
    """Beam search in the plain way, without blocks."""
    beams = Beams(BeamSearch(width=width, length_penalty=penalty, early_stopping=early), ends, max_output)
    live = {0: []}
    beams.start({0: 0.0})
    while not beams.is_done:
        for key, tokens in live.items():
            beams.collect(key, likely([*prompt, *tokens], beams.num_candidates))
        kept = beams.advance(live)
        live = {place: [*live[beam.parent_id], beam.token_id] for place, beam in enumerate(kept)}
        beams.start({place: beam.logprob for place, beam in enumerate(kept)})
    return [hypothesis.token_ids for hypothesis in beams.hypotheses]


@pytest.mark.parametrize("ends", [(), (3,), (3, 9, 14)])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_its_answers_are_those_of_a_search_without_blocks(width, ends):
    bench = Bench(ends=ends)
    prompt = list(range(11))
    bench.add("a", prompt, width, n=min(2, width), max_tokens=9)
    bench.run()
    assert bench.found("a") == search(prompt, width, 9, ends)[: min(2, width)]
    assert bench.pool.num_used == 0
    assert [e.last for e in bench.ended("a")] == [False] * (min(2, width) - 1) + [True]


def test_beams_share_the_blocks_of_what_they_have_in_common():
    bench = Bench()
    bench.add("a", list(range(40)), 8, max_tokens=8)
    bench.run()
    assert bench.most_used < 10 + 8 * 4  # the prompt once; 8 prompts alone would be 80


def test_several_searches_and_chunked_prompts_do_not_mix_and_none_is_preempted():
    bench = Bench(num_blocks=120, max_tokens=24, max_num_seqs=16)
    prompts = {f"r{i}": [i, *range(3 * i + 5)] for i in range(10)}
    for name, prompt in prompts.items():
        bench.add(name, prompt, 3, n=3, max_tokens=12)
    bench.run()
    assert {name: bench.found(name) for name in prompts} == {name: search(prompt, 3, 12) for name, prompt in prompts.items()}
    assert not [e for e in bench.events if isinstance(e, Preempted)]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "static"])
def test_it_stands_beside_answers_that_grow_until_they_are_preempted(policy):
    bench = Bench(num_blocks=60, max_num_seqs=12, policy=policy)
    for i in range(6):
        sampling = SamplingParams(max_tokens=60, ignore_eos=True)
        bench.scheduler.add(Request(request_id=f"long{i}", token_ids=[i, 1, 2], sampling=sampling), bench.now)
    bench.add("a", list(range(9)), 4, n=2, max_tokens=20)
    bench.run()
    assert len([e for e in bench.events if isinstance(e, Ended)]) == 8
    assert bench.found("a") == search(list(range(9)), 4, 20)[:2]


@pytest.mark.parametrize("num_steps", range(7))
@pytest.mark.parametrize("ending", ["abort", "timeout", "failure"])
def test_one_that_ends_early_ends_once_for_each_answer_and_gives_everything_back(ending, num_steps):
    bench = Bench()
    bench.add("a", list(range(20)), 4, n=2, max_tokens=50)
    for _ in range(num_steps):
        bench.step()
    if ending == "abort":
        bench.scheduler.abort("a", bench.now)
    elif ending == "timeout":
        bench.now += 10_000
    else:
        bench.scheduler.plan(bench.now)
        bench.scheduler.fail("broken", bench.now)
    bench.run()
    assert [e.index for e in bench.ended("a")] == [0, 1]
    assert [e.last for e in bench.ended("a")] == [False, True]
    assert bench.pool.num_used == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 2, "n": 3}, "n must be from 1 to 2"),
        ({"width": 33}, "beam searches may hold 32 of the 64 sequences"),
        ({"width": 30, "max_tokens": 200}, "30 beams may need"),
        ({"width": 1, "max_tokens": 1021}, "1 beams may need"),
        ({"width": 2, "length_penalty": 1e6}, "length_penalty must be"),
        ({"width": 2, "length_penalty": float("nan")}, "length_penalty must be"),
    ],
)
def test_what_can_never_run_is_refused_with_the_reason(fields, message):
    bench = Bench(max_model_len=2048)
    bench.add("a", [1, 2, 3], **fields)
    bench.run()
    (first, *_) = bench.ended("a")
    assert first.reason is FinishReason.REJECTED
    assert message in first.error


def test_a_search_whose_steps_would_hold_up_everybody_is_refused():
    bench = Bench(ends=tuple(range(300)))
    bench.add("a", [1, 2, 3], 16)
    bench.run()
    assert "16 beams with 300 tokens that end an answer" in bench.ended("a")[0].error


def unlike(tokens, num):
    """Another one: beams that went apart never meet again, so that they share no more than the prompt."""
    base = (sum(tokens) * 7 + len(tokens) * 3) % VOCAB
    return tuple(((base + 5 * i) % VOCAB, -(0.1 * i + len(tokens)) if i else 0.0) for i in range(num))


@pytest.mark.parametrize("groups", [[(56,), (80, 9, 9)], [(80,), (80, 2, 7), (36, 17, 11)], [(24, 9, 9)]], ids=str)
def test_searches_over_layers_with_windows_find_the_same_and_none_waits_for_ever(groups, monkeypatch):
    monkeypatch.setitem(globals(), "likely", unlike)
    bench = Bench(num_blocks=[BlockGroup(*group) for group in groups], max_tokens=20, max_num_seqs=12)
    prompts = {f"r{i}": [i, 3] for i in range(4)}
    for name, prompt in prompts.items():
        bench.add(name, prompt, 3, n=3, max_tokens=39)
    bench.run()
    assert {name: bench.found(name) for name in prompts} == {name: search(prompt, 3, 39) for name, prompt in prompts.items()}
    assert not [e for e in bench.events if isinstance(e, Preempted)]


def test_more_beams_than_a_window_has_blocks_for_are_refused_at_once():
    bench = Bench(num_blocks=[BlockGroup(5, 7, 3)], max_tokens=4, max_num_seqs=6)
    bench.add("many", list(range(16)), 3, max_tokens=60)
    bench.add("one", list(range(16)), 1, max_tokens=60)
    bench.run()
    assert [bench.ended(name)[0].reason for name in ("many", "one")] == [FinishReason.REJECTED, FinishReason.LENGTH]


@pytest.mark.parametrize("max_num_seqs", [2, 3, 8])
@pytest.mark.parametrize("policy", [name for name in POLICIES.names() if name != "static"])  # there a batch ends first
def test_a_flood_of_searches_delays_no_other_request(policy, max_num_seqs):
    bench = Bench(num_blocks=2048, max_num_seqs=max_num_seqs, policy=policy, max_model_len=1024)
    width = max_num_seqs // 2
    for i in range(5):
        bench.add(f"flood{i}", [i, 1], width, max_tokens=500, tenant="flooding")
    for _ in range(20):
        bench.step()
    for i in range(3):
        bench.ask(f"other{i}", [7, i], max_tokens=3, tenant="other")
        for _ in range(12):
            bench.step()
        assert [e.reason for e in bench.ended(f"other{i}")] == [FinishReason.LENGTH]
    assert not bench.ended("flood0")
    assert bench.scheduler.num_waiting == len(bench.scheduler.held_searches) == 4


@pytest.mark.parametrize(
    ("policy", "order"), [("fcfs", ["b", "c", "d"]), ("fair", ["d", "b", "c"]), ("priority", ["b", "c", "d"])]
)
def test_searches_have_turns_as_the_policy_gives_them(policy, order):
    bench = Bench(max_num_seqs=8, policy=policy)
    for name in "abc":
        bench.add(name, [1, 2, 3], 4, max_tokens=30, tenant="flooding")
        bench.step()
    for _ in range(5):
        bench.step()
    bench.add("d", [1, 2, 3], 4, max_tokens=30, tenant="other")
    bench.run()
    ended = [e.request_id for e in bench.events if isinstance(e, Ended)]
    assert ended == ["a", *order]
    assert all(bench.found(name) == search([1, 2, 3], 4, 30)[:1] for name in ended)


def test_a_tenant_that_always_has_the_next_search_ready_starves_nobody():
    bench = Bench(num_blocks=2048, max_num_seqs=8, policy="fair")
    for name in ("b0", "b1"):
        bench.add(name, [1, 2], 4, max_tokens=30, tenant="other")
    for number in range(300):
        if number % 3 == 2 and not any(name.startswith("a") for name in bench.scheduler.held_searches):
            bench.add(f"a{number}", [1, 2], 4, max_tokens=30, tenant="busy")  # some steps after its former one has started
        bench.step()
    ended = [e.request_id for e in bench.events if isinstance(e, Ended)]
    assert [name[0] for name in ended[:4]] == ["b", "a", "b", "a"]


def test_turns_of_many_tenants_are_forgotten_oldest_first(monkeypatch):
    monkeypatch.setattr(fair, "_NUM_TURNS", 3)
    bench = Bench(num_blocks=2048, max_num_seqs=8, policy="fair")
    for number in range(6):
        bench.add(f"{number}", [1, 2], 1, max_tokens=1, tenant=str(number))
        bench.run()
    assert list(bench.scheduler._policy._turns) == ["3", "4", "5"]


def test_a_search_that_ended_leaves_no_trace_and_its_id_holds_no_slots():
    bench = Bench(max_num_seqs=8)
    bench.add("left", [1, 2, 3], 4, max_tokens=5)
    bench.run()
    gc.collect()
    assert not [it for it in gc.get_objects() if isinstance(it, RequestState) and it.request.request_id == "left"]
    bench.add("left", [1, 2, 3], 4, max_tokens=5)
    while not bench.ended("left")[1:]:
        bench.step()
    bench.ask("left", [5, 6], max_tokens=100)
    bench.add("b", [1, 2, 3], 4, max_tokens=5)
    bench.step()
    assert bench.scheduler.num_running == 1 + 4


def test_a_held_search_that_ends_leaves_its_place_and_its_turn():
    bench = Bench(max_num_seqs=4)
    for name in "abcd":
        bench.add(name, [1, 2, 3], 2, max_tokens=30)
    bench.step()
    bench.scheduler.abort("b", bench.now)
    bench.scheduler.abort("a", bench.now)  # the one that runs
    bench.run()
    assert [e.reason for name in "abcd" for e in bench.ended(name)] == [FinishReason.ABORT] * 2 + [FinishReason.LENGTH] * 2


def test_a_server_with_a_single_slot_searches_nothing():
    bench = Bench(max_num_seqs=1)
    bench.add("a", [1, 2, 3], 1)
    bench.run()
    assert "hold 0 of the 1 sequences" in bench.ended("a")[0].error


@pytest.mark.parametrize(("num_steps", "counted"), [(0, 0), (1, 1), (3, 9), (50, 37)])
def test_what_its_beams_were_extended_by_is_counted_also_where_it_ends_early(num_steps, counted):
    bench = Bench()
    bench.add("a", [1, 2, 3], 4, n=2, max_tokens=10)
    for _ in range(num_steps):
        bench.step()
    bench.scheduler.abort("a", bench.now)
    bench.run()
    assert [e.num_beam_tokens for e in bench.ended("a")] == [0, counted]
