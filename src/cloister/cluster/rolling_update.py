"""Replaces the engines of replicas one by one, while all requests go on (decisions/0030)."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import Final, Protocol

from cloister.cluster.replay import Answer, compute_answer
from cloister.engine.client import EngineClient
from cloister.engine.replica_snapshot import UpdateProgress
from cloister.types.errors import CloisterError, EngineError
from cloister.types.logs import describe
from cloister.types.request import ModelInfo, Request, SamplingParams
from cloister.types.scope import Scope, ScopeKind

TRIAL_TIMEOUT_S: Final = 60.0
_TRIAL_PROMPT_TOKENS: Final = 48
_TRIAL_TOKENS: Final = 8

MakeClient = Callable[[int, str | None], EngineClient]
"""Makes the client of a replica's new engine with these adapters (setting `lora`)."""

_logger = logging.getLogger(__name__)


class UpdatableReplicas(Protocol):
    """What an update needs of replicas."""

    model: ModelInfo

    @property
    def num_replicas(self) -> int: ...

    def adapter_setting(self) -> str | None:
        """Returns the setting `lora` that gives an engine the adapters of the others."""
        ...

    async def compute_reference(self, request: Request) -> Answer | None:
        """Has a replica that is well compute a request; returns its answer, or None if there is no such replica."""
        ...

    async def drain_replica(self, index: int) -> int:
        """As `RequestClient.drain_replica`."""
        ...

    def is_drained(self, index: int) -> bool:
        """Whether a replica gets no requests, because it is being drained or has been."""
        ...

    def return_replica(self, index: int) -> None:
        """As `RequestClient.return_replica`."""
        ...

    def put_client(self, index: int, client: EngineClient) -> EngineClient:
        """Puts the client of another engine in the place of a replica's without requests, which it returns."""
        ...


class RollingUpdate:
    """One update of all replicas.

    Each new engine starts and computes a trial request beside the old one, which goes on meanwhile. Then the requests of the
    old one move to other replicas, the new one takes its place, and the old one ends. Whatever goes wrong before that ends
    the update: the old engine stays.

    Args:
        make: makes the clients of new engines.
    """

    def __init__(self, replicas: UpdatableReplicas, make: MakeClient) -> None:
        self._replicas, self._make = replicas, make
        self._num_updated = 0
        self._is_running = True
        self._error = ""

    @property
    def progress(self) -> UpdateProgress:
        """How far it is."""
        return UpdateProgress(self._num_updated, self._replicas.num_replicas, self._is_running, self._error)

    async def run(self) -> None:
        """Updates the replicas in their order; ends early if one cannot be updated."""
        try:
            for index in range(self._replicas.num_replicas):
                await self._update(index)
                self._num_updated += 1
                _logger.info("replica %d has a new engine", index)
        except CloisterError as error:
            self._error = f"replica {index}: {error.message}"
            _logger.error("the update ends, and the other engines stay: %s", self._error)
        except Exception as error:
            self._error = f"replica {index}: {describe(error)}"
            _logger.critical("the update failed, and the other engines stay: %s", self._error)
        finally:
            self._is_running = False

    async def _update(self, index: int) -> None:
        client = self._make(index, self._replicas.adapter_setting())
        try:
            await client.start()
            await self._check(client)
            old = await self._exchange(index, client)
        except BaseException:
            await client.drain(0.0)
            raise
        await old.drain(0.0)

    async def _check(self, client: EngineClient) -> None:
        """Has a new engine compute a request, which also warms it up. Raises EngineError if it is no copy of the others."""
        model = self._replicas.model
        if client.model.fingerprint != model.fingerprint:
            raise EngineError(
                f"the new engine has the fingerprint {client.model.fingerprint}, not {model.fingerprint}: weights or formats "
                "differ, and answers would too. Start another server for it, and send requests there"
            )
        if model.encoder is not None:
            return
        request = make_trial(model)
        answer = await compute_answer(client, request)
        if answer is None:
            raise EngineError("the new engine did not compute a trial request; the log may say why")
        reference = await self._replicas.compute_reference(request)
        if reference is not None and answer != reference:
            raise EngineError("the new engine computed other tokens than a running one for a trial request")

    async def _exchange(self, index: int, client: EngineClient) -> EngineClient:
        """Moves the requests of a replica away and gives it the new engine; returns the client of the old one."""
        was_drained = self._replicas.is_drained(index)
        try:
            num_left = await self._replicas.drain_replica(index)
            if num_left:
                raise EngineError(f"no other replica had room for {num_left} of its requests; update it again under less load")
            return self._replicas.put_client(index, client)
        finally:
            if not was_drained:
                self._replicas.return_replica(index)


def make_trial(model: ModelInfo) -> Request:
    """Returns a short greedy request, in a scope of its own."""
    num_tokens = max(1, min(_TRIAL_PROMPT_TOKENS, model.max_model_len - _TRIAL_TOKENS))
    return Request(
        request_id=f"trial-{secrets.token_hex(8)}",
        token_ids=[token_id % model.vocab_size for token_id in range(num_tokens)],
        sampling=SamplingParams(temperature=0.0, max_tokens=min(_TRIAL_TOKENS, model.max_model_len - 1), ignore_eos=True),
        scope=Scope(ScopeKind.REQUEST, secrets.token_bytes(16)),
        timeout_s=TRIAL_TIMEOUT_S,
    )
