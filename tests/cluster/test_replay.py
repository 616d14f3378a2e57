"""A replica that computes wrongly is found by computing requests again in others, and gets no more of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cloister.backends.base import Program, Weights
from cloister.backends.native.backend import NativeBackend
from cloister.backends.spec import DecoderSpec
from cloister.backends.tensors import QuantizedTensor, Tensor
from cloister.cluster import ReplicaSet
from cloister.cluster.replay import Answer, ReplayVerifier, find_outlier, may_replay
from cloister.engine import EngineClient, EngineCore, ThreadTransport
from cloister.launch import build_engine
from cloister.types.config import EngineConfig
from cloister.types.events import Event, Stepped
from cloister.types.request import FinishReason, PoolingParams, Request, SequenceOutput
from cloister.types.scope import ScopeKind
from tests.cluster.test_replica_set import make_router
from tests.engine.replica import make_request
from tests.model_factory import make_model


class FlippedWeights:
    """Weights of which one bit is another one (protocol `backends.base.Weights`)."""

    def __init__(self, weights: Weights, flipped: str) -> None:
        self._weights, self._flipped = weights, flipped

    def names(self) -> Sequence[str]:
        return self._weights.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(name)

    def form(self, name: str) -> QuantizedTensor | None:
        return self._weights.form(name)

    def read(self, name: str) -> Tensor:
        tensor = self._weights.read(name)
        if name != self._flipped:
            return tensor
        values = np.array(tensor, np.float32)
        values.view(np.uint32).reshape(-1)[3] ^= np.uint32(1 << 24)  # a bit of the exponent: four times as much, or a quarter
        return values

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.read(name)) for name in self.names())


def build(path: Path, *, flips: bool, monkeypatch: pytest.MonkeyPatch) -> EngineCore:
    real = NativeBackend.build

    def build_flipped(backend: NativeBackend, spec: DecoderSpec, weights: Weights, *args: Any, **options: Any) -> Program:
        name = next(name for name in weights.names() if "norm" in name)
        return real(backend, spec, FlippedWeights(weights, name), *args, **options)

    config = EngineConfig(
        model=str(path), num_threads=1, kv_memory_mb=8.0, max_model_len=128, weights_cache="", dtype="float32", max_num_seqs=4
    )
    with monkeypatch.context() as patched:
        if flips:
            patched.setattr(NativeBackend, "build", build_flipped)
        return build_engine(config)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama") / "model", "llama")


class Server:
    """Replicas in threads of this process, which compute every request again.

    Attributes:
        events: what listeners heard.
    """

    def __init__(self, cores: Sequence[EngineCore]) -> None:
        clients = [EngineClient(ThreadTransport(core), EngineConfig(max_num_seqs=4)) for core in cores]
        self.replicas = ReplicaSet(clients, partial(make_router, "round_robin"), verify_replay=1.0)
        self.events: list[Event] = []
        self.replicas.subscribe(self.events.append)

    def answer(self, requests: Sequence[Request]) -> list[list[SequenceOutput]]:
        """Answers one request after another, each of which is computed again before the next one."""

        async def main() -> list[list[SequenceOutput]]:
            await self.replicas.start()
            try:
                answers = []
                for request in requests:
                    answers.append([output async for output in self.replicas.generate(request)])
                    while (task := self.replicas._verifier._task) is not None:
                        await task
                return answers
            finally:
                await self.replicas.drain(5.0)

        return asyncio.run(asyncio.wait_for(main(), 600.0))


def prompts(num: int, **sampling: object) -> list[Request]:
    return [make_request([5 + number, 7, 9, 11], max_tokens=6, **sampling) for number in range(num)]


def tokens(outputs: Sequence[SequenceOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def test_the_odd_one_of_three_is_found_by_a_flipped_bit_and_drained(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server([build(llama, flips=index == 1, monkeypatch=monkeypatch) for index in range(3)])
    with caplog.at_level(logging.ERROR):
        server.answer([*prompts(4), *prompts(2, temperature=1.0, seed=5)])
    snapshots = server.replicas.snapshots()
    assert [snapshot.num_mismatches for snapshot in snapshots] == [0, 1, 0]
    assert "replica 1 computed wrongly and gets no requests" in server.replicas.health().detail
    assert "replica 1 computed other tokens than two others" in caplog.text
    routed = [event for event in server.events if not isinstance(event, Stepped)]
    assert len({event.request_id for event in routed}) == 6, "nobody hears of what is computed again"
    assert server.replicas._verifier.num_replays >= 6


def test_two_that_differ_are_counted_and_nobody_is_accused(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server([build(llama, flips=index == 1, monkeypatch=monkeypatch) for index in range(2)])
    with caplog.at_level(logging.ERROR):
        server.answer(prompts(1))
    assert [snapshot.num_mismatches for snapshot in server.replicas.snapshots()] == [1, 1]
    assert server.replicas._verifier.suspicious == set()
    assert "nothing says which of them is right" in caplog.text


def test_a_replica_whose_engine_was_lost_meanwhile_is_not_accused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server([build(llama, flips=index == 1, monkeypatch=monkeypatch) for index in range(3)])
    victim = server.replicas._replicas[1]
    compute = server.replicas._verifier.compute

    async def lose_and_compute(request: Request, index: int) -> Answer | None:
        answer = await compute(request, index)
        victim.num_lost += 1
        return answer

    monkeypatch.setattr(server.replicas._verifier, "compute", lose_and_compute)
    server.answer(prompts(4))
    assert server.replicas._verifier.num_replays > 4, "some answers differed, and a third replica was asked"
    assert [snapshot.num_mismatches for snapshot in server.replicas.snapshots()] == [0, 0, 0]


def test_replicas_that_compute_rightly_agree_on_everything(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server([build(llama, flips=False, monkeypatch=monkeypatch) for _ in range(2)])
    answers = server.answer([*prompts(2), *prompts(2, temperature=1.0, seed=3, n=2), *prompts(1, temperature=1.0)])
    assert all(outputs[-1].finish_reason is FinishReason.LENGTH for outputs in answers)
    assert [snapshot.num_mismatches for snapshot in server.replicas.snapshots()] == [0, 0]
    assert server.replicas._verifier.num_replays == 4, "an answer without a seed could be another one"


def test_what_is_computed_again_has_a_scope_of_its_own(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server([build(llama, flips=False, monkeypatch=monkeypatch) for _ in range(2)])
    computed: list[Request] = []
    compute = ReplayVerifier.compute

    async def note(verifier: ReplayVerifier, request: Request, index: int) -> Answer | None:
        computed.append(request)
        return await compute(verifier, request, index)

    monkeypatch.setattr(ReplayVerifier, "compute", note)
    sent = prompts(1) * 2
    server.answer([msgspec.structs.replace(request, request_id=f"r{i}") for i, request in enumerate(sent)])
    first, second = (request.scope for request in computed)
    assert {first.kind, second.kind} == {ScopeKind.REQUEST}
    assert len({scope.salt for scope in (first, second, sent[0].scope)}) == 3


def test_only_a_majority_accuses() -> None:
    one, other, third = ((1, 2),), ((1, 3),), ((4,),)
    assert find_outlier({0: one, 2: other}) is None
    assert find_outlier({0: one, 2: other, 3: one}) == 2
    assert find_outlier({0: one, 2: other, 3: other}) == 0
    assert find_outlier({0: one, 1: other, 2: third}) is None


def test_requests_that_may_have_several_answers_are_not_compared() -> None:
    assert may_replay(make_request())
    assert may_replay(make_request(temperature=1.0, seed=1))
    assert not may_replay(make_request(temperature=1.0))
    assert not may_replay(msgspec.structs.replace(make_request(), pooling=PoolingParams()))
