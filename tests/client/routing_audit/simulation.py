"""Logs of trials that never ran: clients that draw, and a middleman with a rule. For the arithmetic only."""

from __future__ import annotations

import random
from collections.abc import Callable

from cloister.client.node_selection import MAX_DRAWS
from cloister.client.routing_audit.records import Sent, Spell, TrialLog

Rule = Callable[[random.Random, str, str], bool]
"""Takes (random source, user, node drawn) and says whether the draw is lost."""

SPELLS = (
    Spell({"a": 1, "b": 2, "c": 1}),
    Spell({"a": 1, "b": 2, "c": 1, "d": 2}),
    Spell({"b": 2, "c": 1, "d": 2}, frozenset({"b"})),
)


def simulate(seed: int, lost: Rule, *, users: int = 10, requests: int = 600) -> TrialLog:
    """Returns the log of `requests` requests of each user, spread evenly over three spells."""
    source = random.Random(seed)
    sent = []
    for number in range(users * requests):
        spell = number * len(SPELLS) // (users * requests)
        sent.append(_send(source, f"user {number % users}", spell, lost))
    return TrialLog(SPELLS, tuple(sent))


def _send(source: random.Random, user: str, spell: int, lost: Rule) -> Sent:
    capacities, down = SPELLS[spell].capacities, SPELLS[spell].down
    draws: list[str] = []
    while len(draws) < MAX_DRAWS:
        draws += source.choices(list(capacities), list(capacities.values()))
        if draws[-1] not in down and not lost(source, user, draws[-1]):
            return Sent(user, spell, tuple(draws), True, (draws[-1],))
    return Sent(user, spell, tuple(draws), False, ())


def nothing(source: random.Random, user: str, node: str) -> bool:
    """Nobody interferes."""
    return False


def chance(rate: float) -> Rule:
    """A network that loses a part of everything."""
    return lambda source, user, node: source.random() < rate


def against(user: str, rate: float, captured: str = "c") -> Rule:
    """Requests of one user are lost unless they are for the captured node."""
    return lambda source, who, node: who == user and node != captured and source.random() < rate
