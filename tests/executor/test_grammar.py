"""Sequences that follow grammars: the same tokens in any company, and no fault of one of them hurts another."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import threading
import time
from collections import deque
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from cloister.backends.base import Capability
from cloister.cluster.virtual.byte_tokenizer import write_byte_tokenizer
from cloister.executor import Grammars, ModelRunner
from cloister.executor import grammar as grammar_module
from cloister.executor.grammar import mask_tokens
from cloister.kv import BlockPool, PrefixKeys
from cloister.scheduler import BudgetConfig, Scheduler, SchedulerConfig
from cloister.text import Tokenizer
from cloister.text.grammar import GrammarCompiler
from cloister.types.errors import InvalidRequestError
from cloister.types.events import Ended, Preempted
from cloister.types.request import FinishReason, Grammar, GrammarKind, Request, SamplingParams
from cloister.types.step import Stop
from tests.engine.replica import EOS, VOCAB_SIZE
from tests.history_program import HistoryProgram
from tests.samplers import KERNELS, DrawingHistoryProgram
from tests.slow_grammars import SLOW, HurriedWatch, Watch, idle_helper
from tests.thinning import cover
from tests.tree_history import DrawingTreeProgram, Erratic, Prophet, TreeHistoryProgram

PATTERN = r"([a-f]{2,4}-[0-9]{1,3};){3,9}"
REGEX = Grammar(GrammarKind.REGEX, PATTERN)


class MaskingHistoryProgram(DrawingHistoryProgram):
    """Chooses among the tokens of masks itself, too; counts how often."""

    num_masked = 0

    capabilities = Capability.SAMPLING | Capability.MASKS

    def _choose(self, logits, sampling, wants):
        if wants.masks is None:
            return super()._choose(logits, sampling, wants)
        type(self).num_masked += 1
        return self._drawing.sample_masked(logits, sampling, wants.masks())


PROGRAMS = [HistoryProgram, *([DrawingHistoryProgram, MaskingHistoryProgram] if KERNELS else [])]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    tokenizer = Tokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("bytes")))
    return GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))


def answer(
    compiler,
    requests,
    program=HistoryProgram,
    *,
    num_blocks=400,
    block_size=4,
    max_tokens=512,
    depth=1,
    grammars=None,
    reasons=None,
    clock=None,
    see=lambda result: None,
    drafter=None,
    speculation=None,
):
    """Runs requests to their end; returns ((request id, index) -> (text, reason), preemptions).

    Args:
        reasons: gets the kind of each request's end.
        see: called with the result of each step.
    """
    reasons = {} if reasons is None else reasons
    pool = BlockPool(num_blocks, block_size)
    config = SchedulerConfig(
        max_model_len=256, max_num_seqs=16, budget=BudgetConfig(max_tokens=max_tokens), eos_token_ids=(EOS,)
    )
    scheduler = Scheduler(config, pool, PrefixKeys("model", block_size), speculation)
    runner = ModelRunner(
        program(vocab_size=VOCAB_SIZE, num_blocks=num_blocks, block_size=block_size),
        vocab_size=VOCAB_SIZE,
        max_model_len=256,
        block_size=block_size,
        grammars=grammars or Grammars(compiler),
        clock=clock,
        drafters={} if drafter is None else {"prophet": drafter},
    )
    for request in requests:
        scheduler.add(request, 0.0)
    tokens: dict[int, list[int]] = {}
    found, num_preempted, plans = {}, 0, deque()
    for step in range(5000):
        while len(plans) < depth and (plan := scheduler.plan(step * 0.01)) is not None:
            plans.append(plan)
        if not plans:
            break
        result = runner.run(plans.popleft())
        see(result)
        stops = {}
        for sample in result.samples:
            tokens.setdefault(sample.seq_id, []).extend(sample.token_ids)
            if sample.token_ids[-1] == EOS or sample.seq_id in result.complete:
                stops[sample.seq_id] = Stop(len(sample.token_ids))
        for event in scheduler.commit(result, stops, step * 0.01):
            if isinstance(event, Ended):
                ids = tokens.get(event.seq_id, [])[: event.num_output_tokens]
                text = bytes(token for token in ids if token != EOS).decode("latin-1")
                reasons[event.request_id] = event.reason
                found[event.request_id, event.index] = (text, event.error or event.reason)
            num_preempted += isinstance(event, Preempted)
        pool.check()
    assert not scheduler.requests
    return found, num_preempted


def make(name, grammar=REGEX, prompt=b"a prompt of some length", **sampling):
    params = SamplingParams(**{"grammar": grammar, "max_tokens": 120, "seed": len(name), **sampling})
    return Request(request_id=name, token_ids=list(prompt), sampling=params)


def company():
    return [
        make("greedy", temperature=0),
        make("drawn"),
        make("forked", n=3),
        make("forked later", n=3, min_tokens=20),
        make("free", None, ignore_eos=True, max_tokens=60),
        make("patient", min_tokens=60, logprobs=2),
        make("biased", logit_bias={ord("a"): 5.0}, presence_penalty=1.0),
        make("endless", Grammar(GrammarKind.REGEX, "[xyz]+"), ignore_eos=True, max_tokens=40),
        make("short", Grammar(GrammarKind.CHOICE, json.dumps(["yes", "no"])), prompt=b"p" * 70),
    ]


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request):
    return request.param


@pytest.fixture(scope="module")
def alone(compiler, program):
    found = {}
    for request in company():
        found |= answer(compiler, [request], program)[0]
    return found


@pytest.mark.parametrize(("sizes", "depth"), cover([(400, 512), (60, 512), (60, 9)], [1, 2]))
def test_tokens_are_the_same_in_any_company(compiler, program, alone, sizes, depth):
    num_blocks, max_tokens = sizes
    together, num_preempted = answer(compiler, company(), program, num_blocks=num_blocks, max_tokens=max_tokens, depth=depth)
    assert together == alone
    assert num_blocks == 400 or num_preempted > 0


def test_every_answer_fits_its_grammar(alone):
    for name, index in alone:
        text, reason = alone[name, index]
        if name == "endless":
            assert reason is FinishReason.LENGTH
            assert re.fullmatch("[xyz]{40}", text)
        elif name == "short":
            assert (text, reason) in [("yes", FinishReason.STOP), ("no", FinishReason.STOP)]
        elif name != "free":
            assert reason is FinishReason.STOP
            assert re.fullmatch(PATTERN, text)


def test_sequences_of_one_request_differ(alone):
    assert len({alone["forked", index] for index in range(3)}) == 3


def test_end_tokens_wait_for_min_tokens_as_long_as_something_can_follow(alone):
    assert len(alone["patient", 0][0]) >= 59


def test_a_complete_grammar_ends_before_min_tokens_and_without_an_end_token(compiler):
    grammar = Grammar(GrammarKind.CHOICE, '["only this"]')
    found, _ = answer(compiler, [make("a", grammar, min_tokens=50), make("b", grammar, ignore_eos=True)])
    assert found == {("a", 0): ("only this", FinishReason.STOP), ("b", 0): ("only this", FinishReason.STOP)}


def test_a_cut_is_a_beginning_of_the_form(compiler):
    found, _ = answer(compiler, [make("cut", max_tokens=5)])
    text, reason = found["cut", 0]
    assert reason is FinishReason.LENGTH
    assert re.fullmatch(r"[a-f]{2,4}-?[0-9]{0,3};?[a-f]{0,2}", text)


def test_programs_and_numpy_choose_alike(compiler):
    requests = [make("greedy", temperature=0), make("drawn"), make("free", None, max_tokens=60)]
    found = [answer(compiler, requests, program)[0] for program in PROGRAMS]
    assert all(one == found[0] for one in found)


@pytest.mark.skipif(not KERNELS, reason="the native kernels were not compiled")
def test_a_program_that_can_mask_is_asked_to(compiler):
    before = MaskingHistoryProgram.num_masked
    answer(compiler, [make("greedy", temperature=0), make("free", None)], MaskingHistoryProgram)
    assert MaskingHistoryProgram.num_masked > before


class ScriptedCompiler:
    """Passes grammars on, unless their source says what shall go wrong."""

    def __init__(self, compiler):
        self.eos_token_ids, self.num_words = compiler.eos_token_ids, compiler.num_words
        self.compiled = []
        self.is_ready = True
        self.goes_on = threading.Event()
        self._compiler = compiler

    def compile(self, grammar):
        self.compiled.append(grammar)
        if grammar.source == "hang":
            assert self.goes_on.wait(300)
        if grammar.source == "refuse":
            raise InvalidRequestError("no")
        if grammar.source == "crash":
            raise ZeroDivisionError("with the client's words")
        if grammar.source == "panic at first":
            raise Panic("with the client's words")
        matcher = self._compiler.compile(REGEX)
        if grammar.source.startswith("panic in "):
            return PanickingIn(matcher, grammar.source.removeprefix("panic in "))
        return {"break": Breaking, "burst": Bursting, "panic": Panicking, "slow": Slow}.get(
            grammar.source, lambda found: found
        )(matcher)


class Breaking:
    """Gives up in the middle of an answer."""

    def __init__(self, matcher, num_left=5):
        self._matcher, self._num_left = matcher, num_left

    is_complete = False

    def accept(self, token_ids):
        return self._matcher.accept(token_ids)

    def fill(self, mask):
        self._num_left -= 1
        return self._num_left >= 0 and self._matcher.fill(mask)

    def copy(self):
        return type(self)(self._matcher.copy(), self._num_left)


class Bursting(Breaking):
    """Raises in the middle of an answer."""

    def fill(self, mask):
        if not super().fill(mask):
            raise ZeroDivisionError("with the client's words")
        return True


class Panic(BaseException):
    """What a library in Rust raises that has failed."""


class Panicking(Breaking):
    """Fails in the middle of an answer, as a library in Rust does."""

    def fill(self, mask):
        if not super().fill(mask):
            raise Panic("with the client's words")
        return True


class PanickingIn:
    """Fails in one of its methods, after some calls of it in each copy."""

    def __init__(self, matcher, method, num_left=None):
        self._matcher, self._method = matcher, method
        self._num_left = {"copy": 0, "copy later": 1}.get(method, 4) if num_left is None else num_left

    def _call(self, method):
        if method == self._method.removesuffix(" later"):
            self._num_left -= 1
            if self._num_left < 0:
                raise Panic("with the client's words")

    @property
    def is_complete(self):
        self._call("is_complete")
        return self._matcher.is_complete

    def accept(self, token_ids):
        self._call("accept")
        return self._matcher.accept(token_ids)

    def fill(self, mask):
        self._call("fill")
        return self._matcher.fill(mask)

    def copy(self):
        self._call("copy")
        return PanickingIn(self._matcher.copy(), self._method, self._num_left)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("refuse", "no"),
        ("crash", "ZeroDivisionError"),
        ("break", "too much work"),
        ("burst", "too much work"),
        ("panic", "too much work"),
        ("panic at first", "Panic"),
        ("panic in accept", "too much work"),
        ("panic in is_complete", "too much work"),
        ("panic in fill", "too much work"),
        ("panic in copy", "too much work"),
    ],
)
@pytest.mark.parametrize("n", [1, 3])
def test_a_grammar_that_fails_leaves_others_alone(compiler, program, alone, fault, words, n):
    grammars = Grammars(ScriptedCompiler(compiler))
    requests = [make("greedy", temperature=0), make("bad", Grammar(GrammarKind.REGEX, fault), n=n), make("drawn")]
    reasons = {}
    found, _ = answer(compiler, requests, program, grammars=grammars, reasons=reasons)
    assert found["greedy", 0] == alone["greedy", 0]
    assert found["drawn", 0] == alone["drawn", 0]
    assert reasons["bad"] is FinishReason.UNSUPPORTED
    assert words in found["bad", 0][1]
    assert "client" not in found["bad", 0][1]


def test_a_panic_while_an_answer_forks_ends_its_request_alone(compiler, program, alone):
    forked = make("bad", Grammar(GrammarKind.REGEX, "panic in copy later"), n=3)
    reasons = {}
    requests = [make("greedy", temperature=0), forked]
    found, _ = answer(compiler, requests, program, grammars=Grammars(ScriptedCompiler(compiler)), reasons=reasons)
    assert found["greedy", 0] == alone["greedy", 0]
    assert reasons["bad"] is FinishReason.UNSUPPORTED
    assert "too much work" in found["bad", 0][1]


@pytest.mark.parametrize("kind", [Panic, SystemExit])
def test_nobody_waits_for_a_helper_that_has_ended(compiler, kind, monkeypatch):
    state = Grammars(compiler).open(REGEX, make("a").sampling, [])
    monkeypatch.setattr(state, "look_ahead", raiser(kind))
    state.expect()
    with pytest.raises(kind):
        state.look_ahead_if_unclaimed()
    assert state.is_ready


def raiser(kind):
    def fail():
        raise kind

    return fail


class Slow(Breaking):
    """Takes 20 ms for each mask."""

    watch = None

    def __init__(self, matcher, num_left=0):
        super().__init__(matcher, 10_000)

    @property
    def is_complete(self):
        return self._matcher.is_complete

    def fill(self, mask):
        self.watch.now_s += 0.02
        return self._matcher.fill(mask)


@pytest.fixture
def watch(monkeypatch):
    watch = Watch()
    monkeypatch.setattr(Slow, "watch", watch)
    monkeypatch.setattr("cloister.executor.grammar.time.perf_counter", watch.now)
    return watch


def busy(compiler):
    """Grammars whose masks nobody computes but the engine's thread."""
    return Grammars(ScriptedCompiler(compiler), idle_helper)


