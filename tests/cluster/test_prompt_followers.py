"""Where an answer will go on is told to load the KV of its prompt, and told when the request does not come."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from cloister.cluster import ROUTERS, ReplicaSet
from cloister.cluster.prompt_followers import MAX_FOLLOWED
from cloister.cluster.replica_states import ClusterConfig
from cloister.cluster.routers import Router, RouterContext
from cloister.engine.replica_snapshot import Role
from cloister.engine.supervision import Supervision
from cloister.kv import PrefixKeys
from cloister.types.clock import VirtualClock
from cloister.types.events import (
    Arrived,
    CancelPrefetch,
    Ended,
    Event,
    Outputs,
    PrefetchKV,
    PrefillDone,
    Progressed,
    Ready,
    Scheduled,
    Submit,
)
from cloister.types.request import FinishReason, ModelInfo, Request, SamplingParams, SequenceOutput
from tests.engine.fake_transport import MODEL, FakeTransport, opened_client

PROMPT = list(range(100))


def make_router(model: ModelInfo) -> Router:
    return ROUTERS.get("least_load")(RouterContext(PrefixKeys(model.fingerprint, 16), random.Random(0)))


class Front:
    """A replica set whose engines say what the test says."""

    def __init__(self, roles: tuple[Role, ...] = ("prefill", "decode", "decode")) -> None:
        self.transports = [FakeTransport() for _ in roles]
        clock = VirtualClock(10.0)
        for index, transport in enumerate(self.transports):
            transport.supervision = Supervision()
            transport.ready = Ready(MODEL, [], kv_endpoint=f"unix:{index}")
        self.clients = [opened_client(transport, clock) for transport in self.transports]
        self.cluster = ReplicaSet(self.clients, make_router, ClusterConfig(roles), 16, clock=clock)
        self.cluster.connect_routers()
        self.outputs: list[SequenceOutput] = []

    def submit(self, name: str = "r") -> None:
        request = Request(request_id=name, token_ids=PROMPT, sampling=SamplingParams(max_tokens=8))
        self.cluster.submit(request, self.outputs.append)

    def schedule(self, name: str = "r", index: int = 0) -> None:
        """The engine says that it has begun with the prompt."""
        events: list[Event] = [Arrived(name, 10.0, len(PROMPT)), Scheduled(name, 10.0, 0.0, 0, len(PROMPT))]
        self.clients[index].receive(Outputs([], events))

    def begin(self, name: str = "r") -> None:
        self.submit(name)
        self.schedule(name)

    def finish_prompt(self, name: str = "r") -> None:
        output = SequenceOutput(request_id=name, index=0, token_ids=[7])
        events: list[Event] = [Progressed(name, 0, 0, 10.0, 1, first=True), PrefillDone(name, 10.0, (0,), 0)]
        self.clients[0].receive(Outputs([output], events))

    def end(self, name: str, index: int) -> None:
        ended = Ended(name, 0, 0, 10.0, FinishReason.ERROR, len(PROMPT), 0, 0, 10.0, None, last=True, error="x")
        output = SequenceOutput(request_id=name, index=0, finish_reason=FinishReason.ERROR, error="x")
        self.clients[index].receive(Outputs([output], [ended]))

    def lose(self, index: int) -> None:
        self.clients[index]._stop_accepting()
        self.clients[index]._note_end()
        self.clients[index]._let_go()

    def sent(self, kind: type[Any], index: int) -> list[Any]:
        return [message for message in self.transports[index].sent if isinstance(message, kind)]

    def where(self, kind: type[Any]) -> list[int]:
        """Returns the replicas that got such messages."""
        return [index for index in range(len(self.transports)) for _ in self.sent(kind, index)]


def test_the_replica_of_the_answer_loads_the_prompt_from_when_it_is_begun() -> None:
    front = Front()
    front.submit()
    assert not front.where(PrefetchKV), "a prompt that waits holds nothing elsewhere"
    front.schedule()
    ((target,), (prefetch,)) = front.where(PrefetchKV), front.sent(PrefetchKV, 1) + front.sent(PrefetchKV, 2)
    assert (prefetch.follows, prefetch.source.endpoint, prefetch.token_ids) == (True, "unix:0", PROMPT)
    front.finish_prompt()
    (submit,) = front.sent(Submit, target)
    assert submit.kv_source.endpoint == "unix:0"
    assert front.cluster.num_followed == 0
    assert not front.where(CancelPrefetch)


def test_prompts_that_are_computed_together_are_followed_by_different_replicas() -> None:
    front = Front()
    front.begin("a")
    front.begin("b")
    assert front.where(PrefetchKV) == [1, 2]


def test_a_replica_whose_links_are_half_busy_with_prompts_is_given_no_more_of_them() -> None:
    front = Front()
    names = [f"r{number}" for number in range(MAX_FOLLOWED + 1)]
    for name in names:
        front.begin(name)
    assert len(front.where(PrefetchKV)) == front.cluster.num_followed == MAX_FOLLOWED
    front.cluster.abort(names[0])
    front.begin("another")
    assert front.cluster.num_followed == MAX_FOLLOWED
    front.finish_prompt(names[-1])
    assert front.where(Submit)[-1] in (1, 2), "it loads behind its first token"


def leave(front: Front) -> None:
    front.cluster.abort("r")


def fail(front: Front) -> None:
    front.end("r", 0)


def lose_source(front: Front) -> None:
    front.lose(0)


@pytest.mark.parametrize("happen", [leave, fail, lose_source])
def test_a_follower_is_told_that_the_request_does_not_come(happen: Callable[[Front], None]) -> None:
    front = Front()
    front.begin()
    happen(front)
    assert front.where(CancelPrefetch) == front.where(PrefetchKV)
    assert front.cluster.num_followed == 0


def test_a_request_whose_follower_is_lost_goes_on_elsewhere_and_loads_there() -> None:
    front = Front()
    front.begin()
    (target,) = front.where(PrefetchKV)
    front.lose(target)
    assert front.cluster.num_followed == 0
    front.finish_prompt()
    (submit,) = front.sent(Submit, 3 - target)
    assert submit.kv_source.endpoint == "unix:0"


def test_a_request_whose_follower_is_drained_goes_on_elsewhere_and_the_follower_is_told() -> None:
    front = Front()
    front.begin()
    (target,) = front.where(PrefetchKV)
    front.cluster._states.draining.add(target)
    front.finish_prompt()
    assert front.sent(Submit, 3 - target)
    assert front.where(CancelPrefetch) == [target]


def test_a_request_that_no_replica_goes_on_with_stays_and_is_followed_by_none() -> None:
    front = Front(("prefill", "decode"))
    front.begin()
    front.cluster._states.draining.add(1)
    front.finish_prompt()
    assert [submit.prefill_only for submit in front.sent(Submit, 0)] == [True, False]
    assert front.where(CancelPrefetch) == [1]


def test_without_kv_transfer_nothing_is_followed() -> None:
    front = Front()
    front.clients[2].exchanges_kv = False
    front.begin()
    assert not front.where(PrefetchKV)
