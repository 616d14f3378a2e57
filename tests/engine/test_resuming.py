"""An accepted request survives its engine: another one continues its answer, and the client sees a single whole one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.engine.in_flight import POISONED
from cloister.engine.poison_requests import NUM_SAFE_LOSSES
from cloister.types.clock import VirtualClock
from cloister.types.events import Arrived, Ended, Event, Lost, Progressed, Scheduled
from cloister.types.request import BeamSearch, FinishReason, PoolingParams, Request, SequenceOutput
from tests.engine.fake_transport import FakeTransport, opened_client
from tests.engine.replica import make_replica, make_request
from tests.thinning import examples

STEP_S = 0.25


class Server:
    """A client whose engine is replaced at chosen steps by another one of the same model."""

    def __init__(self, path: Path) -> None:
        self.clock = VirtualClock(100.0)
        self.path = path
        self.transport = FakeTransport()
        self.client = opened_client(self.transport, self.clock)
        self.outputs: list[SequenceOutput] = []
        self.events: list[Event] = []
        self.client.subscribe(self.events.append)
        self.start_engine()

    def start_engine(self) -> None:
        self.replica = make_replica(self.path, clock=self.clock)

    def lose_engine(self) -> None:
        self.client._requests.keep_resumable("the engine died")
        self.start_engine()
        self.transport.sent = list(self.client._requests.take_due())  # what the engine had not read is lost with it

    def step(self) -> None:
        for message in self.transport.sent:
            self.replica.core.input_queue.put(message)
        self.transport.sent.clear()
        self.clock.advance(STEP_S)
        if (brought := self.replica.core.step()) is not None:
            self.client.receive(brought)

    def answer(self, request: Request, losses: Sequence[int] = ()) -> list[SequenceOutput]:
        """Returns all outputs of a request, whose engine is lost before the given steps."""
        self.client.submit(request, self.outputs.append)
        for number in range(200):
            if number in losses:
                self.lose_engine()
            self.step()
            if not len(self.client._requests):
                assert self.replica.scheduler.pool.num_used == 0
                return self.outputs
        raise AssertionError("the request did not end")


def join(outputs: Sequence[SequenceOutput]) -> list[object]:
    """What a client sees of an answer, however it was cut into outputs."""
    found: dict[int, list[object]] = {}
    for output in outputs:
        text, tokens, logprobs, ends, prompt, vectors = found.setdefault(output.index, ["", [], [], [], [], []])
        assert isinstance(tokens, list)
        assert isinstance(logprobs, list)
        assert isinstance(ends, list)
        assert isinstance(prompt, list)
        assert isinstance(vectors, list)
        found[output.index] = [
            f"{text}{output.text}",
            tokens + output.token_ids,
            logprobs + (output.logprobs or []),
            ends + ([(output.finish_reason, output.stop_reason, output.num_output_tokens)] if output.finish_reason else []),
            prompt + (output.prompt_logprobs or []),
            vectors + ([output.embedding] if output.embedding else []),
        ]
    return [found[index] for index in sorted(found)]


KINDS: dict[str, dict[str, object]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7},
    "penalties": {"temperature": 0.9, "seed": 3, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "several": {"n": 3, "temperature": 1.0, "seed": 5},
    "logprobs": {"logprobs": 2, "n": 2, "temperature": 1.0, "seed": 1},
    "prompt logprobs": {"prompt_logprobs": 1},
    "eos": {"ignore_eos": False, "temperature": 3.0, "seed": 11, "n": 4, "min_tokens": 3},
    "beams": {"beams": BeamSearch(width=3), "n": 2},
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(8), deadline=None)
@given(losses=st.sets(st.integers(0, 24), min_size=1, max_size=NUM_SAFE_LOSSES), size=st.integers(1, 60))
def test_an_answer_is_the_same_whenever_its_engine_is_lost(model_path: Path, kind: str, losses: set[int], size: int) -> None:
    sampling = {"max_tokens": 20, **KINDS[kind]}
    prompt = [number * 7 % 250 for number in range(size)]
    whole = Server(model_path).answer(make_request(prompt, **sampling))
    assert join(Server(model_path).answer(make_request(prompt, **sampling), sorted(losses))) == join(whole)


def test_a_stop_string_is_found_though_its_engine_is_lost_inside_of_it(model_path: Path) -> None:
    whole = join(Server(model_path).answer(make_request("tell me", max_tokens=20)))
    text = str(whole[0][0])  # type: ignore[index]
    letters = [
        place
        for place in range(4, len(text) - 3)
        if text[place : place + 3].isascii() and text.count(text[place : place + 3]) == 1
    ]
    assert letters, "the program says nothing that can be a stop string"
    stop = text[letters[0] : letters[0] + 3]
    for loss in range(20):
        server = Server(model_path)
        seen = join(server.answer(make_request("tell me", max_tokens=20, stop=(stop,)), [loss]))
        assert seen[0][0] == text[: letters[0]]  # type: ignore[index]
        assert seen[0][3][0][:2] == (FinishReason.STOP, stop)  # type: ignore[index]


def test_an_answer_without_a_seed_goes_on_with_the_noise_that_was_drawn(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.randbits", lambda bits: 12345)
    whole = join(Server(model_path).answer(make_request(max_tokens=20, temperature=1.0)))
    draws = iter([12345])  # a second draw would fail
    monkeypatch.setattr("secrets.randbits", lambda bits: next(draws))
    assert join(Server(model_path).answer(make_request(max_tokens=20, temperature=1.0), [8])) == whole


def test_a_vector_is_computed_again(model_path: Path) -> None:
    def pooled() -> Request:
        request = make_request([1] * 20, max_tokens=0)
        return Request(
            request_id=request.request_id, token_ids=request.token_ids, sampling=request.sampling, pooling=PoolingParams()
        )

    whole = join(Server(model_path).answer(pooled()))
    assert join(Server(model_path).answer(pooled(), [0])) == whole


def test_its_deadline_goes_on(model_path: Path) -> None:
    server = Server(model_path)
    server.answer(make_request(max_tokens=200, timeout_s=20 * STEP_S), [10])
    assert server.outputs[-1].finish_reason is FinishReason.TIMEOUT
    arrived, ended = (next(e for e in server.events if isinstance(e, kind)) for kind in (Arrived, Ended))
    assert 20 * STEP_S <= ended.now_s - arrived.now_s <= 22 * STEP_S


def test_listeners_see_one_request_that_waited_in_between(model_path: Path) -> None:
    server = Server(model_path)
    server.answer(make_request(max_tokens=10), [4])
    kinds = [type(event) for event in server.events if not isinstance(event, Progressed) and hasattr(event, "request_id")]
    assert kinds == [Arrived, Scheduled, Lost, Scheduled, Ended]
    assert [e.resumed for e in server.events if isinstance(e, Scheduled)] == [False, True]
    progress = [event for event in server.events if isinstance(event, Progressed)]
    assert sum(event.num_tokens for event in progress) == 10
    assert [event.first for event in progress].count(True) == 1
    arrived, ended = (next(e for e in server.events if isinstance(e, kind)) for kind in (Arrived, Ended))
    assert ended.num_output_tokens == 10
    assert ended.first_token_s is not None
    assert ended.first_token_s - ended.arrival_s == progress[0].now_s - arrived.now_s


def test_a_request_that_kills_every_engine_ends_with_an_error(model_path: Path) -> None:
    server = Server(model_path)
    server.client.submit(make_request(max_tokens=100), server.outputs.append)
    for _ in range(NUM_SAFE_LOSSES):
        server.step()
        server.lose_engine()
        assert len(server.client._requests) == 1
    server.step()
    server.lose_engine()
    assert len(server.client._requests) == 0
    assert server.outputs[-1].finish_reason is FinishReason.ERROR
    assert server.outputs[-1].error == POISONED


def test_a_request_that_nobody_waits_for_is_not_resumed(model_path: Path) -> None:
    server = Server(model_path)
    request = make_request(max_tokens=100)
    server.client.submit(request, server.outputs.append)
    server.step()
    server.client.abort(request.request_id)
    server.lose_engine()
    assert len(server.client._requests) == 0
    assert [event.reason for event in server.events if isinstance(event, Ended)] == [FinishReason.ABORT]
