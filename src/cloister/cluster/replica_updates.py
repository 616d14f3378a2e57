"""Performs rolling updates on the replicas of a set."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine

import msgspec

from cloister.cluster.action_log import ActionLog
from cloister.cluster.replay import Answer, ReplayVerifier
from cloister.cluster.replica_adapters import ReplicaAdapters
from cloister.cluster.replica_drains import ReplicaDrains
from cloister.cluster.replica_scaling import ReplicaScaling
from cloister.cluster.replica_states import ReplicaStates
from cloister.cluster.rolling_update import EngineRelease, RollingUpdate
from cloister.engine.client import EngineClient
from cloister.engine.replica_snapshot import UpdateProgress
from cloister.engine.request_client import DRAIN_REPLICA_S
from cloister.types.errors import InvalidRequestError
from cloister.types.request import ModelInfo, Request


class ReplicaUpdates:
    """The updates of a replica set, one at a time (protocol `cluster.rolling_update.UpdatableReplicas`).

    Args:
        release: what the clients were made of; None if there can be no update.
        make_release: called for each update with the setting `model`, returns what makes clients of new engines.
        connect: called with (index, client) when a replica has a new client.
        forget: called with the index of a replica whose engine is gone.
        begin: begins a task of this name, which ends with the replica set.
        draw: of ids and scopes; it must be secure where others send requests.

    Attributes:
        scaling: what adds and removes replicas; None if all run.
    """

    def __init__(
        self,
        states: ReplicaStates,
        drains: ReplicaDrains,
        verifier: ReplayVerifier,
        adapters: ReplicaAdapters,
        actions: ActionLog,
        release: EngineRelease | None,
        make_release: Callable[[str], EngineRelease] | None,
        connect: Callable[[int, EngineClient], None],
        forget: Callable[[int], None],
        begin: Callable[[Coroutine[None, None, None], str], None],
        draw: random.Random,
    ) -> None:
        self._states, self._clients, self._drains = states, states.clients, drains
        self._verifier, self._adapters, self._actions = verifier, adapters, actions
        self._release, self._make_release = release, make_release
        self._connect, self._forget, self._begin = connect, forget, begin
        self._draw = draw
        self.scaling: ReplicaScaling | None = None
        self._lent: set[int] = set()
        self._update: RollingUpdate | None = None

    def make(self, model: str | None) -> RollingUpdate:
        """Returns an update, which is to be run next (`run`). Raises InvalidRequestError if there can be none now."""
        if self._make_release is None or self._release is None:
            raise InvalidRequestError("these replicas cannot be updated; start another server, and send requests there")
        if self.is_running:
            raise InvalidRequestError("an update is under way; `cloister cluster status` shows its progress")
        if self._adapters.are_changing:
            raise InvalidRequestError("an adapter is being loaded or unloaded; update when that has ended")
        release = self._make_release(self._release.model if model is None else model)
        self._update = RollingUpdate(self, release, None if model is None else self._release, self._draw)
        self._actions.note_update()
        self._adapters.are_fixed = True
        return self._update

    async def run(self, update: RollingUpdate) -> None:
        """Runs an update."""
        try:
            if self.scaling is not None:
                await self.scaling.settle()
            await update.run()
        finally:
            self._adapters.are_fixed = False
        if not update.progress.error:
            self._release = update.release

    @property
    def progress(self) -> UpdateProgress | None:
        """As `RequestClient.update_progress`."""
        return None if self._update is None else self._update.progress

    @property
    def is_running(self) -> bool:
        """Whether an update is under way."""
        return self._update is not None and self._update.progress.is_running

    @property
    def model(self) -> ModelInfo:
        return self._states.model

    @property
    def num_replicas(self) -> int:
        return len(self._clients)

    def adapter_setting(self) -> str | None:
        return self._adapters.as_setting()

    async def drain_replica(self, index: int, timeout_s: float = DRAIN_REPLICA_S) -> int:
        if index in self._states.stopped:
            return 0
        if index in self._lent:  # it goes again when fewer are enough
            self._lent.discard(index)
            return 0
        return await self._drains.drain(index, timeout_s, for_update=True)

    def is_drained(self, index: int) -> bool:
        return index in self._states.draining | self._states.stopped

    async def return_replica(self, index: int) -> None:
        if self.scaling is not None and index in self._states.stopped:
            self._lent.add(index)
            await self.scaling.add(index)
        else:
            self._drains.give_back(index)

    def num_lost(self, index: int) -> int:
        return self._clients[index].num_lost

    def prefer_weights(self, model: ModelInfo) -> None:
        self._states.model, self._states.preferred_weights = model, model.fingerprint

    async def compute_reference(self, request: Request) -> Answer | None:
        well = [snapshot for snapshot in self._states.snapshots() if snapshot.is_accepting and not snapshot.is_idle]
        for snapshot in sorted(well, key=lambda snapshot: snapshot.num_requests):
            request_id = f"trial-{self._draw.getrandbits(64):016x}"
            answer = await self._verifier.compute(msgspec.structs.replace(request, request_id=request_id), snapshot.index)
            if answer is not None:
                return answer
        return None

    def put_client(self, index: int, client: EngineClient) -> EngineClient:
        old, self._clients[index] = self._clients[index], client
        old.detach()
        # the counts of a replica go on: a counter that falls hides requests from a reader who comes now and then
        self._states.num_routed_before[index] += old.snapshot().num_routed - client.snapshot().num_routed
        self._states.num_restarts_before[index] += old.num_restarts - client.num_restarts
        self._connect(index, client)
        self._forget(index)
        self._verifier.suspicious.discard(index)
        if index in self._states.stopped:
            self._begin(_end_engine(client), "end of an engine that is not needed")
        return old


async def _end_engine(client: EngineClient) -> None:
    await client.rest()
