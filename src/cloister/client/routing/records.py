"""What a routing trial saw: whose request, which nodes were drawn for it, which node opened it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Attack(StrEnum):
    """What a gateway might do to a part of the victim's requests for nodes that are not captured."""

    NONE = "none"
    STEER = "steer"
    """Delivers them to the captured node."""
    DROP = "drop"
    """Says that the node that was drawn is away."""


@dataclass(frozen=True)
class Spell:
    """A time in which nothing about the nodes changed.

    Attributes:
        capacities: node name to capacity, as the epoch file of that time says it.
        down: names of nodes in it that were away, as they themselves say; draws of those fail honestly.
    """

    capacities: Mapping[str, int]
    down: frozenset[str] = frozenset()

    def share(self, captured: Collection[str]) -> float:
        """Returns the captured share of the capacity: the chance of one draw."""
        return sum(c for name, c in self.capacities.items() if name in captured) / sum(self.capacities.values())

    def share_of_up(self, captured: Collection[str]) -> float:
        """Returns the captured share among nodes that were up: where a request that was opened went."""
        up = {name: capacity for name, capacity in self.capacities.items() if name not in self.down}
        return sum(c for name, c in up.items() if name in captured) / sum(up.values())


@dataclass(frozen=True)
class Sent:
    """One request of one user.

    Attributes:
        user: who asked.
        spell: number of the spell in which it was sent, begun and ended.
        draws: names of the nodes that the client drew, in order; all but the last failed, as the client saw it.
        answered: whether the last draw brought an answer.
        opened: the nodes that opened it, by their own account: one, if nobody interferes.
    """

    user: str
    spell: int
    draws: tuple[str, ...]
    answered: bool
    opened: tuple[str, ...]

    def losses(self, down: Collection[str]) -> list[tuple[str, bool]]:
        """Returns each draw of a node that was up, and whether it brought no answer."""
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
        """Returns who asked, sorted."""
        return sorted({request.user for request in self.sent})

    def nodes(self) -> list[str]:
        """Returns every node that was ever there, sorted."""
        return sorted({name for spell in self.spells for name in spell.capacities})
