"""Draws one node by capacity. The client alone decides, so no other party can influence the draw.

Pure but for the random source, which is the operating system's unless another one is given.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from cloister.types.errors import ConfigError
from cloister.types.threat import Requirement, ThreatProfile

MAX_DRAWS = 3
"""One draw and at most two retries: each costs a token, and gives an attacker who withholds answers another chance."""

DRAW_THREAT = ThreatProfile(
    row="machine-level scheduler",
    threats=frozenset({Requirement.ENFORCEABLE, Requirement.NON_TARGETABLE}),
    attack="withheld or misdelivered requests, which make a client draw again: 1 - (1 - t)^3 in place of t",
    mitigations=(
        "the client alone draws, by capacity, over a membership that a release key signed",
        "sealed to the node that was drawn",
        "two retries at most, each a new draw",
    ),
)

Below = Callable[[int], int]
"""Returns an integer drawn evenly from 0 <= x < n, as `secrets.randbelow` does."""


class HasCapacity(Protocol):
    """What can be drawn: anything with a whole, positive capacity."""

    @property
    def capacity(self) -> int: ...


Drawn = TypeVar("Drawn", bound=HasCapacity)


def draw(nodes: Sequence[Drawn], below: Below = secrets.randbelow) -> Drawn:
    """Returns one node with probability capacity / sum of capacities, exactly (integers, no rounding).

    Nothing else matters: not the user, not the content, not which nodes answered before. A retry draws again from the same
    list, including the node that failed: excluding it would let a gateway that withholds answers steer requests. With one of
    three nodes captured every request would end there, and none would fail; now 70% do, and 30% fail, which users notice.

    Raises:
        ConfigError: there is no node, or a capacity is not positive.
    """
    if not nodes:
        raise ConfigError("the epoch file names no node; wait for the next one")
    if any(node.capacity <= 0 for node in nodes):
        raise ConfigError("a node's capacity in the epoch file is not positive")
    at = below(sum(node.capacity for node in nodes))
    for node in nodes:
        at -= node.capacity
        if at < 0:
            return node
    raise AssertionError("the random source gave a number out of its range")


def bound_capture(share: float, draws: int = MAX_DRAWS) -> float:
    """Returns the probability that captured nodes get one request if an attacker withholds answers.

    An attacker who controls the gateway and nodes with `share` of the capacity can make every draw of an honest node fail. The
    client draws at most `draws` times in all, so at least one draw hits a captured node with probability 1 - (1 - t)^draws.
    Without withheld answers it is `share`. Such failures are detectable: `cloister verify routing` finds them.

    Args:
        share: captured share t of the capacity, 0 to 1.
        draws: maximum number of draws.
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError("a share is between 0 and 1")
    return float(1.0 - (1.0 - share) ** draws)
