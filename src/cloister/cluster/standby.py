"""Replicas that are ready and get no requests until another one is lost. Pure: no clock, no I/O; randomness is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from cloister.engine.replica_snapshot import NOT_WELL, ReplicaSnapshot, ReplicaState

GONE: Final[frozenset[ReplicaState]] = frozenset({"lost", "starting"})


@dataclass(frozen=True, slots=True)
class Promotion:
    """A replica that stood by takes the place and the role of one that is gone, which stands by from then on."""

    index: int
    lost: int


class StandbyKeeper:
    """Has replicas that stand by take the place of those whose engine is gone.

    They change places: the engine that is started in place of the lost one stands by, so nothing moves back. A replica that is
    slow, or hangs and is not replaced yet, is not gone.

    Args:
        draw: chooses among those that stand by, so that nobody knows which one gets the requests of a replica that is killed.
    """

    def __init__(self, draw: Random) -> None:
        self._draw = draw

    def decide(self, replicas: Sequence[ReplicaSnapshot]) -> list[Promotion]:
        """Returns who takes whose place now.

        Args:
            replicas: all that are not drained.
        """
        ready = _find_ready(replicas)
        lost = [replica.index for replica in replicas if not replica.is_standby and replica.state in GONE]
        chosen = self._draw.sample(ready, min(len(ready), len(lost)))
        return [Promotion(index, gone) for index, gone in zip(chosen, lost, strict=False)]

    def choose(self, replicas: Sequence[ReplicaSnapshot]) -> int | None:
        """Returns one that is ready; None if none is."""
        ready = _find_ready(replicas)
        return self._draw.choice(ready) if ready else None


def can_take_over(replica: ReplicaSnapshot) -> bool:
    """Whether requests can go to a replica once no other one is left. One that stands by is only promoted when ready."""
    return replica.state == "standby" if replica.is_standby else replica.state not in NOT_WELL


def _find_ready(replicas: Sequence[ReplicaSnapshot]) -> list[int]:
    return [replica.index for replica in replicas if replica.is_standby and replica.state == "standby"]