@pytest.mark.parametrize("depth", [1, 2])
def test_masks_that_take_long_hold_up_a_step_for_a_bounded_time_and_change_no_token(compiler, program, alone, watch, depth):
    requests = [
        make("greedy", temperature=0),
        make("forked", SLOW, n=3),
        make("drawn", SLOW),
        make("patient", SLOW, min_tokens=60, logprobs=2),
        make("biased", SLOW, logit_bias={ord("a"): 5.0}, presence_penalty=1.0),
        make("free", None, ignore_eos=True, max_tokens=60),
    ]
    took_s, num_deferred = [0.0], 0

    def see(result):
        nonlocal num_deferred
        took_s.append(watch.now_s)
        num_deferred += len(result.deferred)

    found, _ = answer(compiler, requests, program, grammars=busy(compiler), depth=depth, clock=watch, see=see)
    assert found == {key: alone[key] for key in found}
    assert len(found) == 8
    assert num_deferred > 100
    steps_s = [after - before for before, after in pairwise(took_s)]
    assert max(steps_s) <= 0.04 + 1e-9  # one that is waited for in each part of the step: its tokens come from logits, or not


@pytest.mark.parametrize(("more", "depth"), cover([{}, {"prompt_logprobs": 0}], [1, 2]))
def test_answers_that_fork_hold_up_a_step_no_longer_than_others(compiler, program, watch, depth, more):
    def requests(grammar):
        return [make(f"forked {seed}", grammar, n=3, min_tokens=20, seed=seed, **more) for seed in range(5)]

    expected = {key: one for request in requests(REGEX) for key, one in answer(compiler, [request], program)[0].items()}
    grammars, took_s, num_forked = busy(compiler), [], set()
    grammars.open(SLOW, SamplingParams(), [])
    took_s.append(watch.now_s)

    def see(result):
        took_s.append(watch.now_s)
        num_forked.add(len(result.deferred))

    found, _ = answer(compiler, requests(SLOW), program, grammars=grammars, depth=depth, clock=watch, see=see)
    assert found == expected
    assert max(num_forked) > 10, "all answers fork in a few steps, and nearly all of them wait for a mask"
    assert max(after - before for before, after in pairwise(took_s)) <= 0.02 + 1e-9


