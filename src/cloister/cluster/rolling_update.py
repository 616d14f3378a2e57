"""Replaces the engines of replicas one by one, while all requests go on: by engines of the same weights (decisions/0030), or of
others (decisions/0035)."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, Protocol

from cloister.cluster.replay import Answer, compute_answer
from cloister.engine.client import EngineClient
from cloister.engine.replica_snapshot import UpdateProgress
from cloister.engine.request_client import DRAIN_REPLICA_S, GRACE_S
from cloister.types.errors import CloisterError, EngineError
from cloister.types.logs import describe
from cloister.types.request import ModelInfo, Request, SamplingParams
from cloister.types.scope import Scope, ScopeKind

TRIAL_TIMEOUT_S: Final = 60.0
FRONT_FIELDS: Final = (
    "max_model_len",
    "vocab_size",
    "eos_token_ids",
    "defaults",
    "default_max_tokens",
    "hidden_size",
    "pooling",
    "encoder",
    "document_block_size",
    "max_prefill_only_len",
)
"""Fields of `ModelInfo` by which the front has read requests, so other weights must have the same ones."""
_TRIAL_PROMPT_TOKENS: Final = 48
_TRIAL_TOKENS: Final = 8

MakeClient = Callable[[int, str | None], EngineClient]
"""Makes the client of a replica's new engine with these adapters (setting `lora`)."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineRelease:
    """What engines are made of.

    Attributes:
        model: the setting `model`.
        longest_request_s: time within which every request has ended (setting `request_timeout_s`).
    """

    model: str
    make: MakeClient
    longest_request_s: float = DRAIN_REPLICA_S


class UpdatableReplicas(Protocol):
    """What an update needs of replicas."""

    @property
    def model(self) -> ModelInfo:
        """That of new requests."""
        ...

    @property
    def num_replicas(self) -> int: ...

    def adapter_setting(self) -> str | None:
        """Returns the setting `lora` that gives an engine the adapters of the others."""
        ...

    async def compute_reference(self, request: Request) -> Answer | None:
        """Has a replica that is well compute a request; returns its answer, or None if there is no such replica."""
        ...

    async def drain_replica(self, index: int, timeout_s: float = DRAIN_REPLICA_S) -> int:
        """As `RequestClient.drain_replica`."""
        ...

    def is_drained(self, index: int) -> bool:
        """Whether a replica gets no requests, because it is being drained or has been, or has no engine."""
        ...

    async def return_replica(self, index: int) -> None:
        """As `RequestClient.return_replica`; one without an engine gets one."""
        ...

    def put_client(self, index: int, client: EngineClient) -> EngineClient:
        """Puts the client of another engine in the place of a replica's without requests, which it returns."""
        ...

    def num_lost(self, index: int) -> int:
        """Returns how many engines of a replica's client ended that were not told to."""
        ...

    def prefer_weights(self, model: ModelInfo) -> None:
        """Gives new requests to replicas with the weights of `model` from now on, as long as one of them accepts any."""
        ...


