"""A call is over once, when its reply has ended and the engine has nothing left to do for it; its key pays what was used."""

from __future__ import annotations

import asyncio

import pytest

from cloister.policy import Account, KeyQuota
from cloister.server.calls import HttpCall, HttpCalls, PromptOfCall, most_tokens
from cloister.types.errors import QueueFullError, RateLimitError
from cloister.types.events import Arrived, Ended, Event, Scheduled
from cloister.types.request import FinishReason, Request, SamplingParams
from tests.server.running_server import ScriptedEngine, says

NOON = 12 * 3600.0


class Books:
    """Calls, with an account of 100 tokens, and what was told of them."""

    def __init__(self) -> None:
        self.over: list[HttpCall] = []
        self.replies: list[tuple[str, int]] = []
        self.calls = HttpCalls(lambda route, status: self.replies.append((route, status)), [self.over.append])
        self.account = Account(KeyQuota(concurrent_requests=1, tokens_per_day=100))

    def open(self) -> HttpCall:
        call = self.calls.open({"method": "POST", "headers": [], "client": ("10.0.0.7", 1)})
        call.charge = self.account.enter(0.0)
        return call

    def remaining(self) -> int:
        return self.account.allowances(0.0, NOON)[0].remaining


def observe(prompt: PromptOfCall, event: Event) -> None:
    """As the engine's client has a request observed."""
    prompt.stats.follow(event)
    prompt.observe(event)


@pytest.fixture
def books(monkeypatch):
    monkeypatch.setattr("cloister.server.calls.time.time", lambda: NOON)
    return Books()


def request(request_id: str = "r", num_prompt: int = 10, **sampling: object) -> Request:
    return Request(request_id=request_id, token_ids=[1] * num_prompt, sampling=SamplingParams(**sampling))


def ended(request_id: str = "r", *, num_output: int = 5, last: bool = True, reason: FinishReason = FinishReason.STOP) -> Ended:
    return Ended(request_id, 1, 0, 4.0, reason, 10, num_output, 0, 1.0, 2.0, last)


@pytest.mark.parametrize("engine_first", [True, False])
def test_a_call_is_over_when_both_sides_are_and_once(books, engine_first):
    call = books.open()
    prompt = books.calls.begin(call, request(max_tokens=20), 256)
    assert books.remaining() == 70

    def close() -> None:
        books.calls.close(call, "/v1/completions", 200)
        books.calls.leave(call)

    sides = [lambda: observe(prompt, ended()), close]
    first, second = sides if engine_first else reversed(sides)
    first()
    assert books.over == []
    second()
    assert books.over == [call]
    for again in sides:
        again()
    assert books.over == [call]
    assert books.replies == [("/v1/completions", 200)]
    assert books.remaining() == 85
    books.open()


def test_every_sequence_of_a_request_is_paid_and_its_prompt_once(books):
    call = books.open()
    prompt = books.calls.begin(call, request(max_tokens=20, n=3), 256)
    assert books.remaining() == 30
    for num_output, last in ((20, False), (3, False), (7, True)):
        observe(prompt, ended(num_output=num_output, last=last))
    books.calls.close(call, "/v1/completions", 200)
    assert books.remaining() == 100 - 10 - 30
    assert call.engine_stats["r"].reasons == ["stop"] * 3


def test_what_the_engine_did_not_take_costs_nothing(books):
    call = books.open()
    engine = ScriptedEngine(lambda _: [QueueFullError("full")])

    async def ask() -> None:
        async for _ in books.calls.generate(engine, call, request(max_tokens=20)):
            pass

    with pytest.raises(QueueFullError):
        asyncio.run(ask())
    books.calls.close(call, "/v1/completions", 429)
    assert books.remaining() == 100
    assert books.over == [call]


def test_too_much_for_the_day_does_not_reach_the_engine(books):
    engine = ScriptedEngine(says("x"))
    call = books.open()

    async def ask() -> None:
        async for _ in books.calls.generate(engine, call, request()):
            pass

    with pytest.raises(RateLimitError, match="may need 256"):
        asyncio.run(ask())
    books.calls.close(call, "/v1/completions", 429)
    assert engine.taken == []
    assert books.over == [call]


def test_a_client_that_left_before_its_reply_counts_for_no_reply(books):
    call = books.open()
    books.calls.close(call, "/v1/completions", None)
    assert (books.replies, call.status) == ([], 499)
    assert books.over == [call]


def test_a_listener_that_fails_keeps_nothing_from_the_others(caplog):
    told: list[HttpCall] = []

    def fail(call: HttpCall) -> None:
        raise ValueError("what a user sent")

    calls = HttpCalls(lambda *_: None, [fail, told.append])
    call = calls.open({"method": "GET", "headers": []})
    calls.close(call, "/v1/models", 200)
    assert told == [call]
    assert "ValueError" in caplog.text
    assert "what a user sent" not in caplog.text


def test_times_and_counts_are_those_of_the_events(books):
    call = books.open()
    prompt = books.calls.begin(call, request(max_tokens=20), 256)
    for event in (
        Arrived("r", 1.0, 10),
        Scheduled("r", 1.5, 0.5, 8, 10),
        Scheduled("r", 3.0, 0.1, 0, 10, resumed=True),
        ended(),
    ):
        observe(prompt, event)
    work = call.engine_stats["r"]
    assert (work.arrival_s, work.scheduled_s, work.first_token_s, work.ended_s) == (1.0, 1.5, 2.0, 4.0)
    assert (work.num_prompt_tokens, work.num_cached_tokens, work.num_output_tokens) == (10, 8, 5)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [({}, 256), ({"max_tokens": 5}, 15), ({"max_tokens": 5, "n": 4}, 30), ({"max_tokens": 9999}, 256), ({"max_tokens": 0}, 10)],
)
def test_the_most_that_a_request_can_need(sampling, expected):
    assert most_tokens(request(**sampling), 256) == expected
