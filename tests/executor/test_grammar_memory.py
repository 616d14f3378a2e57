"""Memory of compiled grammars: bounded however many requests wait, shared by tenants, and never a reason to wait for ever."""

from __future__ import annotations

import json
import time

import pytest

from cloister.cluster.virtual.byte_tokenizer import write_byte_tokenizer
from cloister.executor import Grammars
from cloister.executor import grammar as grammar_module
from cloister.executor.grammar_memory import LEAST_BYTES, MIB, GrammarMemory, HeapMeter, NoMeter, estimate_bytes
from cloister.text import Tokenizer
from cloister.text.grammar import GrammarCompiler
from cloister.types.errors import InvalidRequestError
from cloister.types.events import Abort
from cloister.types.request import FinishReason, Grammar, GrammarKind, SamplingParams
from tests.engine.replica import EOS, VOCAB_SIZE, make_request
from tests.executor.test_grammar_engine import SteppedEngine
from tests.slow_grammars import SlowCompiler, Watch

LIMIT_BYTES = 8 * LEAST_BYTES


class CountingCompiler(SlowCompiler):
    """Compiles at once, and knows what."""

    def __init__(self):
        super().__init__(Watch(), 64)
        self.compiled = []

    def compile(self, grammar):
        self.compiled.append(grammar.source)
        return super().compile(grammar)


class Desk:
    """Grammars of requests that this thread opens and ends."""

    def __init__(self, limit_bytes=LIMIT_BYTES, meter=None):
        self.compiler = CountingCompiler()
        self.memory = GrammarMemory(limit_bytes, NoMeter() if meter is None else meter)
        self.grammars = Grammars(self.compiler, memory=self.memory)
        self.open = {}

    def send(self, *names, tenant=""):
        for name in names:
            self.open[name] = Grammar(GrammarKind.REGEX, name)
            self.grammars.prepare(self.open[name], lambda: None, tenant)
        self.settle()

    def settle(self):
        """Lets the thread that compiles do all that there is memory for, as an engine does in its steps."""
        num_waiting = -1
        while num_waiting != self.num_waiting:
            self.grammars._compiling.submit(int).result(300)
            num_waiting = self.num_waiting
            self.grammars.resume(self.open.values)
            self.grammars._compiling.submit(int).result(300)

    @property
    def num_waiting(self):
        return self.grammars._queue.num_waiting

    def is_ready(self, name):
        return self.grammars.prepare(self.open[name], lambda: None)


def test_grammars_are_compiled_ahead_only_for_as_many_requests_as_memory_has_room_for():
    desk = Desk()
    names = [f"g{number:02}" for number in range(20)]
    desk.send(*names)
    first = len(desk.compiler.compiled)
    assert 2 <= first < 8
    assert desk.memory.held_bytes <= LIMIT_BYTES
    for number, name in enumerate(names[: 20 - first]):
        assert len(desk.compiler.compiled) == first + number
        del desk.open[name]
        desk.settle()
    assert desk.compiler.compiled == names, "each once, in the order in which they came"


def test_a_tenant_that_floods_leaves_memory_to_others():
    desk = Desk()
    desk.send(*(f"f{number:02}" for number in range(50)), tenant="flood")
    num_flood = len(desk.compiler.compiled)
    desk.send("ann", tenant="ann")
    desk.send("bob", tenant="bob")
    assert desk.compiler.compiled[num_flood:] == ["ann", "bob"]
    assert desk.is_ready("ann")
    assert desk.is_ready("bob")
    del desk.open["ann"]
    desk.send("ann2", tenant="ann")
    assert desk.is_ready("ann2")


def test_grammars_that_wait_for_memory_are_not_given_up(monkeypatch):
    monkeypatch.setattr(grammar_module, "COMPILE_WALL_S", 0.0)
    desk = Desk()
    names = [f"g{number:02}" for number in range(20)]
    desk.send(*names)
    waiting = [name for name in names if not desk.is_ready(name)]
    assert len(waiting) > 10
    for _ in range(3):
        assert not any(desk.grammars.give_up(desk.open[name]) for name in waiting)
    while waiting:
        del desk.open[names.pop(0)]
        desk.settle()
        waiting = [name for name in waiting if not desk.is_ready(name)]
    assert len(desk.compiler.compiled) == 20


def test_grammars_that_no_open_request_needs_are_dropped_the_oldest_first():
    desk = Desk()
    desk.send("g0", "g1", "g2", "g3", "g4")
    assert len(desk.compiler.compiled) == 5
    kept = [desk.open.pop(name) for name in ("g1", "g2", "g3", "g4")]  # a caller in this process uses its parameters again
    desk.send("new")
    assert desk.is_ready("new")
    assert [id(grammar) in desk.grammars._compiled for grammar in kept] == [False, True, True, True]
    assert desk.is_ready("g0"), "its request is open"
    desk.open["again"] = kept[0]
    desk.grammars.prepare(kept[0], lambda: None)
    desk.settle()
    assert desk.is_ready("again")
    assert [id(grammar) in desk.grammars._compiled for grammar in kept] == [True, False, True, True]
    assert desk.compiler.compiled == ["g0", "g1", "g2", "g3", "g4", "new", "g1"]
    assert desk.memory.held_bytes <= LIMIT_BYTES


def test_requests_that_leave_while_they_wait_leave_nothing_behind():
    desk = Desk()
    desk.send("g0", "g1", "g2", "g3", "g4", "g5", "g6", "g7")
    before = len(desk.compiler.compiled)
    for number in range(100):
        desk.send(f"h{number}")
        del desk.open[f"h{number}"]
    desk.settle()
    assert len(desk.compiler.compiled) == before
    assert desk.num_waiting <= 8
    desk.open.clear()
    desk.settle()
    assert desk.memory.held_bytes == 0
    assert len(desk.grammars._compiled) == 0


