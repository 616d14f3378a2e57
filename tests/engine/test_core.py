"""The step loop: what it does with messages, deadlines and faults."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest

from cloister.engine.channel import InputQueue
from cloister.engine.core import MAX_FAILURES_IN_ROW
from cloister.types.clock import VirtualClock
from cloister.types.errors import EngineError
from cloister.types.events import Abort, Arrived, Event, FrontMessage, Outputs, Scheduled, Shutdown, Stepped, Submit
from cloister.types.request import BeamSearch, FinishReason
from cloister.types.step import StepPlan
from tests.engine.replica import (
    MAX_MODEL_LEN,
    TRIGGER,
    VOCAB_SIZE,
    Replica,
    SteppedRunner,
    ended_events,
    ends,
    make_replica,
    make_request,
    texts,
)
from tests.history_program import greedy_continuation


def test_an_answer_is_what_the_model_says(model_path: Path) -> None:
    replica = make_replica(model_path)
    request = make_request("tell me", max_tokens=20)
    replica.core.input_queue.put(Submit(request))
    outputs, _ = replica.drive()
    assert [i for o in outputs for i in o.token_ids] == greedy_continuation(request.token_ids, 20, VOCAB_SIZE)


def test_a_request_that_can_never_run_is_told_why(model_path: Path) -> None:
    replica = make_replica(model_path)
    request = make_request("x" * (MAX_MODEL_LEN + 1), n=2)
    replica.core.input_queue.put(Submit(request))
    outputs, events = replica.drive()
    assert ends(outputs, request) == [FinishReason.REJECTED] * 2
    assert all(str(MAX_MODEL_LEN) in (o.error or "") for o in outputs)
    assert [e.last for e in ended_events(events, request)] == [False, True]


def test_an_aborted_request_gives_its_blocks_back_at_the_next_step(model_path: Path) -> None:
    replica = make_replica(model_path)
    request = make_request(max_tokens=100)
    replica.core.input_queue.put(Submit(request))
    for _ in range(5):
        replica.core.step()
    assert replica.scheduler.pool.num_used > 0
    replica.core.input_queue.put(Abort(request.request_id))
    brought = replica.core.step()
    assert brought is not None
    assert ends(brought.outputs, request) == [FinishReason.ABORT]
    assert replica.scheduler.pool.num_used == 0


def test_blocks_are_wiped_when_nothing_else_is_left_to_do(model_path: Path) -> None:
    replica = make_replica(model_path)
    replica.core.input_queue.put(Submit(make_request(max_tokens=30)))
    replica.drive()
    assert replica.scheduler.pool.num_free > 0
    assert not dirty_blocks(replica)


def test_every_step_says_how_full_the_engine_is(model_path: Path) -> None:
    replica = make_replica(model_path)
    replica.core.input_queue.put(Submit(make_request("x" * 20, max_tokens=3)))
    _, events = replica.drive()
    steps = [event for event in events if isinstance(event, Stepped)]
    assert [s.num_tokens for s in steps[:3]] == [20, 1, 1]
    assert all(s.num_total_blocks == replica.scheduler.pool.num_total for s in steps)
    assert steps[-1].num_running == steps[-1].num_used_blocks == 0


def test_a_step_tells_searches_that_wait_for_their_share_from_what_is_queued(model_path: Path) -> None:
    replica = make_replica(model_path, max_num_seqs=4)
    for _ in range(2):
        request = make_request(max_tokens=3, ignore_eos=False, beams=BeamSearch(width=2))
        replica.core.input_queue.put(Submit(request))
    _, events = replica.drive()
    steps = [event for event in events if isinstance(event, Stepped)]
    assert (steps[0].num_waiting, steps[0].num_held, steps[0].num_queued) == (1, 1, 0)
    assert (steps[-1].num_waiting, steps[-1].num_held) == (0, 0)


def test_a_request_is_told_of_before_the_step_that_computes_it(model_path: Path) -> None:
    told: list[Event] = []
    before_step: list[list[Event]] = []
    replica = make_replica(model_path, wrap=lambda r: SteppedRunner(r, before=lambda plan: before_step.append(list(told))))
    request = make_request(max_tokens=1)
    replica.core.input_queue.put(Submit(request))
    brought = replica.core.step(lambda outputs: told.extend(outputs.events))
    assert [type(e) for e in before_step[0]] == [Arrived, Scheduled]
    assert brought is not None
    assert not any(isinstance(e, Arrived | Scheduled) for e in brought.events)


class TestFaults:
    """A step that cannot be done ends its requests and nothing else."""

    @staticmethod
    def fail_on_trigger(plan: StepPlan) -> None:
        if any(new.token_ids[0] == TRIGGER for new in plan.arrivals):
            raise ValueError(f"the secret word is {bytes(plan.arrivals[0].token_ids[1:])!r}")

    def test_its_requests_end_with_an_error_and_the_engine_goes_on(
        self, model_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        replica = make_replica(model_path, wrap=lambda r: SteppedRunner(r, before=self.fail_on_trigger))
        doomed, fine = make_request([TRIGGER, *b"xylophone"], n=3), make_request("fine", max_tokens=20)
        with caplog.at_level(logging.DEBUG):
            replica.core.input_queue.put(Submit(doomed))
            outputs, events = replica.drive()
            replica.core.input_queue.put(Submit(fine))
            more, _ = replica.drive()
        assert ends(outputs, doomed) == [FinishReason.ERROR] * 3
        assert [e.last for e in ended_events(events, doomed)].count(True) == 1
        assert [i for o in more for i in o.token_ids] == greedy_continuation(fine.token_ids, 20, VOCAB_SIZE)
        assert "xylophone" not in caplog.text
        assert "xylophone" not in str([(o.error, o.text) for o in outputs])
        assert "ValueError" in caplog.text
        replica.scheduler.pool.check()
        assert replica.scheduler.pool.num_used == 0

    def test_answers_in_progress_end_too_and_no_block_is_lost(self, model_path: Path) -> None:
        replica = make_replica(model_path, wrap=lambda r: SteppedRunner(r, before=self.fail_on_trigger))
        running = [make_request(f"{i} bottles", max_tokens=50) for i in range(5)]
        for request in running:
            replica.core.input_queue.put(Submit(request))
        for _ in range(4):
            replica.core.step()
        replica.core.input_queue.put(Submit(make_request([TRIGGER])))
        outputs, _ = replica.drive()
        assert [ends(outputs, request) for request in running] == [[FinishReason.ERROR]] * 5
        replica.scheduler.pool.check()
        assert replica.scheduler.pool.num_used == 0

    def test_what_it_should_have_wiped_is_wiped_after_all(self, model_path: Path) -> None:
        replica = make_replica(model_path, wrap=lambda r: SteppedRunner(r, before=self.fail_on_trigger))
        leaving = make_request("a secret of some length", max_tokens=50)
        replica.core.input_queue.put(Submit(leaving))
        replica.core.step()
        replica.core.input_queue.put(Abort(leaving.request_id))
        replica.core.input_queue.put(Submit(make_request([TRIGGER])))
        replica.drive()
        assert not dirty_blocks(replica)

    def test_one_failure_now_and_then_is_survived(self, model_path: Path) -> None:
        replica = make_replica(model_path, wrap=lambda r: SteppedRunner(r, before=self.fail_on_trigger))
        for _ in range(2 * MAX_FAILURES_IN_ROW):
            for request in (make_request([TRIGGER]), make_request("fine")):
                replica.core.input_queue.put(Submit(request))
                outputs, _ = replica.drive()
                assert len(ends(outputs, request)) == 1

    def test_failures_in_a_row_end_the_engine(self, model_path: Path) -> None:
        def fail(plan: StepPlan) -> None:
            raise RuntimeError

        replica = make_replica(model_path, wrap=lambda r: SteppedRunner(r, before=fail))
        replies: list[FinishReason] = []
        for _ in range(MAX_FAILURES_IN_ROW):
            request = make_request()
            replica.core.input_queue.put(Submit(request))
            brought = replica.core.step()
            assert brought is not None
            replies += ends(brought.outputs, request)
        assert replies == [FinishReason.ERROR] * MAX_FAILURES_IN_ROW
        with pytest.raises(EngineError, match="in a row"):
            replica.core.step()


class TestShutdown:
    """What runs may end; what takes too long is aborted with a reply."""

    def test_running_requests_end_first(self, model_path: Path) -> None:
        replica = make_replica(model_path)
        request = make_request(max_tokens=30)
        replica.core.input_queue.put(Submit(request))
        replica.core.input_queue.put(Shutdown(60.0))
        outputs, _ = replica.drive()
        assert ends(outputs, request) == [FinishReason.LENGTH]
        assert replica.core.is_done

    def test_the_rest_is_aborted_with_a_reply(self, model_path: Path) -> None:
        clock = VirtualClock()
        replica = make_replica(model_path, wrap=lambda r: SteppedRunner(r, before=lambda plan: clock.advance(1.0)), clock=clock)
        request = make_request(max_tokens=100, timeout_s=1000.0)
        replica.core.input_queue.put(Submit(request))
        replica.core.input_queue.put(Shutdown(10.0))
        outputs, _ = replica.drive()
        assert ends(outputs, request) == [FinishReason.ABORT]
        assert outputs[-1].error
        assert 9 <= outputs[-1].num_output_tokens <= 11
        assert replica.core.is_done
        assert not dirty_blocks(replica)


class TestWaiting:
    """An engine with nothing to do sleeps, and wakes at once."""

    @pytest.fixture(autouse=True)
    def patient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An engine that nobody wakes sleeps for longer than a test lasts."""
        monkeypatch.setattr("cloister.engine.core.IDLE_WAIT_S", 600.0)

    def test_it_costs_next_to_nothing(self, model_path: Path) -> None:
        with Running(InputQueue(), model_path) as engine:
            engine.wait_until_it_sleeps()
            before_s = engine.processor_time_s()
            time.sleep(1.0)
            assert engine.processor_time_s() - before_s < 0.05

    def test_a_message_wakes_it_at_once(self, model_path: Path) -> None:
        with Running(InputQueue(), model_path) as engine:
            engine.wait_until_it_sleeps()
            assert engine.answers_within(60.0)

    def test_a_lost_wake_up_is_noticed(self, model_path: Path) -> None:
        with Running(ForgetfulInbox(), model_path) as engine:
            engine.wait_until_it_sleeps()
            assert not engine.answers_within(1.0)

    def test_a_deadline_wakes_it(self, model_path: Path) -> None:
        clock = VirtualClock()
        replica = make_replica(model_path, clock=clock)
        replica.core.input_queue.put(Submit(make_request("x" * 200, max_tokens=56, timeout_s=3.0)))
        replica.core.step()
        clock.advance(2.5)
        assert replica.core.patience_s() == pytest.approx(0.5)

    def test_a_request_past_its_deadline_is_told(self, model_path: Path) -> None:
        clock = VirtualClock()
        replica = make_replica(model_path, wrap=lambda r: SteppedRunner(r, before=lambda plan: clock.advance(1.0)), clock=clock)
        request = make_request(max_tokens=100, timeout_s=5.0)
        replica.core.input_queue.put(Submit(request))
        outputs, _ = replica.drive()
        assert ends(outputs, request) == [FinishReason.TIMEOUT]
        assert outputs[-1].error
        assert texts(outputs, request) != [""]