def test_a_quick_grammar_gets_a_token_in_every_step_beside_slow_ones(compiler, program, watch):
    def count_steps(requests):
        num_steps, last = 0, 0

        def see(result):
            nonlocal num_steps, last
            num_steps += 1
            if any(sample.seq_id == 0 for sample in result.samples):
                last = num_steps

        answer(compiler, requests, program, grammars=busy(compiler), clock=watch, see=see)
        return last

    quick = make("quick", Grammar(GrammarKind.REGEX, "quick"), temperature=0)
    assert count_steps([quick, make("slow", SLOW, n=8)]) == count_steps([quick])


@pytest.mark.parametrize(("sizes", "depth"), cover([(400, 512), (60, 512), (60, 9)], [1, 2]))
def test_tokens_are_the_same_if_masks_are_late_in_any_company(compiler, program, alone, sizes, depth):
    num_blocks, max_tokens = sizes
    num_deferred = 0

    def see(result):
        nonlocal num_deferred
        num_deferred += len(result.deferred)

    grammars = Grammars(compiler, idle_helper)
    together, num_preempted = answer(
        compiler, company(), program, num_blocks=num_blocks, max_tokens=max_tokens, depth=depth, grammars=grammars,
        clock=HurriedWatch(), see=see,
    )  # fmt: skip
    assert together == alone
    assert num_deferred > 100
    assert sizes != (60, 512) or num_preempted > 0


