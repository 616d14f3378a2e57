"""Every sequence gets one end, and the listeners one event for it, whatever the engine does."""

from __future__ import annotations

from collections import Counter

import pytest

from cloister.engine.desk import Desk
from cloister.engine.ends import end_output
from cloister.types.clock import VirtualClock
from cloister.types.errors import EngineError, InvalidRequestError, QueueFullError
from cloister.types.events import Abort, Arrived, Ended, Event, FrontMessage, Outputs, Scheduled, Stepped, Submit
from cloister.types.request import FinishReason, Request, SequenceOutput
from tests.engine.replica import make_request


class Front:
    """A desk, what it sent to its engine, and what came out at the other side."""

    def __init__(self, max_waiting: int = 4, max_num_seqs: int = 2) -> None:
        self.clock = VirtualClock()
        self.sent: list[FrontMessage] = []
        self.events: list[Event] = []
        self.outputs: list[SequenceOutput] = []
        self.desk = Desk(self.sent.append, self.clock, max_waiting=max_waiting, max_num_seqs=max_num_seqs)
        self.desk.subscribe(self.events.append)

    def submit(self, n: int = 1) -> Request:
        request = make_request(n=n)
        self.desk.submit(request, self.outputs.append)
        return request

    def start(self, request: Request) -> None:
        """The engine schedules a request."""
        id_, now_s = request.request_id, self.clock.now()
        scheduled = Scheduled(id_, now_s, 0.0, num_cached_tokens=3, num_prompt_tokens=16)
        self.desk.deliver(Outputs([], [Arrived(id_, now_s, 16), scheduled]))

    def end(self, request: Request, index: int = 0, last: bool = True) -> None:
        """The engine ends a sequence."""
        ended = Ended(
            request_id=request.request_id,
            seq_id=9,
            index=index,
            now_s=self.clock.now(),
            reason=FinishReason.LENGTH,
            num_prompt_tokens=16,
            num_output_tokens=5,
            num_cached_tokens=3,
            arrival_s=0.0,
            first_token_s=0.0,
            last=last,
        )
        self.desk.deliver(Outputs([end_output(ended)], [ended]))

    def ends(self, request: Request) -> list[tuple[int, FinishReason]]:
        mine = [e for e in self.events if isinstance(e, Ended) and e.request_id == request.request_id]
        replies = [o for o in self.outputs if o.request_id == request.request_id and o.finish_reason is not None]
        assert [(e.index, e.reason) for e in mine] == [(o.index, o.finish_reason) for o in replies]
        assert [e.last for e in mine[:-1]] == [False] * (len(mine) - 1)
        return [(e.index, e.reason) for e in mine]


def test_an_engine_that_dies_ends_each_unfinished_sequence_once() -> None:
    front = Front()
    request = front.submit(n=2)
    front.start(request)
    front.end(request, index=1, last=False)
    front.desk.fail_all("the engine died")
    front.desk.fail_all("the engine died")
    assert front.ends(request) == [(1, FinishReason.LENGTH), (0, FinishReason.ERROR)]
    assert front.events[-1].num_cached_tokens == 3
    assert front.desk.num_in_flight == 0


def test_a_request_that_never_reached_the_engine_still_arrives_and_ends_in_the_events() -> None:
    front = Front()
    request = front.submit()
    front.desk.fail_all("the engine died")
    assert Counter(type(event) for event in front.events) == {Arrived: 1, Ended: 1}
    assert front.ends(request) == [(0, FinishReason.ERROR)]


def test_what_the_engine_says_after_the_end_is_dropped() -> None:
    front = Front()
    request = front.submit()
    front.start(request)
    front.desk.give_up(request.request_id)
    assert isinstance(front.sent[-1], Abort)
    front.end(request)
    assert front.ends(request) == [(0, FinishReason.TIMEOUT)]


def test_a_sequence_that_the_engine_ends_twice_ends_once() -> None:
    front = Front()
    request = front.submit(n=2)
    front.start(request)
    front.end(request, index=1, last=False)
    front.end(request, index=1, last=False)
    front.end(request, index=0)
    front.end(request, index=0)
    assert front.ends(request) == [(1, FinishReason.LENGTH), (0, FinishReason.LENGTH)]


def test_an_abandoned_request_stays_accounted_for_until_the_engine_ended_it() -> None:
    front = Front()
    request = front.submit()
    front.desk.abandon(request.request_id)
    front.desk.abandon(request.request_id)
    assert [type(message) for message in front.sent] == [Submit, Abort]
    assert front.desk.num_in_flight == 1
    front.desk.fail_all("the engine died")
    assert [e.reason for e in front.events if isinstance(e, Ended)] == [FinishReason.ABORT]
    assert front.outputs == []


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    front = Front(max_waiting=4, max_num_seqs=2)
    running = [front.submit() for _ in range(6)][:2]
    for request in running:
        front.start(request)
    with pytest.raises(QueueFullError) as refusal:
        front.submit()
    assert refusal.value.retry_after_s == 1.0
    assert front.desk.num_waiting == 4


def test_the_wait_is_estimated_from_recent_completions() -> None:
    front = Front(max_waiting=4, max_num_seqs=2)
    for _ in range(4):
        request = front.submit()
        front.start(request)
        front.clock.advance(10.0)
        front.end(request)
    for request in [front.submit() for _ in range(6)][:2]:
        front.start(request)
    with pytest.raises(QueueFullError) as refusal:
        front.submit()
    assert 10.0 < refusal.value.retry_after_s < 20.0


def test_slots_do_not_count_while_the_engine_leaves_requests_waiting() -> None:
    front = Front(max_waiting=1, max_num_seqs=8)
    first = front.submit()
    front.start(first)
    front.desk.deliver(Outputs([], [Stepped(0.0, 0.1, 1, 1, 1, 1, 8, 0, 8)]))
    front.submit()
    with pytest.raises(QueueFullError):
        front.submit()


def test_without_a_queue_an_idle_engine_still_takes_what_it_can_run() -> None:
    front = Front(max_waiting=0, max_num_seqs=2)
    for _ in range(2):
        front.submit()
    with pytest.raises(QueueFullError):
        front.submit()


def test_an_id_in_use_is_refused_and_harms_nobody() -> None:
    front = Front()
    request = front.submit()
    with pytest.raises(InvalidRequestError):
        front.desk.submit(request, front.outputs.append)
    front.start(request)
    front.end(request)
    assert front.ends(request) == [(0, FinishReason.LENGTH)]


def test_a_closed_desk_says_why() -> None:
    front = Front()
    front.desk.closed = "it restarts"
    with pytest.raises(EngineError, match="it restarts"):
        front.submit()


def test_a_listener_that_fails_keeps_no_answer_back() -> None:
    front = Front()

    def fail(event: Event) -> None:
        raise RuntimeError

    front.desk.subscribe(fail)
    request = front.submit()
    front.start(request)
    front.end(request)
    assert front.ends(request) == [(0, FinishReason.LENGTH)]
