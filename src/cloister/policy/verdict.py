"""Verdicts of a profile on rows of the threat matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from cloister.types.threat import ThreatProfile


class Profile(StrEnum):
    """Privacy profiles, from the most open to the strictest."""

    OPEN = "open"
    TEAM = "team"
    PRIVATE = "private"
    PARANOID = "paranoid"


class Verdict(StrEnum):
    """How a profile treats a feature."""

    ALLOWED = "allowed"
    MITIGATED = "mitigated"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Ruling:
    """The verdict of one profile on one feature.

    Attributes:
        rule: its name, such as `T6.prefix-cache.paranoid`.
        text: ALLOWED: why there is no condition. MITIGATED: the condition. REFUSED: the reason.
    """

    rule: str
    verdict: Verdict
    text: str


Judgement = tuple[Verdict, str]
"""A verdict and its text, without a rule name."""


def allow(text: str) -> Judgement:
    return Verdict.ALLOWED, text


def mitigate(text: str) -> Judgement:
    return Verdict.MITIGATED, text


def refuse(text: str) -> Judgement:
    return Verdict.REFUSED, text


def name_rulings(subject: str, judgements: Mapping[Profile, Judgement]) -> dict[Profile, Ruling]:
    """Returns a ruling per profile, named `T6.<subject>.<profile>`."""
    return {profile: Ruling(f"T6.{subject}.{profile}", verdict, text) for profile, (verdict, text) in judgements.items()}


@dataclass(frozen=True, slots=True)
class Residue:
    """The state that a feature leaves, and the kinds of attack that it enables (taxonomy of residue).

    Attributes:
        leak, inference, access_pattern, difference: kinds of attack on the state.
    """

    feature: str
    state: str
    where: tuple[str, ...]
    mitigation: str
    leak: bool = False
    inference: bool = False
    access_pattern: bool = False
    difference: bool = False


@dataclass(frozen=True, slots=True)
class Steering:
    """How a feature could steer a target's requests to captured nodes; an empty text means that it cannot do so in this way."""

    feature: str
    raises_hits: str
    lowers_misses: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the matrix: the threats of a kind of feature, and each profile's ruling.

    Attributes:
        slug: the row's part in the names of its rules.
        threat: threats, residue and mitigation; `threat.row` is the row's name, which features point to.
        rulings: one for every profile.
        threat_note: when a threat holds only together with another feature.
        residue, steering: its entry in the published taxonomies; None if they omit it.
    """

    slug: str
    threat: ThreatProfile
    rulings: Mapping[Profile, Ruling]
    threat_note: str = ""
    residue: Residue | None = None
    steering: Steering | None = None

    @property
    def name(self) -> str:
        return self.threat.row
