"""The joint judgement over all hypotheses. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from cloister.client.routing.hypotheses import HypothesisResult, examine
from cloister.client.routing.records import TrialLog
from cloister.client.routing.tails import holm

HONEST_ABOVE = 1e-4
"""Honest routing is called dishonest once in ten thousand trials, or less: Holm's correction holds for all tests together."""


@dataclass(frozen=True)
class RoutingVerdict:
    """What a trial showed.

    Attributes:
        p_value: the smallest p-value, corrected by Holm for the number of tests.
        worst: the findings with the smallest corrected p-values, smallest first, and those p-values.
        tests: how many hypotheses.
        strays: requests that reached a node which could not open them.
    """

    p_value: float
    worst: tuple[tuple[HypothesisResult, float], ...]
    tests: int
    strays: int

    @property
    def honest(self) -> bool:
        """Whether nothing speaks against routing by capacity alone."""
        return self.p_value > HONEST_ABOVE


def judge(log: TrialLog, worst: int = 5) -> RoutingVerdict:
    """Tests every hypothesis and corrects for their number."""
    findings = examine(log)
    corrected = holm(finding.p_value for finding in findings)
    pairs = sorted(zip(findings, corrected, strict=True), key=lambda pair: (pair[1], pair[0].p_value))
    return RoutingVerdict(pairs[0][1] if pairs else 1.0, tuple(pairs[:worst]), len(findings), log.strays)
