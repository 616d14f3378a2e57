"""An engine that follows grammars: compiling one keeps nobody waiting but its own request, which ends once whatever happens."""

from __future__ import annotations

import threading
import time

import pytest

from cloister.cluster.virtual.byte_tokenizer import write_byte_tokenizer
from cloister.engine.core import EngineCore
from cloister.engine.output_processor import OutputProcessor
from cloister.executor import Grammars, ModelRunner
from cloister.executor.grammar_memory import GrammarMemory
from cloister.kv import BlockPool, PrefixKeys
from cloister.scheduler import Scheduler, SchedulerConfig
from cloister.text import Tokenizer
from cloister.text.grammar import GrammarCompiler
from cloister.types.events import Abort, Shutdown, Submit
from cloister.types.request import FinishReason, Grammar, GrammarKind, ModelInfo, Request, SamplingParams
from tests.engine.replica import BLOCK_SIZE, EOS, MAX_MODEL_LEN, VOCAB_SIZE, make_request
from tests.history_program import HistoryProgram


class SlowCompiler:
    """Compiles when it is told to go on."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.eos_token_ids, self.num_words = compiler.eos_token_ids, compiler.num_words
        self.goes_on = threading.Event()
        self.is_ready = True
        self._compiler = compiler

    def compile(self, grammar):
        assert self.goes_on.wait(300)
        return self._compiler.compile(grammar)


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s


class SteppedEngine:
    """An engine that this thread steps."""

    def __init__(self, path, memory: GrammarMemory | None = None, num_slots: int = 8) -> None:
        tokenizer = Tokenizer(write_byte_tokenizer(path))
        info = ModelInfo(
            name="history", path=str(path), max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,)
        )
        self.compiler = SlowCompiler(GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,)))
        self.clock = ManualClock()
        grammars = Grammars(self.compiler, memory=memory)
        program = HistoryProgram(vocab_size=VOCAB_SIZE, num_blocks=64, block_size=BLOCK_SIZE)
        config = SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=num_slots, eos_token_ids=(EOS,))
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
        deadline = time.monotonic() + 300
        while not all(request_id in self.ends for request_id in request_ids):
            assert time.monotonic() < deadline
            if not self.step():
                self.core.input_queue.wait(0.05)


@pytest.fixture
def engine(tmp_path):
    engine = SteppedEngine(tmp_path)
    yield engine
    engine.compiler.goes_on.set()


def held(**sampling: object) -> Request:
    return make_request(grammar=Grammar(GrammarKind.CHOICE, '["yes", "no"]'), max_tokens=20, ignore_eos=False, **sampling)


def test_others_go_on_while_a_grammar_compiles(engine):
    waiting, other = engine.submit(held()), engine.submit(make_request(max_tokens=30))
    engine.drive(other)
    assert engine.ends[other] == (FinishReason.LENGTH, None)
    assert waiting not in engine.ends
    engine.compiler.goes_on.set()
    engine.drive(waiting)
    assert engine.ends[waiting] == (FinishReason.STOP, None)
    assert engine.texts[waiting] in ("yes", "no")


def test_an_idle_engine_is_woken_when_a_grammar_is_compiled(engine):
    waiting = engine.submit(held())
    engine.step()
    assert not engine.step()
    threading.Timer(0.1, engine.compiler.goes_on.set).start()
    started = time.monotonic()
    engine.core.input_queue.wait(600)
    assert time.monotonic() - started < 500
    engine.drive(waiting)


def test_one_that_takes_too_long_fails_alone(engine, monkeypatch):
    monkeypatch.setattr("cloister.executor.grammar.COMPILE_WALL_S", 0.0)  # it waits, which takes no processor time
    waiting, other = engine.submit(held()), engine.submit(make_request(max_tokens=30))
    engine.drive(other)
    engine.clock.now_s += 6
    engine.drive(waiting)
    reason, error = engine.ends[waiting]
    assert reason is FinishReason.UNSUPPORTED
    assert "too long to compile" in error


def test_the_first_grammar_has_time_to_read_the_vocabulary(engine):
    engine.compiler.is_ready = False
    waiting, other = engine.submit(held()), engine.submit(make_request(max_tokens=30))
    engine.drive(other)
    for _ in range(3):
        engine.clock.now_s += 12
        engine.step()
    assert waiting not in engine.ends
    engine.compiler.goes_on.set()
    engine.drive(waiting)
    assert engine.ends[waiting] == (FinishReason.STOP, None)


def test_a_request_can_be_aborted_while_its_grammar_compiles(engine):
    waiting = engine.submit(held())
    engine.step()
    engine.core.input_queue.put(Abort(waiting))
    engine.drive(waiting)
    assert engine.ends[waiting][0] is FinishReason.ABORT
    engine.compiler.goes_on.set()
    engine.core.input_queue.wait(0.2)
    assert not engine.step() or waiting in engine.ends


def test_the_deadline_of_a_request_counts_from_its_arrival_while_its_grammar_compiles(engine):
    engine.compiler.is_ready = False
    waiting = engine.submit(held(timeout_s=60.0))
    for _ in range(5):
        engine.step()
        assert waiting not in engine.ends
        engine.clock.now_s += 12
    engine.drive(waiting)
    assert engine.ends[waiting][0] is FinishReason.TIMEOUT


def test_a_shutdown_ends_what_compiles(engine):
    waiting = engine.submit(held())
    engine.step()
    engine.core.input_queue.put(Shutdown(0.0))
    engine.drive(waiting)
    assert engine.ends[waiting][0] is FinishReason.ABORT
    for _ in range(5):
        engine.step()
    assert engine.core.is_done


def test_a_stop_string_and_a_stop_token_end_an_answer_before_its_grammar_does(engine):
    engine.compiler.goes_on.set()
    digits = Grammar(GrammarKind.REGEX, "[0-9]{30}")
    by_token = engine.submit(make_request(grammar=digits, max_tokens=40, stop_token_ids=tuple(b"56789"), temperature=1.0))
    by_text = engine.submit(make_request(grammar=digits, max_tokens=40, stop=tuple("01234"), temperature=1.0, seed=1))
    engine.drive(by_token, by_text)
    assert engine.ends[by_token] == engine.ends[by_text] == (FinishReason.STOP, None)
    assert set(engine.texts[by_token][:-1]) <= set("01234")
    assert set(engine.texts[by_text]) <= set("56789")


def test_log_probabilities_are_of_the_model_and_not_of_the_grammar(engine):
    engine.compiler.goes_on.set()
    request = held(logprobs=3)
    free = make_request(max_tokens=1, logprobs=3)
    outputs = {}
    for one in (request, free):
        engine.submit(one)
    give_up_s = time.monotonic() + 300
    while len(outputs) < 2:
        assert time.monotonic() < give_up_s
        brought = engine.core.step()
        for output in [] if brought is None else brought.outputs:
            if output.logprobs:
                outputs.setdefault(output.request_id, []).extend(output.logprobs)
        engine.core.input_queue.wait(0.01)
    assert outputs[request.request_id][0].top == outputs[free.request_id][0].top
    assert outputs[request.request_id][0].text in (b"y", b"n")
    assert SamplingParams().grammar is None
