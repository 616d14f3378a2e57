"""A replica is drawn at random, by capacity. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cloister.cluster.routers.base import ROUTER_THREAT, ROUTERS, Router, RouterContext, draw_by_capacity
from cloister.engine.replica_snapshot import ReplicaSnapshot
from cloister.types.request import Request


@ROUTERS.register("capacity_random", ROUTER_THREAT)
class CapacityRandom(Router):
    """The choice depends on nothing that a request or its sender can influence, so it cannot be steered: the probability that a
    request reaches a subset of the replicas is that subset's share of the capacity."""

    is_blind = True

    def __init__(self, context: RouterContext) -> None:
        self._draw = context.draw

    def pick(self, request: Request, replicas: Sequence[ReplicaSnapshot]) -> int:
        return draw_by_capacity(replicas, self._draw).index
