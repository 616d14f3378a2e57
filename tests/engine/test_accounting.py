"""Whatever clients, engine and front do, in any order: every sequence ends exactly once, no block is lost."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cloister.types.clock import VirtualClock
from cloister.types.events import Arrived, Ended, Event, FrontMessage
from cloister.types.request import FinishReason, Request, SequenceOutput
from cloister.types.step import StepPlan
from tests.engine.fake_transport import FakeTransport, opened_client
from tests.engine.replica import VOCAB_SIZE, SteppedRunner, make_replica, make_request
from tests.history_program import greedy_continuation
from tests.thinning import examples


class AtOnce(random.Random):
    """Draws no wait: a request that may have killed an engine is tried as soon as it can be."""

    def uniform(self, a: float, b: float) -> float:
        return a


class Accounting(RuleBasedStateMachine):
    """A client with a real engine behind it, which fails, is killed and comes back."""

    path: Path

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.events: list[Event] = []
        self.replies: dict[str, list[tuple[int, FinishReason]]] = {}
        self.requests: dict[str, Request] = {}
        self.left: set[str] = set()
        self.said: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        transport = FakeTransport()
        transport.send = self.pass_on  # type: ignore[method-assign]
        self.client = opened_client(transport, self.clock, max_waiting=6, max_num_seqs=4)
        self.client._draw = AtOnce()
        self.client.subscribe(self.events.append)
        self.loop = asyncio.new_event_loop()
        self.fails_next = False
        self.start_engine()

    def start_engine(self) -> None:
        self.replica = make_replica(
            self.path,
            wrap=lambda r: SteppedRunner(r, before=self.maybe_fail),
            clock=self.clock,
            max_num_seqs=4,
            num_blocks=10,
        )
        self.num_failed = 0

    def maybe_fail(self, plan: StepPlan) -> None:
        fails, self.fails_next = self.fails_next, False
        if fails:
            self.num_failed += 1
            raise RuntimeError

    def pass_on(self, message: FrontMessage) -> None:
        self.replica.core.input_queue.put(message)

    def take(self, output: SequenceOutput) -> None:
        self.said[output.request_id, output.index] += output.token_ids
        if output.finish_reason is not None:
            self.replies[output.request_id].append((output.index, output.finish_reason))

    def call(self, method: Callable[..., object], *values: object) -> None:
        """Calls a method of the client as the event loop does, and what it has the loop call at once."""

        async def run() -> None:
            method(*values)
            while self.client._trial is not None:
                await asyncio.sleep(0)

        self.loop.run_until_complete(asyncio.wait_for(run(), 30))

    @precondition(lambda self: self.client._requests.has_room())
    @rule(size=st.integers(0, 90), n=st.integers(1, 4), max_tokens=st.integers(0, 20), timeout_s=st.integers(1, 30))
    def submit(self, size: int, n: int, max_tokens: int, timeout_s: int) -> None:
        request = make_request([size] * size, n=n, max_tokens=max_tokens, timeout_s=float(timeout_s))
        self.requests[request.request_id] = request
        self.replies[request.request_id] = []
        self.call(self.client.submit, request, self.take)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(list(self.requests)))
        self.left.add(request_id)
        self.call(self.client.abort, request_id)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        self.call(self.client.expire, data.draw(st.sampled_from(list(self.requests))))

    @rule(num_steps=st.integers(1, 8))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.clock.advance(0.1)
            brought = self.replica.core.step()
            if brought is not None:
                self.call(self.client.receive, brought)

    @precondition(lambda self: self.num_failed < 2)
    @rule()
    def fail(self) -> None:
        self.fails_next = True

    @rule()
    def kill(self) -> None:
        self.client._requests.end_all("the engine died")
        assert len(self.client._requests) == 0
        self.start_engine()

    @rule()
    def resume(self) -> None:
        """Another engine takes over what the one that dies had."""
        self.client._requests.keep_resumable("the engine died")
        self.start_engine()
        for message in self.client._requests.take_due():
            self.pass_on(message)

    @invariant()
    def no_block_is_lost(self) -> None:
        self.replica.scheduler.pool.check()

    @invariant()
    def no_sequence_ends_twice(self) -> None:
        for request_id, replies in self.replies.items():
            assert len({index for index, _ in replies}) == len(replies)
            ended = [e.index for e in self.events if isinstance(e, Ended) and e.request_id == request_id]
            assert len(set(ended)) == len(ended)

    def teardown(self) -> None:
        """Lets everything end, then counts."""
        self.fails_next = False
        self.step(400)
        self.loop.close()
        assert len(self.client._requests) == 0
        assert self.replica.scheduler.pool.num_used == 0
        for request_id, request in self.requests.items():
            every_index = list(range(request.sampling.n))
            if request_id not in self.left:
                assert sorted(index for index, _ in self.replies[request_id]) == every_index
            for index, reason in self.replies[request_id]:
                whole = greedy_continuation(request.token_ids, request.sampling.max_tokens or 0, VOCAB_SIZE)
                said = self.said[request_id, index]
                assert said == (whole if reason is FinishReason.LENGTH else whole[: len(said)])
            ended = [e for e in self.events if isinstance(e, Ended) and e.request_id == request_id]
            assert sorted(e.index for e in ended) == every_index
            assert [e.last for e in ended] == [False] * (len(ended) - 1) + [True]
            assert sum(isinstance(e, Arrived) and e.request_id == request_id for e in self.events) == 1


TestAccounting = Accounting.TestCase
TestAccounting.settings = settings(max_examples=examples(25), stateful_step_count=40, deadline=None)


@pytest.fixture(autouse=True, scope="module")
def _tokenizer(model_path: Path) -> None:
    Accounting.path = model_path