def test_drafts_under_a_grammar_are_accepted_for_a_bounded_time_and_change_no_token(compiler, watch):
    requests = [make("forked", SLOW, n=3), make("drawn", SLOW), make("greedy", temperature=0)]
    program = DrawingTreeProgram if KERNELS else TreeHistoryProgram
    expected = {
        key: found
        for request in requests
        for key, found in answer(compiler, [request], program, grammars=busy(compiler))[0].items()
    }
    prompt = list(b"a prompt of some length")
    drafter = Prophet([prompt + list(text.encode()) for text, _ in expected.values()], VOCAB_SIZE, rightness=1.0, chains=True)
    took_s, num_accepted, speculation = [watch.now_s], [], Erratic()

    def see(result):
        took_s.append(watch.now_s)
        num_accepted.append(sum(len(sample.accepted) for sample in result.samples))

    found, _ = answer(
        compiler, requests, program, grammars=busy(compiler), clock=watch, see=see, drafter=drafter, speculation=speculation
    )
    assert found == expected
    assert max(num_accepted) > 1
    assert max(after - before for before, after in pairwise(took_s)) <= 0.02 + 0.05 + 0.02


def wait_for(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_grammar_is_compiled_beside_the_one_who_asks(compiler):
    scripted = ScriptedCompiler(compiler)
    grammars, done, grammar = Grammars(scripted), threading.Event(), Grammar(GrammarKind.REGEX, "hang")
    assert not grammars.prepare(grammar, done.set)
    assert not done.is_set()
    scripted.goes_on.set()
    assert done.wait(300)
    assert grammars.prepare(grammar, done.set)
    assert scripted.compiled == [grammar]


def test_tenants_take_turns_at_the_thread_that_compiles(compiler):
    scripted = ScriptedCompiler(compiler)
    grammars = Grammars(scripted)
    first, flood = Grammar(GrammarKind.REGEX, "hang"), [Grammar(GrammarKind.REGEX, f"flood{i}") for i in range(20)]
    others = {name: [Grammar(GrammarKind.REGEX, f"{name}{i}") for i in range(2)] for name in ("ann", "bob")}
    grammars.prepare(first, lambda: None, "flood")
    wait_for(lambda: scripted.compiled)
    for grammar in flood:
        grammars.prepare(grammar, lambda: None, "flood")
    for name, own in others.items():
        for grammar in own:
            grammars.prepare(grammar, lambda: None, name)
    scripted.goes_on.set()
    wait_for(lambda: len(scripted.compiled) == 25)
    order = [grammar.source for grammar in scripted.compiled]
    assert order[1:7] == ["flood0", "ann0", "bob0", "flood1", "ann1", "bob1"]
    assert order[7:] == [f"flood{i}" for i in range(2, 20)], "of one tenant in the order in which they came"


@pytest.fixture
def impatient(monkeypatch):
    """A compilation that hangs has had its time at once."""
    monkeypatch.setattr(grammar_module, "COMPILE_WALL_S", 0.0)


@pytest.mark.usefixtures("impatient")
def test_one_that_hangs_is_given_up_and_the_next_one_compiles(compiler):
    scripted = ScriptedCompiler(compiler)
    grammars, stuck, next_one = Grammars(scripted), Grammar(GrammarKind.REGEX, "hang"), Grammar(GrammarKind.REGEX, "next")
    grammars.prepare(stuck, lambda: None)
    wait_for(lambda: scripted.compiled)
    grammars.give_up(stuck)
    done = threading.Event()
    assert grammars.prepare(next_one, done.set) or done.wait(300)
    found, _ = answer(compiler, [make("stuck", stuck), make("next", next_one)], grammars=grammars)
    assert "too long" in found["stuck", 0][1]
    assert found["next", 0][1] is FinishReason.STOP
    scripted.goes_on.set()


@pytest.mark.usefixtures("impatient")
def test_one_that_waits_behind_a_hanging_one_is_not_at_fault(compiler, monkeypatch):
    scripted = ScriptedCompiler(compiler)
    grammars, stuck, behind = Grammars(scripted), Grammar(GrammarKind.REGEX, "hang"), Grammar(GrammarKind.REGEX, "next")
    grammars.prepare(stuck, lambda: None)
    wait_for(lambda: scripted.compiled)
    done = threading.Event()
    assert not grammars.prepare(behind, done.set)
    assert grammars.give_up(stuck)
    monkeypatch.setattr(grammar_module, "COMPILE_WALL_S", 60.0)  # the next one may be compiled by now, and hangs nowhere
    if not grammars.give_up(behind):
        assert grammars.prepare(behind, done.set) or done.wait(300)
    found, _ = answer(compiler, [make("stuck", stuck), make("free", None), make("behind", behind)], grammars=grammars)
    assert "too long" in found["stuck", 0][1]
    assert found["behind", 0][1] is FinishReason.STOP
    scripted.goes_on.set()


@pytest.mark.usefixtures("impatient")
def test_all_that_wait_behind_a_hanging_one_are_compiled_when_its_thread_is_left(compiler):
    scripted = ScriptedCompiler(compiler)
    grammars, stuck = Grammars(scripted), Grammar(GrammarKind.REGEX, "hang")
    behind = [Grammar(GrammarKind.REGEX, f"next{number}") for number in range(3)]
    grammars.prepare(stuck, lambda: None)
    wait_for(lambda: scripted.compiled)
    for grammar in behind:
        grammars.prepare(grammar, lambda: None)
    assert grammars.give_up(stuck)
    wait_for(lambda: all(grammars.prepare(grammar, lambda: None) for grammar in behind))
    assert scripted.compiled == [stuck, *behind]
    scripted.goes_on.set()


def test_each_of_several_behind_a_grammar_whose_request_is_gone_gets_a_thread(compiler):
    scripted = ScriptedCompiler(compiler)
    grammars, behind = Grammars(scripted), [Grammar(GrammarKind.REGEX, f"next{number}") for number in range(3)]
    grammars.prepare(Grammar(GrammarKind.REGEX, "hang"), lambda: None)
    wait_for(lambda: scripted.compiled)
    for grammar in behind:
        grammars.prepare(grammar, lambda: None)
    assert not grammars.give_up(behind[0])
    wait_for(lambda: all(grammars.prepare(grammar, lambda: None) for grammar in behind))
    assert {grammar.source for grammar in scripted.compiled} == {"hang", "next0", "next1", "next2"}
    scripted.goes_on.set()


def test_one_behind_a_grammar_whose_request_is_gone_gets_a_thread_of_its_own(compiler):
    scripted = ScriptedCompiler(compiler)
    grammars, behind = Grammars(scripted), Grammar(GrammarKind.REGEX, "next")
    gone = Grammar(GrammarKind.REGEX, "hang")
    grammars.prepare(gone, lambda: None)
    wait_for(lambda: scripted.compiled)
    del gone
    grammars.prepare(behind, lambda: None)
    assert not grammars.give_up(behind)
    wait_for(lambda: grammars.prepare(behind, lambda: None))
    found, _ = answer(compiler, [make("behind", behind)], grammars=grammars)
    assert found["behind", 0][1] is FinishReason.STOP
    scripted.goes_on.set()


def test_all_that_wait_behind_one_that_hangs_get_another_thread(compiler):
    scripted = ScriptedCompiler(compiler)
    grammars, done = Grammars(scripted), threading.Event()
    behind = [Grammar(GrammarKind.REGEX, name) for name in ("first", "second", "third")]
    grammars.prepare(Grammar(GrammarKind.REGEX, "hang"), lambda: None)
    wait_for(lambda: scripted.compiled)
    for grammar in behind:
        grammars.prepare(grammar, lambda: None)
    assert not grammars.give_up(behind[0])
    wait_for(lambda: len(scripted.compiled) == 4)
    assert grammars.prepare(behind[0], done.set) or done.wait(300), "the thread that one of them gets is for all"
    assert {grammar.source for grammar in scripted.compiled} == {"hang", "first", "second", "third"}
    scripted.goes_on.set()


@pytest.mark.usefixtures("impatient")
def test_too_many_that_hang_refuse_the_next_ones_until_they_are_done(compiler):
    scripted = ScriptedCompiler(compiler)
    grammars = Grammars(scripted)
    stuck = [Grammar(GrammarKind.REGEX, "hang") for _ in range(2)]
    for number, grammar in enumerate(stuck, 1):
        grammars.prepare(grammar, lambda: None)
        wait_for(lambda number=number: len(scripted.compiled) == number)
        grammars.give_up(grammar)
    refused = Grammar(GrammarKind.REGEX, "next")
    found, _ = answer(compiler, [make("next", refused)], grammars=grammars)
    assert "try again" in found["next", 0][1]
    scripted.goes_on.set()
    wait_for(lambda: answer(compiler, [make("next", refused)], grammars=grammars)[0]["next", 0][1] is FinishReason.STOP)


@pytest.mark.usefixtures("impatient")
def test_all_behind_one_that_is_given_up_are_compiled_by_the_next_thread(compiler):
    scripted = ScriptedCompiler(compiler)
    grammars, stuck = Grammars(scripted), Grammar(GrammarKind.REGEX, "hang")
    grammars.prepare(stuck, lambda: None)
    wait_for(lambda: scripted.compiled)
    behind = [Grammar(GrammarKind.REGEX, f"behind{i}") for i in range(3)]
    for grammar in behind:
        grammars.prepare(grammar, lambda: None)
    assert grammars.give_up(stuck)
    wait_for(lambda: all(grammars.prepare(grammar, lambda: None) for grammar in behind))
    scripted.goes_on.set()


@pytest.mark.usefixtures("impatient")
def test_one_that_found_no_thread_is_refused_at_once_though_one_has_become_free(compiler):
    scripted = ScriptedCompiler(compiler)
    grammars = Grammars(scripted)
    for number in (1, 2):
        stuck = Grammar(GrammarKind.REGEX, "hang")
        grammars.prepare(stuck, lambda: None)
        wait_for(lambda number=number: len(scripted.compiled) == number)
        assert grammars.give_up(stuck)
    late = Grammar(GrammarKind.REGEX, "hang")
    assert grammars.prepare(late, lambda: None)
    scripted.goes_on.set()
    wait_for(lambda: all(job.done() for job in grammars._left))
    scripted.goes_on.clear()
    found, _ = answer(compiler, [make("late", late)], grammars=grammars)
    assert "try again" in found["late", 0][1], "no step waits until it is compiled"
    assert len(scripted.compiled) == 2


def test_a_compilation_ends_by_the_time_of_its_thread_not_by_that_of_others(compiler, monkeypatch):
    monkeypatch.setattr(grammar_module, "COMPILE_TIMEOUT_S", 0.3)
    burning = Burning(compiler, burn_s=60.0)
    grammars, endless = Grammars(burning), Grammar(GrammarKind.REGEX, "ab")
    grammars.prepare(endless, lambda: None)
    wait_for(lambda: burning.taken_s() > 0.1)
    assert not grammars.give_up(endless)
    wait_for(lambda: burning.taken_s() > 0.5)
    assert grammars.give_up(endless)
    found, _ = answer(compiler, [make("endless", endless)], grammars=grammars)
    assert "too long" in found["endless", 0][1]
    burning.burn_s = 0.0


def test_one_that_waits_behind_another_on_a_busy_machine_is_not_refused(compiler):
    scripted = ScriptedCompiler(compiler)
    grammars = Grammars(scripted)
    starved = [Grammar(GrammarKind.REGEX, "hang") for _ in range(3)]  # as far as their processor time is concerned
    for grammar in starved:
        grammars.prepare(grammar, lambda: None)
    wait_for(lambda: scripted.compiled)
    for _ in range(5):
        assert not any(map(grammars.give_up, starved))
    scripted.goes_on.set()
    wait_for(lambda: all(grammars.prepare(grammar, lambda: None) for grammar in starved))
    found, _ = answer(compiler, [make(str(i), grammar) for i, grammar in enumerate(starved)], grammars=grammars)
    assert {reason for _, reason in found.values()} == {FinishReason.STOP}


def test_a_process_that_gets_no_processor_time_refuses_no_grammar(compiler):
    """It is stopped for three times what a grammar may take, in the middle of compiling one that takes half of it."""
    limit_s, starved_s = 1.0, 3.0
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, compile_slowly(limit_s, os.getpid()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    wait_for(lambda: is_stopped(child))
    time.sleep(starved_s)
    os.kill(child, signal.SIGCONT)
    with open(reader) as said:
        assert said.read() == "compiled", "by the clock it would have had its time"
    os.waitpid(child, 0)


def compile_slowly(limit_s, pid):
    """Compiles a grammar that takes half of the limit in processor time, and stops this process in the middle."""
    grammar_module.COMPILE_TIMEOUT_S = limit_s
    burning = Burning(None, burn_s=limit_s / 2)
    grammars, grammar = Grammars(burning), Grammar(GrammarKind.REGEX, "ab")
    grammars.prepare(grammar, lambda: None)
    began_s, is_starved = time.monotonic(), False
    while not grammars.prepare(grammar, lambda: None):
        if not is_starved and burning.taken_s() > limit_s / 10:
            is_starved = True
            os.kill(pid, signal.SIGSTOP)
        if time.monotonic() - began_s >= limit_s and grammars.give_up(grammar):
            return "given up"
        time.sleep(0.01)
    return "compiled" if time.monotonic() - began_s > limit_s else "not starved"


def is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


class Burning:
    """A compiler that takes so much processor time."""

    eos_token_ids = (2,)
    num_words = 8
    is_ready = True

    def __init__(self, compiler, burn_s):
        self.burn_s, self._compiler, self._taken_s = burn_s, compiler, 0.0

    def taken_s(self):
        return self._taken_s

    def compile(self, grammar):
        began_s = time.thread_time()
        while self._taken_s < self.burn_s:
            self._taken_s = time.thread_time() - began_s
        return Filled()


class Filled:
    """A matcher whose first mask is there."""

    is_complete = False

    def fill(self, mask):
        return True


def test_equal_grammars_of_two_requests_are_compiled_twice(compiler):
    """Whether somebody else sent the same schema before must not be felt, whatever his scope is."""
    scripted = ScriptedCompiler(compiler)
    one, other = Grammar(GrammarKind.REGEX, "same"), Grammar(GrammarKind.REGEX, "same")
    answer(compiler, [make("a", one), make("b", other), make("c", one, n=2)], grammars=Grammars(scripted))
    assert len(scripted.compiled) == 2


def test_nothing_of_a_grammar_stays_when_its_request_is_gone(compiler):
    grammars = Grammars(compiler)
    answer(compiler, [make("a", Grammar(GrammarKind.REGEX, "a{1,3}"))], grammars=grammars)
    gc.collect()
    assert not grammars._compiled


def test_barred_tokens_are_minus_infinity_and_others_stay():
    scores = np.arange(80, dtype=np.float32).reshape(2, 40)
    mask_tokens(scores, [1], [np.array([1 << 5 | 1 << 31, 1 << 7], np.uint32)])
    assert np.isfinite(scores[0]).all()
    assert np.flatnonzero(np.isfinite(scores[1])).tolist() == [5, 31, 39]


def test_the_tokenizer_is_only_read_when_a_grammar_comes(tmp_path: Path):
    compiler = GrammarCompiler(Tokenizer(write_byte_tokenizer(tmp_path)), vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    assert compiler._vocabulary is None
    compiler.compile(REGEX)
    assert compiler._vocabulary is not None
