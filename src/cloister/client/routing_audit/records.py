"""Records of a routing trial: the user of each request, the nodes drawn for it, and the node that opened it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Attack(StrEnum):
    """Attacks of a gateway on a fraction of the victim's requests for nodes that are not captured."""

    NONE = "none"
    STEER = "steer"
    """Delivers them to the captured node."""
    DROP = "drop"
    """Claims that the drawn node is unreachable."""


@dataclass(frozen=True)
class Spell:
    """A period in which the nodes did not change.

    Attributes:
        capacities: node name -> capacity, from the epoch file of that period.
        down: names of nodes in it that were down, by their own report; draws of those fail legitimately.
    """

    capacities: Mapping[str, int]
    down: frozenset[str] = frozenset()

    def share(self, captured: Collection[str]) -> float:
        """Returns the captured share of the capacity: the probability for one draw."""
        return sum(c for name, c in self.capacities.items() if name in captured) / sum(self.capacities.values())

    def share_of_up(self, captured: Collection[str]) -> float:
        """Returns the captured share among nodes that were up: the probability for an opened request."""
        up = {name: capacity for name, capacity in self.capacities.items() if name not in self.down}
        return sum(c for name, c in up.items() if name in captured) / sum(up.values())


@dataclass(frozen=True)
class Sent:
    """One request of one user.

    Attributes:
        user: the sender.
        spell: number of the spell in which it was sent, begun and ended.
        draws: names of the nodes that the client drew, in order; all but the last failed, as the client saw it.
        answered: whether the last draw brought an answer.
        opened: the nodes that report having opened it: one, without interference.
    """

    user: str
    spell: int
    draws: tuple[str, ...]
    answered: bool
    opened: tuple[str, ...]

    def losses(self, down: Collection[str]) -> list[tuple[str, bool]]:
        """Returns each draw of a node that was up, and whether it got no answer."""
        brought = [False] * (len(self.draws) - 1) + [self.answered]
        return [(node, not answered) for node, answered in zip(self.draws, brought, strict=True) if node not in down]


@dataclass(frozen=True)
class TrialLog:
    """A whole trial.

    Attributes:
        strays: requests that reached a node which could not open them: delivered to a node that was not drawn.
    """

    spells: tuple[Spell, ...]
    sent: tuple[Sent, ...]
    strays: int = 0

    def users(self) -> list[str]:
        """Returns all users, sorted."""
        return sorted({request.user for request in self.sent})

    def nodes(self) -> list[str]:
        """Returns all nodes of all spells, sorted."""
        return sorted({name for spell in self.spells for name in spell.capacities})