class RollingUpdate:
    """One update of all replicas.

    Each new engine starts and computes a trial request beside the old one, which goes on meanwhile. Then the requests of the
    old one move to other replicas, the new one takes its place, and the old one ends. Drained replicas come first, and stay
    drained.

    With other weights an answer stays with those with which it has begun: the last old engines end theirs. New requests go to
    the old weights until half of the replicas have new ones, and to the new weights from then on.

    Whatever goes wrong ends the update. Engines of the same weights stay where they are. Engines of other weights are replaced
    by such as there were before.

    Args:
        release: makes the clients of new engines.
        before: made those of the present ones, which have other weights; None: they have the same.
        draw: of the id and scope of trial requests.

    Attributes:
        release: as above.
    """

    def __init__(
        self, replicas: UpdatableReplicas, release: EngineRelease, before: EngineRelease | None, draw: random.Random
    ) -> None:
        self.release = release
        self._replicas, self._before, self._draw = replicas, before, draw
        self._old, self._new = replicas.model, None if before is not None else replicas.model
        self._has_switched = False
        self._updated: list[int] = []
        self._is_running, self._is_rolling_back = True, False
        self._error = ""

    @property
    def progress(self) -> UpdateProgress:
        """How far it is."""
        num_replicas = self._replicas.num_replicas
        return UpdateProgress(len(self._updated), num_replicas, self._is_running, self._error, self._is_rolling_back)

    async def run(self) -> None:
        """Updates the replicas, drained ones first; ends early if one cannot be updated."""
        order = sorted(range(self._replicas.num_replicas), key=lambda index: not self._replicas.is_drained(index))
        self._prefer(self._old)
        try:
            for index in order:
                try:
                    await self._update(index)
                except CloisterError as error:
                    self._error = f"replica {index}: {error.message}"
                    break
                except Exception as error:
                    self._error = f"replica {index}: {describe(error)}"
                    break
                _logger.info("replica %d has a new engine", index)
            if self._error:
                _logger.error("the update stopped, and the other engines stay: %s", self._error)
                await self._roll_back()
        finally:
            self._is_running = self._is_rolling_back = False

    async def _update(self, index: int) -> None:
        old = await self._give_engine(index, self.release)
        self._updated.append(index)
        self._switch_if_due()
        await old.drain(0.0)

    async def _give_engine(self, index: int, release: EngineRelease) -> EngineClient:
        """Starts a replica's new engine and puts it in the place of the old one, whose client is returned."""
        client = release.make(index, self._replicas.adapter_setting())
        try:
            await client.start()
            await self._check(client, self._old if release is self._before else self._new)
            return await self._exchange(index, client)
        except BaseException:
            await client.drain(0.0)
            raise

    async def _check(self, client: EngineClient, model: ModelInfo | None) -> None:
        """Has a new engine compute a request, which also warms it up.

        Args:
            model: which it must have; None: it is the first one with other weights.

        Raises:
            EngineError: it is no copy of `model`, the front would not fit, or it does not compute.
        """
        if model is None:
            self._check_front(client.model)
        elif client.model.fingerprint != model.fingerprint:
            raise EngineError(
                f"the new engine has the fingerprint {client.model.fingerprint}, not {model.fingerprint}: weights or formats "
                "differ, and answers would too. To change them, name the new weights: `cloister cluster update --model`"
            )
        if client.model.encoder is None:
            await self._try(client)
        self._new = self._new or client.model

    def _check_front(self, new: ModelInfo) -> None:
        """Raises EngineError if the front has read requests by what new weights have otherwise, or they are not new."""
        if new.fingerprint == self._old.fingerprint:
            raise EngineError(
                f"the new engine has the same weights and formats as the others ({new.fingerprint}), so nothing would change; "
                "to start their engines again, run `cloister cluster update` without --model"
            )
        other = [name for name in FRONT_FIELDS if getattr(new, name) != getattr(self._old, name)]
        if other:
            raise EngineError(
                f"the new weights differ in {', '.join(other)}, which this server has used to read requests; start "
                "another server for them, and send requests there"
            )

    async def _try(self, client: EngineClient) -> None:
        request = make_trial(client.model, self._draw)
        try:
            answer = await compute_answer(client, request)
        except CloisterError as error:
            raise EngineError(f"the new engine did not compute a trial request: {error.message}") from None
        if client.num_lost:
            raise EngineError("the new engine died while it computed a trial request; the log may say why")
        if client.model.fingerprint != self._old.fingerprint:
            return  # there is no reference for other weights
        reference = await self._replicas.compute_reference(request) if self._before is None else None
        if reference is not None and answer != reference:
            raise EngineError("the new engine computed other tokens than a running one for a trial request")

    async def _exchange(self, index: int, client: EngineClient) -> EngineClient:
        """Moves the requests of a replica away and gives it the new engine; returns the client of the old one."""
        was_drained = self._replicas.is_drained(index)
        async with self._stand_in(index):
            try:
                self._switch_if_due()
                num_left = await self._replicas.drain_replica(index, self._longest_drain_s)
                self._check_new_engines()
                if num_left and self._before is not None:
                    raise EngineError(f"{num_left} of its requests have neither ended nor found room with their weights")
                if num_left:
                    raise EngineError(
                        f"no other replica had room for {num_left} of its requests; update it again under less load"
                    )
                return self._replicas.put_client(index, client)
            finally:
                if not was_drained:
                    await self._replicas.return_replica(index)

    @property
    def _longest_drain_s(self) -> float:
        """With other weights requests that cannot move end by themselves: each has a deadline."""
        return DRAIN_REPLICA_S if self._before is None else self.release.longest_request_s + 2 * GRACE_S

    @contextlib.asynccontextmanager
    async def _stand_in(self, index: int) -> AsyncIterator[None]:
        """Returns a drained replica for as long as no other one would accept the requests of a replica."""
        others = [i for i in range(self._replicas.num_replicas) if i != index]
        if self._replicas.is_drained(index) or not all(map(self._replicas.is_drained, others)):
            yield
            return
        chosen = min(others, key=lambda other: other not in self._updated)
        await self._replicas.return_replica(chosen)
        try:
            yield
        finally:
            await self._replicas.drain_replica(chosen, self._longest_drain_s)

    # Other weights

    def _prefer(self, model: ModelInfo) -> None:
        if self._before is not None:
            self._replicas.prefer_weights(model)

    def _switch_if_due(self) -> None:
        """Gives new requests to the new weights once half of the replicas that get requests have them."""
        serving = [i for i in range(self._replicas.num_replicas) if not self._replicas.is_drained(i)]
        num_new = sum(index in self._updated for index in serving)
        if self._before is None or self._new is None or self._has_switched or self._is_rolling_back:
            return
        if 2 * num_new >= max(1, len(serving)):
            self._has_switched = True
            self._prefer(self._new)
            _logger.info("new requests go to the new weights from now on")

    def _check_new_engines(self) -> None:
        """Raises EngineError if an engine with other weights has died since it took its place."""
        if self._before is None or self._is_rolling_back:
            return
        for index in self._updated:
            if self._replicas.num_lost(index):
                raise EngineError(f"the engine of replica {index}, which has the new weights, died; the log says why")

    async def _roll_back(self) -> None:
        """Gives replicas with other weights engines of the old ones again."""
        if self._before is None:
            return
        self._is_rolling_back = True
        self._prefer(self._old)
        for index in reversed(list(self._updated)):
            try:
                old = await self._give_engine(index, self._before)
            except CloisterError as error:
                self._keep(index, error.message)
            except Exception as error:
                self._keep(index, describe(error))
            else:
                self._updated.remove(index)
                await old.drain(0.0)
                _logger.info("replica %d has an engine with the old weights again", index)
        if not self._updated:
            self._error += "; all replicas have the old weights"

    def _keep(self, index: int, why: str) -> None:
        self._error += f"; replica {index} keeps the new weights ({why}) and gets no requests while others accept them"
        _logger.error("replica %d keeps the new weights: %s", index, why)


def make_trial(model: ModelInfo, draw: random.Random) -> Request:
    """Returns a short greedy request, in a scope of its own."""
    num_tokens = max(1, min(_TRIAL_PROMPT_TOKENS, model.max_model_len - _TRIAL_TOKENS))
    return Request(
        request_id=f"trial-{draw.getrandbits(64):016x}",
        token_ids=[token_id % model.vocab_size for token_id in range(num_tokens)],
        sampling=SamplingParams(
            temperature=0.0, seed=0, max_tokens=min(_TRIAL_TOKENS, model.max_model_len - 1), ignore_eos=True
        ),
        scope=Scope(ScopeKind.REQUEST, draw.randbytes(16)),
        timeout_s=TRIAL_TIMEOUT_S,
    )