def dirty_blocks(replica: Replica) -> list[int]:
    """Returns the free blocks that still hold something."""
    pool = replica.scheduler.pool
    return [b for b in range(pool.num_total) if pool.is_free(b) and replica.program.slots[b].any()]


class ForgetfulInbox(InputQueue):
    """The planted fault: it takes messages and wakes nobody."""

    def put(self, message: FrontMessage) -> None:
        self._messages.append(message)


class Running:
    """An engine core that runs in a thread, with an input_queue of choice."""

    def __init__(self, input_queue: InputQueue, path: Path) -> None:
        self._core = make_replica(path).core
        self._core.input_queue = input_queue
        self._answered = threading.Event()
        self._thread = threading.Thread(target=self._core.run, args=(self._note,), daemon=True)

    def __enter__(self) -> Running:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        InputQueue.put(self._core.input_queue, Shutdown(0.0))
        self._thread.join(300)
        assert not self._thread.is_alive()

    def wait_until_it_sleeps(self) -> None:
        give_up_s = time.monotonic() + 300
        while not self._core.input_queue._arrived._waiters:  # type: ignore[attr-defined]
            assert time.monotonic() < give_up_s
            time.sleep(0.005)

    def processor_time_s(self) -> float:
        """Returns what its thread took: others of this process may have been left by other tests."""
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def answers_within(self, give_up_s: float) -> bool:
        """Sends a request of one token; returns whether it is answered in that time."""
        self._core.input_queue.put(Submit(make_request(max_tokens=1)))
        return self._answered.wait(give_up_s)

    def _note(self, outputs: Outputs) -> None:
        if any(o.finish_reason for o in outputs.outputs):
            self._answered.set()
