"""An engine that follows grammars: compiling one keeps nobody waiting but its own request, which ends once whatever happens."""

from __future__ import annotations

import threading
import time

import pytest

from cloister.engine.core import EngineCore
from cloister.engine.output_processor import OutputProcessor
from cloister.executor import Grammars, ModelRunner
from cloister.kv import BlockPool, PrefixKeys
from cloister.scheduler import Scheduler, SchedulerConfig
from cloister.text import Tokenizer
from cloister.text.grammar import GrammarCompiler
from cloister.types.events import Abort, Shutdown, Submit
from cloister.types.grammar import Grammar, GrammarKind
from cloister.types.request import FinishReason, ModelInfo, Request, SamplingParams
from tests.engine.replica import BLOCK_SIZE, EOS, MAX_MODEL_LEN, VOCAB_SIZE, make_request, write_tokenizer
from tests.history_program import HistoryProgram


class SlowCompiler:
    """Compiles when it is told to go on."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.eos_token_ids, self.num_words = compiler.eos_token_ids, compiler.num_words
        self.goes_on = threading.Event()
        self.is_ready = True
        self._compiler = compiler

    def compile(self, grammar):
        assert self.goes_on.wait(20)
        return self._compiler.compile(grammar)


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s


class House:
    """An engine that this thread steps."""

    def __init__(self, path) -> None:
        tokenizer = Tokenizer(write_tokenizer(path))
        info = ModelInfo(
            name="history", path=str(path), max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,)
        )
        self.compiler = SlowCompiler(GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,)))
        self.clock = ManualClock()
        grammars = Grammars(self.compiler)
        program = HistoryProgram(vocab_size=VOCAB_SIZE, num_blocks=64, block_size=BLOCK_SIZE)
        config = SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=8, eos_token_ids=(EOS,))
        self.core = EngineCore(
            Scheduler(config, BlockPool(64, BLOCK_SIZE), PrefixKeys("history", BLOCK_SIZE)),
            ModelRunner(program, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, grammars=grammars),
            OutputProcessor(tokenizer, info),
            model=info,
            memory=[],
            clock=self.clock,
            grammars=grammars,
        )
        self.texts: dict[str, str] = {}
        self.ends: dict[str, tuple[FinishReason, str | None]] = {}

    def submit(self, request: Request) -> str:
        self.core.input_queue.put(Submit(request))
        return request.request_id

    def step(self) -> bool:
        brought = self.core.step()
        for output in [] if brought is None else brought.outputs:
            self.texts[output.request_id] = self.texts.get(output.request_id, "") + output.text
            if output.finish_reason is not None:
                assert output.request_id not in self.ends, "a request ended twice"
                self.ends[output.request_id] = output.finish_reason, output.error
        return brought is not None

    def drive(self, *request_ids: str) -> None:
        deadline = time.monotonic() + 10
        while not all(request_id in self.ends for request_id in request_ids):
            assert time.monotonic() < deadline
            if not self.step():
                self.core.input_queue.wait(0.05)


@pytest.fixture
def house(tmp_path):
    house = House(tmp_path)
    yield house
    house.compiler.goes_on.set()


def held(**sampling: object) -> Request:
    return make_request(grammar=Grammar(GrammarKind.CHOICE, '["yes", "no"]'), max_tokens=20, ignore_eos=False, **sampling)


def test_others_go_on_while_a_grammar_compiles(house):
    waiting, other = house.submit(held()), house.submit(make_request(max_tokens=30))
    house.drive(other)
    assert house.ends[other] == (FinishReason.LENGTH, None)
    assert waiting not in house.ends
    house.compiler.goes_on.set()
    house.drive(waiting)
    assert house.ends[waiting] == (FinishReason.STOP, None)
    assert house.texts[waiting] in ("yes", "no")


def test_an_idle_engine_is_woken_when_a_grammar_is_compiled(house):
    waiting = house.submit(held())
    house.step()
    assert not house.step()
    threading.Timer(0.1, house.compiler.goes_on.set).start()
    started = time.monotonic()
    house.core.input_queue.wait(10)
    assert time.monotonic() - started < 5
    house.drive(waiting)


def test_one_that_takes_too_long_fails_alone(house):
    waiting, other = house.submit(held()), house.submit(make_request(max_tokens=30))
    house.drive(other)
    house.clock.now_s += 6
    house.drive(waiting)
    reason, error = house.ends[waiting]
    assert reason is FinishReason.ERROR
    assert "too long to compile" in error


def test_the_first_grammar_has_time_to_read_the_vocabulary(house):
    house.compiler.is_ready = False
    waiting, other = house.submit(held()), house.submit(make_request(max_tokens=30))
    house.drive(other)
    for _ in range(3):
        house.clock.now_s += 12
        house.step()
    assert waiting not in house.ends
    house.compiler.goes_on.set()
    house.drive(waiting)
    assert house.ends[waiting] == (FinishReason.STOP, None)


def test_a_request_can_be_aborted_while_its_grammar_compiles(house):
    waiting = house.submit(held())
    house.step()
    house.core.input_queue.put(Abort(waiting))
    house.drive(waiting)
    assert house.ends[waiting][0] is FinishReason.ABORT
    house.compiler.goes_on.set()
    house.core.input_queue.wait(0.2)
    assert not house.step() or waiting in house.ends


def test_the_deadline_of_a_request_counts_from_its_arrival_while_its_grammar_compiles(house):
    house.compiler.is_ready = False
    waiting = house.submit(held())
    for _ in range(5):
        house.step()
        assert waiting not in house.ends
        house.clock.now_s += 12
    house.drive(waiting)
    assert house.ends[waiting][0] is FinishReason.TIMEOUT


def test_a_shutdown_ends_what_compiles(house):
    waiting = house.submit(held())
    house.step()
    house.core.input_queue.put(Shutdown(0.0))
    house.drive(waiting)
    assert house.ends[waiting][0] is FinishReason.ABORT
    for _ in range(5):
        house.step()
    assert house.core.is_done


def test_a_stop_string_and_a_stop_token_end_an_answer_before_its_grammar_does(house):
    house.compiler.goes_on.set()
    digits = Grammar(GrammarKind.REGEX, "[0-9]{30}")
    by_token = house.submit(make_request(grammar=digits, max_tokens=40, stop_token_ids=tuple(b"56789"), temperature=1.0))
    by_text = house.submit(make_request(grammar=digits, max_tokens=40, stop=tuple("01234"), temperature=1.0, seed=1))
    house.drive(by_token, by_text)
    assert house.ends[by_token] == house.ends[by_text] == (FinishReason.STOP, None)
    assert set(house.texts[by_token][:-1]) <= set("01234")
    assert set(house.texts[by_text]) <= set("56789")


def test_log_probabilities_are_of_the_model_and_not_of_the_grammar(house):
    house.compiler.goes_on.set()
    request = held(logprobs=3)
    free = make_request(max_tokens=1, logprobs=3)
    outputs = {}
    for one in (request, free):
        house.submit(one)
    for _ in range(50):
        brought = house.core.step()
        for output in [] if brought is None else brought.outputs:
            outputs.setdefault(output.request_id, []).extend(output.logprobs or [])
        house.core.input_queue.wait(0.01)
    assert outputs[request.request_id][0].top == outputs[free.request_id][0].top
    assert outputs[request.request_id][0].text in (b"y", b"n")
    assert SamplingParams().grammar is None
