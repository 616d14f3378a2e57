"""Threat profiles: what a feature endangers, what it leaves behind, and under which conditions it is allowed.

Every object that is registered under a name (`types.registry`) brings one; without it, it cannot be registered.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Requirement(StrEnum):
    """The five requirements of private cloud compute, in the letters used everywhere."""

    STATELESS = "S"
    ENFORCEABLE = "E"
    NO_PRIVILEGED_ACCESS = "P"
    NON_TARGETABLE = "T"
    VERIFIABLE = "V"


@dataclass(frozen=True, slots=True)
class ThreatProfile:
    """What one feature endangers.

    Attributes:
        row: the row of the threat matrix it belongs to, such as "prefix cache".
        threats: requirements that the feature endangers; empty when none.
        residue: state that stays after a request, in words; empty when none.
        where: places that hold the residue, such as ("device memory",).
        attack: what somebody could do with it.
        mitigations: what must hold for the feature to be allowed.
    """

    row: str
    threats: frozenset[Requirement] = frozenset()
    residue: str = ""
    where: tuple[str, ...] = ()
    attack: str = ""
    mitigations: tuple[str, ...] = ()
