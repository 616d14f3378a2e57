"""Join the shortest queue (Winston 1977). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cloister.cluster.routers.base import ROUTER_THREAT, ROUTERS, RouterContext, least_loaded
from cloister.engine.replica_snapshot import ReplicaSnapshot
from cloister.types.request import Request


@ROUTERS.register("least_load", ROUTER_THREAT)
class LeastLoad:
    """A request goes to the replica with the fewest requests; of equal ones to that with the fewest pending prompt tokens."""

    def __init__(self, context: RouterContext) -> None:
        pass

    def pick(self, request: Request, replicas: Sequence[ReplicaSnapshot]) -> int:
        return least_loaded(replicas).index

    def forget(self, index: int) -> None:
        """Nothing is kept."""
