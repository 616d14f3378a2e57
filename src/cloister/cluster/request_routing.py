"""Routes requests to replicas: new ones, and those that move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cloister.cluster.replica_states import ReplicaStates
from cloister.cluster.roles import RoleRouter, RoutingDecision
from cloister.cluster.routers import Router
from cloister.engine.in_flight import InFlightRequest
from cloister.engine.replica_snapshot import ReplicaSnapshot
from cloister.types.errors import EngineError, QueueFullError
from cloister.types.request import ModelInfo, Request

ALL_DRAINED: Final = "every replica is being drained; send the request again later"

MakeRouter = Callable[[ModelInfo], Router]


class RequestRouting:
    """Routes the requests of a replica set.

    Args:
        make_router: makes a router for a model; called twice, for prefill and for decode.
        block_size: tokens of a KV block.
    """

    def __init__(self, states: ReplicaStates, make_router: MakeRouter, block_size: int) -> None:
        self._states, self._make_router, self._block_size = states, make_router, block_size
        self._router: RoleRouter | None = None

    def connect(self, model: ModelInfo) -> None:
        """Makes the routers."""
        self._router = RoleRouter(self._make_router(model), self._make_router(model), self._block_size)

    @property
    def predicts_lengths(self) -> bool:
        """Whether routing uses predicted answer lengths."""
        return self._router is not None and self._router.predicts_lengths

    def place(self, request: Request) -> RoutingDecision:
        """Returns the placement of a new request; if no replica accepts it, one that will refuse it with the reason.

        Raises:
            QueueFullError: the router refuses the request.
            EngineError: every replica is drained.
        """
        accepting = self._leave_full(request.tenant, self._states.candidates())
        if accepting and self._router is not None:
            return self._router.place(request, _as_met_by(request, accepting))
        clients = self._states.clients
        others = [i for i in range(len(clients)) if i not in self._states.unavailable]
        running = [i for i in others if clients[i].closed is None]
        if not others:
            raise EngineError(ALL_DRAINED)
        return RoutingDecision(running[0] if running else others[0])

    def _leave_full(self, tenant: str, accepting: list[ReplicaSnapshot]) -> list[ReplicaSnapshot]:
        """Returns the replicas in whose queues a tenant has not used up its share; all if a role were missing otherwise, whose
        work the others would do."""
        left = [each for each in accepting if self._states.clients[each.index].has_room_for(tenant)]
        return left if {each.role for each in left} == {each.role for each in accepting} else accepting

    def find_place(
        self, found: InFlightRequest, excluding: int | None = None, among: list[ReplicaSnapshot] | None = None
    ) -> RoutingDecision | None:
        """Returns where an accepted request can continue; None if nowhere.

        Args:
            excluding: index of a replica that is left out.
            among: candidates, whether they accept requests or not; None: `ReplicaStates.candidates`.
        """
        accepting = self._states.candidates(found, excluding) if among is None else among
        if self._router is None or not accepting:
            return None
        accepting = _as_met_by(found.request, accepting)
        if found.has_output and (index := self._router.place_decode(found.request, accepting)) is not None:
            return RoutingDecision(index)
        try:
            return self._router.place(found.request, accepting)
        except QueueFullError:
            return None  # it was accepted earlier: it waits where it is

    def place_decode(self, request: Request, replicas: list[ReplicaSnapshot]) -> int | None:
        """Returns where a request goes on that has its first token; None if none of `replicas` computes answers."""
        return None if self._router is None else self._router.place_decode(request, _as_met_by(request, replicas))

    def note_copy(self, request: Request, index: int) -> None:
        """Called when a replica has loaded KV of a request's prompt from another one, and keeps it."""
        if self._router is not None:
            self._router.note_copy(request, self._states.snapshot(index))

    def forget(self, index: int) -> None:
        """Called when a replica's engine has ended."""
        if self._router is not None:
            self._router.forget(index)


def _as_met_by(request: Request, replicas: list[ReplicaSnapshot]) -> list[ReplicaSnapshot]:
    """Returns the loads that a request meets: beam searches that wait for their share delay other searches only."""
    if request.sampling.beams is not None:
        return replicas
    return [replica.without_held() for replica in replicas]
