"""Replicas take turns. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cloister.cluster.routers.base import ROUTER_THREAT, ROUTERS, Router, RouterContext
from cloister.engine.replica_snapshot import ReplicaSnapshot
from cloister.types.request import Request


@ROUTERS.register("round_robin", ROUTER_THREAT)
class RoundRobin(Router):
    """Each request goes to the next replica, whatever its load."""

    def __init__(self, context: RouterContext) -> None:
        self._last = -1

    def pick(self, request: Request, replicas: Sequence[ReplicaSnapshot]) -> int:
        later = [replica.index for replica in replicas if replica.index > self._last]
        self._last = min(later) if later else min(replica.index for replica in replicas)
        return self._last
