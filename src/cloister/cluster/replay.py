"""Computes a sample of the finished requests again in another replica (dual-phase replay of ByteRobust, SOSP 2025).

Replicas of one model give equal tokens whatever else they compute (`--numerics exact`), so one that computes wrongly shows.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import msgspec

from cloister.engine.client import EngineClient
from cloister.engine.in_flight import Sink
from cloister.types.errors import CloisterError, EngineError
from cloister.types.events import Ended, Event, Stepped
from cloister.types.request import FinishReason, Request, SequenceOutput
from cloister.types.scope import Scope, ScopeKind

GOOD_ENDS: Final = (FinishReason.LENGTH, FinishReason.STOP)

Answer = tuple[tuple[int, ...], ...]
"""The tokens of each sequence of a request."""

_logger = logging.getLogger(__name__)


def may_replay(request: Request) -> bool:
    """Whether a request is deterministic, and small enough to be kept for a replay."""
    sampling = request.sampling
    is_fixed = sampling.temperature == 0.0 or sampling.seed is not None
    return is_fixed and sampling.beams is None and request.pooling is None and not request.images


def find_outlier(answers: Mapping[int, Answer]) -> int | None:
    """Returns the replica whose answer differs from that of all others, which agree; None if there is no such majority."""
    counts = Counter(answers.values())
    if len(answers) < 3 or len(counts) != 2:
        return None
    return next((index for index, answer in answers.items() if counts[answer] == 1), None)


_Engine = tuple[EngineClient, int]
"""Which engine a replica has: its client, and how many engines that one lost before."""


class _Recorder:
    """Records an answer on its way to the client."""

    def __init__(self, request: Request, sink: Sink, replica: int = 0, engine: _Engine | None = None) -> None:
        self.request, self.replica, self.engine = request, replica, engine
        self.ends: list[FinishReason] = []
        self.error = ""
        self._tokens: list[list[int]] = [[] for _ in range(request.sampling.n)]
        self._sink = sink

    def take(self, output: SequenceOutput) -> None:
        """Records an output and passes it on."""
        self._tokens[output.index] += output.token_ids
        if output.finish_reason is not None:
            self.ends.append(output.finish_reason)
            self.error = output.error or self.error
        self._sink(output)

    @property
    def answer(self) -> Answer:
        return tuple(tuple(tokens) for tokens in self._tokens)

    @property
    def is_whole(self) -> bool:
        """Whether all sequences are complete."""
        return len(self.ends) == len(self._tokens) and all(end in GOOD_ENDS for end in self.ends)


async def compute_answer(client: EngineClient, request: Request) -> Answer:
    """Has an engine compute a request.

    Raises:
        CloisterError: it does not come to its end; the message says why, if that is known.
    """
    recorder = _Recorder(request, lambda output: None)
    await client.follow(request, recorder.take)
    if not recorder.is_whole:
        raise EngineError(recorder.error or "it ended early")
    return recorder.answer


class ReplayVerifier:
    """Replays a sample of the finished requests on other replicas and compares the answers.

    Only replicas with the same weights are compared (`cluster.rolling_update`). One request at a time, and only where nothing
    waits. If two replicas differ, a third one computes the request too, and the outlier is drained.

    Args:
        rate: share of deterministic requests that are replayed.
        draw: source of randomness, of requests, replicas and scopes; it must be secure where others send requests.

    Attributes:
        suspicious: replicas that computed wrongly, which must get no requests any more.
        num_mismatches: for each replica, how often another one computed something else and no third one sided with it.
        num_replays: answers that were computed again.
        list_inactive: returns the replicas without engines, which must not be asked.
    """

    def __init__(self, replicas: Sequence[EngineClient], rate: float, draw: random.Random) -> None:
        self.suspicious: set[int] = set()
        self.num_mismatches = [0] * len(replicas)
        self.num_replays = 0
        self.list_inactive: Callable[[], Collection[int]] = tuple
        self._own_ids: set[str] = set()
        self._replicas, self._rate, self._draw = replicas, rate, draw
        self._recorders: dict[str, _Recorder] = {}
        self._task: asyncio.Task[None] | None = None

    def watch(self, request: Request, replica: int, sink: Sink) -> Sink:
        """Returns what takes the outputs of a request in place of its sink."""
        if not may_replay(request) or self._draw.random() >= self._rate:
            return sink
        recorder = self._recorders[request.request_id] = _Recorder(request, sink, replica, self._engine(replica))

        def take(output: SequenceOutput) -> None:
            recorder.take(output)
            if recorder.is_whole and self._recorders.pop(request.request_id, None) is not None and self._task is None:
                self._task = asyncio.get_running_loop().create_task(self._verify(recorder), name="replay of a request")

        return take

    def forget(self, request_id: str) -> None:
        """Called when a request's client leaves, and when another replica continues it: no single one computed it then."""
        self._recorders.pop(request_id, None)

    def is_replay(self, request_id: str) -> bool:
        """Whether a request is a replay."""
        return request_id in self._own_ids

    def owns(self, event: Event) -> bool:
        """Whether an event belongs to a replay; listeners must not get those."""
        if isinstance(event, Stepped) or not self.is_replay(event.request_id):
            return False
        if isinstance(event, Ended) and event.last:
            self._own_ids.discard(event.request_id)
        return True

    def stop(self) -> None:
        """Cancels the replay in progress."""
        if self._task is not None:
            self._task.cancel()

    async def _verify(self, found: _Recorder) -> None:
        try:
            assert found.engine is not None
            answers, engines = {found.replica: found.answer}, {found.replica: found.engine}
            for index, engine in self._draw_voters(found.replica, found.engine[0]):
                again = await self._compute_again(found.request, index) if self._engine(index) == engine else None
                if again is None or (again == found.answer and len(answers) == 1):
                    return
                answers[index], engines[index] = again, engine
            # an engine that was replaced meanwhile may be on another machine now
            if len(answers) > 1 and all(self._engine(index) == engine for index, engine in engines.items()):
                self._judge(answers)
        finally:
            self._task = None

    def _engine(self, index: int) -> _Engine:
        return self._replicas[index], self._replicas[index].num_lost

    def _draw_voters(self, replica: int, computed: EngineClient) -> list[tuple[int, _Engine]]:
        """Returns up to two other idle replicas with the weights of `computed`."""
        free = []
        for index, client in enumerate(self._replicas):
            snapshot = client.snapshot(index)
            is_free = snapshot.is_accepting and not snapshot.num_waiting
            is_there = index != replica and index not in self.suspicious and index not in self.list_inactive()
            if is_there and is_free and client.fingerprint == computed.fingerprint:
                free.append((index, self._engine(index)))
        return self._draw.sample(free, min(2, len(free)))

    async def compute(self, request: Request, index: int) -> Answer | None:
        """Has a replica compute a request without events for listeners. Returns None if the answer is incomplete."""
        self._own_ids.add(request.request_id)
        try:
            return await compute_answer(self._replicas[index], request)
        except CloisterError:
            if self._replicas[index].find(request.request_id) is None:
                self._own_ids.discard(request.request_id)
            return None

    async def _compute_again(self, request: Request, index: int) -> Answer | None:
        """Computes a request again, without a prefix from the cache."""
        scope = Scope(ScopeKind.REQUEST, self._draw.randbytes(16))
        request_id = f"replay-{self._draw.getrandbits(64):016x}"
        answer = await self.compute(msgspec.structs.replace(request, request_id=request_id, scope=scope), index)
        self.num_replays += answer is not None
        return answer

    def _judge(self, answers: Mapping[int, Answer]) -> None:
        outlier = find_outlier(answers)
        for index in answers if outlier is None else (outlier,):
            self.num_mismatches[index] += 1
        if outlier is None:
            names = " and ".join(str(index) for index in sorted(answers))
            _logger.error(
                "replicas %s computed different tokens for one request, and nothing says which of them is right. Check the "
                "memory of their machines",
                names,
            )
            return
        self.suspicious.add(outlier)
        _logger.critical(
            "replica %d computed other tokens than two others; it gets no more requests. Check the memory of its machine,"
            " and restart the server",
            outlier,
        )
