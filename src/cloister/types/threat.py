"""Threat profiles: the requirements that a feature endangers, its residue, and the conditions under which it is allowed.

An object can be registered under a name (`types.registry`) only with a threat profile.
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
    """The threats of one feature.

    Attributes:
        row: the row of the threat matrix it belongs to, such as "prefix cache".
        threats: requirements that the feature endangers; empty when none.
        residue: state that stays after a request, in words; empty when none.
        where: places that hold the residue, such as ("device memory",).
        attack: what an attacker could do with it.
        mitigations: the conditions for allowing the feature.
    """

    row: str
    threats: frozenset[Requirement] = frozenset()
    residue: str = ""
    where: tuple[str, ...] = ()
    attack: str = ""
    mitigations: tuple[str, ...] = ()
