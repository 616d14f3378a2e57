"""Gateways that steer requests: the real gateway with a manipulated node book, since the target is all that it controls.

It cannot open requests that are sealed to a node, nor reseal them for another. So it can deliver a request to a node that was
not drawn, where it does not open, or claim that the drawn node is down; in both cases the client draws again. It can also
select victims: the trial reveals the client's identity to it, as a colluding relay would.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from cloister.client.routing_audit.cloud import MakeBook, SealedCloud, current_user
from cloister.client.routing_audit.records import Attack
from cloister.private.nodes import NodeBook
from cloister.private.upstream import Upstream


class SteeringBook(NodeBook):
    """A node book that gives victims wrong addresses.

    Args:
        rate: fraction of the requests that it misdirects.
        captured: name of the captured node, which gets its own requests.
        is_victim: whether a user is a victim.
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
    """Returns a factory of the adversary's node book; None for no attack.

    Args:
        victim: the attacked user; None for all.
        seed: seed of its choices; None uses the system's randomness.
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
