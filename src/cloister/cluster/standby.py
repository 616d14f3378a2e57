"""Standby replicas: ready, and without requests until another replica is lost. Pure: no clock, no I/O; randomness is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from cloister.engine.replica_snapshot import NOT_WELL, ReplicaSnapshot, ReplicaState

GONE: Final[frozenset[ReplicaState]] = frozenset({"lost", "starting"})


@dataclass(frozen=True, slots=True)
class Promotion:
    """A standby replica takes the place and the role of a lost one, which becomes the standby."""

    index: int
    lost: int


class StandbyKeeper:
    """Promotes standby replicas to replace those whose engine is lost.

    They swap places: the restarted engine of the lost replica becomes the standby, so nothing moves back. A replica that is
    slow, or hangs and is not replaced yet, is not lost.

    Args:
        draw: chooses among standby replicas, so that nobody can predict which one gets the requests of a killed replica.
    """

    def __init__(self, draw: Random) -> None:
        self._draw = draw

    def decide(self, replicas: Sequence[ReplicaSnapshot]) -> list[Promotion]:
        """Returns the promotions that are due.

        Args:
            replicas: all that are not drained.
        """
        ready = _find_ready(replicas)
        lost = [replica.index for replica in replicas if not replica.is_standby and replica.state in GONE]
        chosen = self._draw.sample(ready, min(len(ready), len(lost)))
        return [Promotion(index, gone) for index, gone in zip(chosen, lost, strict=False)]

    def choose(self, replicas: Sequence[ReplicaSnapshot]) -> int | None:
        """Returns a ready standby replica; None if there is none."""
        ready = _find_ready(replicas)
        return self._draw.choice(ready) if ready else None


def can_take_over(replica: ReplicaSnapshot) -> bool:
    """Whether a replica could serve requests alone. A standby replica is promoted only when it is ready."""
    return replica.state == "standby" if replica.is_standby else replica.state not in NOT_WELL


def _find_ready(replicas: Sequence[ReplicaSnapshot]) -> list[int]:
    return [replica.index for replica in replicas if replica.is_standby and replica.state == "standby"]
