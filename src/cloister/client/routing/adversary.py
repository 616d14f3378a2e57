"""Gateways that steer: the real gateway with another book of nodes, since where a request goes is all that it can choose.

It cannot open what is sealed to a node, nor make one for a node that was not drawn. So it may deliver a request to a node
that was not drawn, where it does not open, or say that the drawn node is away; either way the client draws again. It may also
pick its victim: the trial tells it who asks, as a relay would that colludes with it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from cloister.client.routing.cloud import MakeBook, SealedCloud, current_user
from cloister.client.routing.records import Attack
from cloister.private.nodes import NodeBook
from cloister.private.upstream import Upstream


class SteeringBook(NodeBook):
    """A book of nodes that lies about some of them to somebody.

    Args:
        rate: part of the requests that it lies about.
        captured: the name of the captured node, which gets its requests.
        is_victim: who is lied to.
    """

    def __init__(
        self,
        cloud: SealedCloud,
        upstream: Upstream,
        attack: Attack,
        *,
        rate: float,
        captured: str,
        is_victim: Callable[[str], bool],
        source: random.Random,
    ) -> None:
        super().__init__([], upstream, cloud.now)
        self._cloud, self._attack, self._rate = cloud, attack, rate
        self._captured, self._is_victim, self._source = captured, is_victim, source

    async def find(self, node_id: str) -> str | None:
        honest = await super().find(node_id)
        captured = self._cloud.nodes.get(self._captured)
        if captured is None or honest == captured.url or not self._is_victim(current_user.get()):
            return honest
        if self._source.random() >= self._rate:
            return honest
        return captured.url if self._attack is Attack.STEER else None


def make_adversary(attack: Attack, *, rate: float, captured: str, victim: str | None, seed: int | None) -> MakeBook | None:
    """Returns what makes the adversary's book of nodes; None for no attack.

    Args:
        victim: whose requests; None for everybody's.
        seed: of its choices; None takes one of the system's.
    """
    if attack is Attack.NONE:
        return None

    def make(cloud: SealedCloud, upstream: Upstream) -> NodeBook:
        return SteeringBook(
            cloud,
            upstream,
            attack,
            rate=rate,
            captured=captured,
            is_victim=lambda user: victim is None or user == victim,
            source=random.Random(seed),
        )

    return make
