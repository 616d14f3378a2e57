"""Join the shortest queue (Winston 1977). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cloister.cluster.routers.base import ROUTER_THREAT, ROUTERS, Router, RouterContext, draw_least, load_of
from cloister.engine.replica_snapshot import ReplicaSnapshot
from cloister.types.request import Request


@ROUTERS.register("least_load", ROUTER_THREAT)
class LeastLoad(Router):
    """A request goes to the replica with the fewest requests; of equal ones to that with the fewest pending prompt tokens. Of
    replicas that are equal in both one is drawn."""

    def __init__(self, context: RouterContext) -> None:
        self._draw = context.draw

    def pick(self, request: Request, replicas: Sequence[ReplicaSnapshot]) -> int:
        return draw_least(replicas, load_of, self._draw).index
