"""The client of an engine: every sequence gets one end, and the listeners one event for it, whatever the engine does."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import pytest

from cloister.engine import EngineClient, Supervision
from cloister.engine.cache_reports import CacheReport
from cloister.engine.in_flight import NO_ANSWER, EngineStats
from cloister.engine.request_client import GRACE_S
from cloister.types.clock import VirtualClock
from cloister.types.config import EngineConfig
from cloister.types.errors import EngineError, InvalidRequestError, QueueFullError
from cloister.types.events import (
    Abort,
    Arrived,
    CacheReply,
    Ended,
    Event,
    FrontMessage,
    InspectCache,
    LoadAdapter,
    Outputs,
    Progressed,
    Scheduled,
    Stepped,
    Submit,
    end_output,
)
from cloister.types.images import MAX_REQUEST_PIXELS_BYTES, ImageTile
from cloister.types.request import KEYLESS_TENANT, BeamSearch, FinishReason, Request, SequenceOutput
from cloister.types.scope import LOCAL_SCOPE
from tests.engine.fake_transport import MODEL, FakeTransport, opened_client
from tests.engine.replica import make_request
from tests.virtual_time import run


class Front:
    """A client, what it sent to its engine, and what came out at the other side."""

    def __init__(self, max_waiting: int = 4, max_num_seqs: int = 2) -> None:
        self.clock = VirtualClock()
        self.events: list[Event] = []
        self.outputs: list[SequenceOutput] = []
        transport = FakeTransport()
        self.sent: list[FrontMessage] = transport.sent
        self.client = opened_client(transport, self.clock, max_waiting=max_waiting, max_num_seqs=max_num_seqs)
        self.client.subscribe(self.events.append)

    def submit(
        self, n: int = 1, images: tuple[ImageTile, ...] = (), beams: BeamSearch | None = None, tenant: str = KEYLESS_TENANT
    ) -> Request:
        request = msgspec.structs.replace(make_request(n=n, beams=beams), images=images, tenant=tenant)
        self.client.submit(request, self.outputs.append)
        return request

    def start(self, request: Request) -> None:
        """The engine schedules a request."""
        id_, now_s = request.request_id, self.clock.now()
        scheduled = Scheduled(id_, now_s, 0.0, num_cached_tokens=3, num_prompt_tokens=16)
        self.client.receive(Outputs([], [Arrived(id_, now_s, 16), scheduled]))

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
        self.client.receive(Outputs([end_output(ended)], [ended]))

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
    front.client._requests.end_all("the engine died")
    front.client._requests.end_all("the engine died")
    assert front.ends(request) == [(1, FinishReason.LENGTH), (0, FinishReason.ERROR)]
    assert front.events[-1].num_cached_tokens == 3
    assert len(front.client._requests) == 0


def test_a_request_that_never_reached_the_engine_still_arrives_and_ends_in_the_events() -> None:
    front = Front()
    request = front.submit()
    front.client._requests.end_all("the engine died")
    assert Counter(type(event) for event in front.events) == {Arrived: 1, Ended: 1}
    assert front.ends(request) == [(0, FinishReason.ERROR)]


def test_what_the_engine_says_after_the_end_is_dropped() -> None:
    front = Front()
    request = front.submit()
    front.start(request)
    front.client.expire(request.request_id)
    assert isinstance(front.sent[-1], Abort)
    front.end(request)
    assert front.ends(request) == [(0, FinishReason.TIMEOUT)]


def test_first_tokens_of_a_step_come_before_the_tokens_of_other_requests_whose_order_stays() -> None:
    front = Front()
    old, other, new = (front.submit() for _ in range(3))
    for first in (True, False):
        front.outputs.clear()
        outputs = [
            SequenceOutput(request_id=each.request_id, index=0, text=text, token_ids=[number])
            for each, text, number in ((old, "a", 1), (other, "b", 2), (new, "c", 3), (new, "d", 4))
        ]
        front.client.receive(Outputs(outputs, [Progressed(new.request_id, 3, 0, 0.0, num_tokens=2, first=first)]))
        assert [output.text for output in front.outputs] == (["c", "d", "a", "b"] if first else ["a", "b", "c", "d"])


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
    front.client.abort(request.request_id)
    front.client.abort(request.request_id)
    assert [type(message) for message in front.sent] == [Submit, Abort]
    assert len(front.client._requests) == 1
    front.client._requests.end_all("the engine died")
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
    assert front.client._requests.num_waiting == 4


def test_a_tenant_that_floods_leaves_places_of_the_queue_for_others() -> None:
    front = Front(max_waiting=16, max_num_seqs=1)
    flood = [front.submit(tenant="flood")]
    front.start(flood[0])
    for _ in range(3):
        while front.client._requests.num_waiting < 12:  # three times what is free
            flood.append(front.submit(tenant="flood"))
        with pytest.raises(QueueFullError, match="this key's tenant") as refusal:
            front.submit(tenant="flood")
        assert refusal.value.retry_after_s > 0.0
        front.end(flood.pop(0))  # what becomes free is the flood's again, and no more
        front.start(flood[0])
    waiting = [front.submit(tenant="another") for _ in range(3)]
    assert front.client._requests.num_waiting == 14
    with pytest.raises(QueueFullError, match="this key's tenant"):
        front.submit(tenant="flood")
    front.submit(tenant="a third one")
    assert all(front.client.find(request.request_id) is not None for request in waiting)


def test_a_tenant_has_all_slots_and_the_whole_queue_where_all_have_one_name() -> None:
    front = Front(max_waiting=0, max_num_seqs=3)
    for _ in range(3):
        front.submit(tenant="alone")
    front = Front(max_waiting=4, max_num_seqs=1)
    for _ in range(5):
        front.submit()
    assert front.client._requests.num_waiting == 5


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
    front.client.receive(Outputs([], [Stepped(0.0, 0.1, 1, 1, 1, 1, 8, 0, 8)]))
    front.submit()
    with pytest.raises(QueueFullError):
        front.submit()


def test_without_a_queue_an_idle_engine_still_takes_what_it_can_run() -> None:
    front = Front(max_waiting=0, max_num_seqs=2)
    for _ in range(2):
        front.submit()
    with pytest.raises(QueueFullError):
        front.submit()


def test_searches_that_wait_for_their_share_do_not_close_the_door_while_slots_are_free() -> None:
    front = Front(max_waiting=1, max_num_seqs=4)
    running, _held = front.submit(), front.submit()
    front.start(running)
    step = Stepped(0.0, 0.1, 1, 1, num_running=2, num_waiting=1, num_used_blocks=3, num_cached_blocks=0, num_total_blocks=8,
                   num_held=1)  # fmt: skip
    front.client.receive(Outputs([], [step]))
    assert (front.client.snapshot().num_queued, front.client.snapshot().num_slots) == (0, 4)
    for _ in range(3):  # what waits for a search counts as waiting, beside three free slots
        assert front.client.snapshot().is_accepting
        front.submit()
    with pytest.raises(QueueFullError):
        front.submit()
    front.client.receive(Outputs([], [msgspec.structs.replace(step, num_waiting=2)]))
    assert front.client.snapshot().num_slots == 2
    assert not front.client.snapshot().is_accepting


def test_searches_that_wait_for_their_share_are_no_load_for_who_is_no_search() -> None:
    front = Front(max_waiting=8, max_num_seqs=4)
    running, *held = [front.submit(beams=BeamSearch(width=2)) for _ in range(3)]
    front.start(running)
    step = Stepped(0.0, 0.1, 1, 1, num_running=2, num_waiting=2, num_used_blocks=3, num_cached_blocks=0, num_total_blocks=8,
                   num_held=2)  # fmt: skip
    front.client.receive(Outputs([], [step]))
    plain = front.submit()
    found = front.client.snapshot()
    assert (found.num_requests, found.num_waiting, found.num_queued, found.num_held) == (4, 3, 0, 2)
    assert found.num_held_tokens == sum(len(request.token_ids) for request in held)
    met = found.without_held()
    assert (met.num_requests, met.num_waiting, met.num_held) == (2, 1, 0)
    assert met.num_pending_tokens == len(running.token_ids) + len(plain.token_ids)
    assert [each.request_id for each in front.client.request_snapshots() if each.is_held] == [r.request_id for r in held]
    for request in held:  # no step follows
        front.end(request)
    assert (front.client.snapshot().num_held, front.client.snapshot().num_waiting) == (0, 1)


def test_an_engine_without_requests_has_no_load_whatever_its_last_step_left() -> None:
    front = Front(max_waiting=0, max_num_seqs=2)
    running, waiting = front.submit(), front.submit()
    front.start(running)
    front.client.receive(Outputs([], [Stepped(0.0, 0.1, 1, 1, num_running=1, num_waiting=1, num_used_blocks=3,
                                              num_cached_blocks=0, num_total_blocks=8)]))  # fmt: skip
    assert front.client.snapshot().num_queued == 1
    for request in (running, waiting):  # no step follows
        front.end(request)
    idle = front.client.snapshot()
    assert (idle.num_queued, idle.num_slots, idle.num_used_blocks, idle.num_total_blocks) == (0, 2, 0, 8)
    front.submit()  # there is no queue, and both slots are free


def test_the_pixels_of_all_requests_together_are_bounded() -> None:
    front = Front()
    half = bytes(MAX_REQUEST_PIXELS_BYTES // 2)
    tiles = tuple(ImageTile(offset=i, num_tokens=1, digest=b"", pixels=half) for i in range(3))
    with pytest.raises(InvalidRequestError, match="128 MiB"):
        front.submit(images=tiles)
    requests = [front.submit(images=tiles[:2]) for _ in range(2)]
    with pytest.raises(QueueFullError, match="images"):
        front.submit(images=tiles[:1])
    front.submit()
    front.start(requests[0])
    front.end(requests[0])
    front.submit(images=tiles[:2])


def test_an_id_in_use_is_refused_and_harms_nobody() -> None:
    front = Front()
    request = front.submit()
    with pytest.raises(InvalidRequestError):
        front.client.submit(request, front.outputs.append)
    front.start(request)
    front.end(request)
    assert front.ends(request) == [(0, FinishReason.LENGTH)]


def test_a_client_that_takes_nothing_says_why() -> None:
    front = Front()
    front.client.closed = "it restarts"
    with pytest.raises(EngineError, match="it restarts"):
        front.submit()


def test_a_listener_that_fails_keeps_no_answer_back() -> None:
    front = Front()

    def fail(event: Event) -> None:
        raise RuntimeError

    front.client.subscribe(fail)
    request = front.submit()
    front.start(request)
    front.end(request)
    assert front.ends(request) == [(0, FinishReason.LENGTH)]


def test_a_request_that_the_engine_never_ends_is_ended_here_after_its_deadline_and_some_time() -> None:
    async def wait() -> tuple[float, list[SequenceOutput]]:
        client = EngineClient(FakeTransport(), EngineConfig())
        await client.start()
        request = make_request(timeout_s=5.0)
        outputs = [output async for output in client.generate(request)]
        return asyncio.get_running_loop().time(), outputs

    ended_s, outputs = run(wait())
    assert ended_s == pytest.approx(5.0 + GRACE_S)
    assert [(output.finish_reason, output.error) for output in outputs] == [(FinishReason.TIMEOUT, NO_ANSWER)]


def test_an_observer_hears_of_its_own_request_until_its_end_by_either_side() -> None:
    class Observer:
        def __init__(self) -> None:
            self.stats = EngineStats()
            self.refusals = 0
            self.events: list[Event] = []

        def refuse(self) -> None:
            self.refusals += 1

        def observe(self, event: Event) -> None:
            self.events.append(event)
            raise RuntimeError  # its fault keeps no answer back

    front, observer = Front(), Observer()
    other, request = front.submit(), make_request(n=2)
    front.client.submit(request, front.outputs.append, observer)
    for one in (other, request):
        front.start(one)
    front.end(request, index=1, last=False)
    front.client._requests.end_all("the engine died")
    assert [type(event) for event in observer.events] == [Arrived, Scheduled, Ended, Ended]
    assert [event.last for event in observer.events if isinstance(event, Ended)] == [False, True]
    assert observer.stats.reasons == ["length", "error"]
    assert observer.stats.num_cached_tokens == 3
    assert front.ends(other) == [(0, FinishReason.ERROR)]
    assert observer.refusals == 0
    front.client.closed = "it restarts"
    with pytest.raises(EngineError):
        front.client.submit(make_request(), front.outputs.append, observer)
    assert observer.refusals == 1


def test_a_call_about_an_adapter_is_refused_at_once_while_the_engine_is_away() -> None:
    async def ask() -> float:
        transport = FakeTransport()
        client = EngineClient(transport, EngineConfig())
        await client.start()
        client.closed = "it restarts"
        with pytest.raises(EngineError, match="it restarts"):
            await client.adapters.load("ann", "somewhere")
        assert not any(isinstance(message, LoadAdapter) for message in transport.sent)
        return asyncio.get_running_loop().time()

    assert run(ask()) == 0.0


def test_an_engine_that_does_not_answer_in_time_or_is_closed_is_named_and_what_it_says_later_is_dropped() -> None:
    front = Front()
    assert asyncio.run(front.client.inspect_cache(LOCAL_SCOPE, drop=True, timeout_s=0.01)) == CacheReport([], [0])
    asked = front.sent[-1]
    assert isinstance(asked, InspectCache)
    assert asked.drop
    front.client.receive(Outputs([], [], [CacheReply(asked.call_id, [])]))
    front.client.closed = "the engine is being restarted"
    assert asyncio.run(front.client.inspect_cache(LOCAL_SCOPE)) == CacheReport([], [0])


def test_a_request_that_waits_for_an_engine_to_start_ends_at_its_deadline() -> None:
    class Slow(FakeTransport):
        supervision = Supervision()

        async def open(self, config: EngineConfig) -> None:
            await asyncio.sleep(GRACE_S / 2)

    async def main() -> None:
        client = EngineClient(Slow(), EngineConfig())
        client.begin_resting(MODEL)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        outputs = [output async for output in client.generate(msgspec.structs.replace(make_request(), timeout_s=1.0))]
        assert [output.finish_reason for output in outputs] == [FinishReason.TIMEOUT]
        assert loop.time() - began_s == pytest.approx(1.0, abs=0.1)
        await client.drain(0.0)

    run(main())


def test_a_request_that_comes_to_an_engine_that_starts_after_its_deadline_ends_at_once() -> None:
    class Slow(FakeTransport):
        supervision = Supervision()

        async def open(self, config: EngineConfig) -> None:
            await asyncio.sleep(GRACE_S / 2)

    async def main() -> None:
        clock = VirtualClock()
        client = EngineClient(FakeTransport(), EngineConfig(), clock=clock)
        other = EngineClient(Slow(), EngineConfig(), clock=clock)
        await client.start()
        other.begin_resting(MODEL)
        outputs: list[SequenceOutput] = []
        for request_id, timeout_s in (("late", 1.0), ("not late", 5.0)):
            request = msgspec.structs.replace(make_request(), request_id=request_id, timeout_s=timeout_s)
            client.submit(request, outputs.append)
        clock.advance(1.0)
        for request_id in ("late", "not late"):
            found = client.detach_request(request_id)
            assert found is not None
            other.adopt(found)
        assert [(output.request_id, output.finish_reason) for output in outputs] == [("late", FinishReason.TIMEOUT)]
        assert [snapshot.request_id for snapshot in other.request_snapshots()] == ["not late"]
        for each in (client, other):
            await each.drain(0.0)

    run(main())


def test_a_request_whose_engine_is_lost_after_its_deadline_ends_at_once() -> None:
    front = Front()
    request = front.submit()
    front.start(request)
    front.clock.advance(request.timeout_s - 0.1)
    assert front.client._requests.keep_resumable("the engine died") == 1
    front.clock.advance(0.1)
    assert front.client._requests.keep_resumable("the engine died") == 0
    assert front.ends(request) == [(0, FinishReason.TIMEOUT)]