def test_a_step_never_waits_for_memory():
    desk = Desk()
    desk.send(*(f"g{number}" for number in range(20)))
    late = desk.open["g19"]
    assert "g19" not in desk.compiler.compiled
    desk.grammars.open(late, SamplingParams(), [])
    assert "g19" in desk.compiler.compiled


class Scripted(HeapMeter):
    """Says what it is told to."""

    def __init__(self, *read):
        self._left = list(read)

    def read(self):
        return self._left.pop(0)

    def begin(self):
        return self.read()


def test_one_that_takes_too_much_is_refused_with_a_figure():
    desk = Desk(limit_bytes=100 * MIB, meter=Scripted(0, 40 * MIB, 0, 30 * MIB))
    desk.send("large")
    with pytest.raises(InvalidRequestError, match=r"takes 30 MiB of memory, and one may take 25") as caught:
        desk.grammars.open(desk.open["large"], SamplingParams(), [])
    assert "large" not in caught.value.message
    assert desk.memory.held_bytes == 0


def test_what_other_threads_allocate_meanwhile_refuses_none():
    desk = Desk(limit_bytes=100 * MIB, meter=Scripted(0, 40 * MIB, 0, 1 * MIB))
    desk.send("small")
    desk.grammars.open(desk.open["small"], SamplingParams(), [])
    assert desk.memory.held_bytes == 1 * MIB


def test_one_that_could_not_be_measured_counts_as_the_largest_of_its_tenant():
    memory, grammar = GrammarMemory(100 * MIB, Scripted(9 * MIB)), Grammar(GrammarKind.REGEX, "ab")
    assert memory.measure("ann", grammar, MIB) == 8 * MIB
    assert memory.measure("ann", grammar, None) == 8 * MIB
    assert memory.measure("bob", grammar, None) == estimate_bytes(grammar)


def test_the_meter_rests_after_a_reading_that_took_long(monkeypatch):
    watch, meter = Watch(), HeapMeter()
    monkeypatch.setattr("cloister.executor.grammar_memory.time.perf_counter", watch.now)

    def read():
        watch.now_s += 0.05
        return type("Heap", (), {"uordblks": 5, "hblkhd": 2})

    meter._read = read
    assert meter.begin() == 7
    assert meter.begin() is None
    watch.now_s += 2.0
    assert meter.begin() == 7


@pytest.mark.skipif(HeapMeter().read() is None, reason="this C library does not say what is allocated")
def test_compiled_schemas_are_counted_with_about_what_they_take(tmp_path):
    tokenizer = Tokenizer(write_byte_tokenizer(tmp_path))
    compiler = GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    compiler.compile(Grammar(GrammarKind.JSON_OBJECT, ""))
    memory = GrammarMemory()
    grammars = Grammars(compiler, memory=memory)
    schema = {"type": "object", "properties": {f"property{i}": {"type": "string", "maxLength": 9} for i in range(900)}}
    forms = [Grammar(GrammarKind.JSON_SCHEMA, json.dumps({**schema, "title": str(i)})) for i in range(3)]
    for form in forms:
        grammars.prepare(form, lambda: None)
        grammars.open(form, SamplingParams(), [])
    assert 3 * 2 * MIB < memory.held_bytes < 3 * 12 * MIB
    del forms, form
    assert memory.held_bytes == 0


class CrowdedEngine(SteppedEngine):
    """An engine with memory for a few grammars."""

    def __init__(self, path, num_slots):
        self.memory = GrammarMemory(LIMIT_BYTES, NoMeter())
        super().__init__(path, self.memory, num_slots)
        self.compiler.goes_on.set()
        self.reasons = {}
        self.most_bytes = 0

    def send(self, **sampling):
        grammar = Grammar(GrammarKind.REGEX, "(yes|no)[a-f]{40}")
        return self.submit(make_request(grammar=grammar, max_tokens=60, ignore_eos=False, **sampling))

    def step(self):
        brought = self.core.step()
        self.most_bytes = max(self.most_bytes, self.memory.held_bytes)
        for output in [] if brought is None else brought.outputs:
            if output.finish_reason is not None:
                assert (output.request_id, output.index) not in self.reasons, "it ended twice"
                self.reasons[output.request_id, output.index] = output.finish_reason
        return brought is not None

    def finish(self, num_ends):
        until_s = time.monotonic() + 300
        while len(self.reasons) < num_ends:
            assert time.monotonic() < until_s
            if not self.step():
                self.core.input_queue.wait(0.01)


@pytest.mark.parametrize("num_slots", [1, 8])
def test_all_requests_end_once_however_many_wait_for_memory(tmp_path, num_slots):
    engine = CrowdedEngine(tmp_path, num_slots)
    for number in range(30):
        engine.send(n=1 + number % min(3, num_slots))
    for _ in range(20):
        engine.step()
        engine.clock.now_s += 1.0  # some wait for longer than a compilation may take
    engine.finish(30 if num_slots == 1 else 60)
    assert set(engine.reasons.values()) == {FinishReason.STOP}
    assert engine.most_bytes <= LIMIT_BYTES


def test_a_request_that_waits_for_memory_can_be_aborted_and_the_next_one_gets_it(tmp_path):
    engine = CrowdedEngine(tmp_path, 1)
    names = [engine.send() for _ in range(20)]
    engine.step()
    for name in names[5:19]:
        engine.core.input_queue.put(Abort(name))
    engine.finish(20)
    assert sum(reason is FinishReason.ABORT for reason in engine.reasons.values()) == 14
    assert engine.reasons[names[19], 0] is FinishReason.STOP
