"""Join the replica in which a slot is free soonest, by predicted lengths of answers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cloister.cluster.routers.base import ROUTER_THREAT, ROUTERS, Router, RouterContext, draw_least, leave_out_busy, load_of
from cloister.engine.replica_snapshot import ReplicaSnapshot
from cloister.types.request import Request


@ROUTERS.register("least_work", ROUTER_THREAT)
class LeastWork(Router):
    """While slots are free, a request goes to the replica with the fewest requests, as by `least_load`: they all share its
    steps, long ones and short ones. Where every slot is taken, what counts is when the first one becomes free, so it goes where
    that is soonest, by the tokens that answers are expected to get yet.

    A replica with far more requests than another one is left out, however short its answers are said to be. Of replicas that
    are equal one is drawn.
    """

    predicts_lengths = True

    def __init__(self, context: RouterContext) -> None:
        self._draw = context.draw

    def pick(self, request: Request, replicas: Sequence[ReplicaSnapshot]) -> int:
        return draw_least(leave_out_busy(replicas), _work_of, self._draw).index


def _work_of(replica: ReplicaSnapshot) -> tuple[float, float, float]:
    return replica.num_steps_to_slot / replica.capacity, *load_of(replica)
