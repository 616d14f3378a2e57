"""Null hypotheses of honest routing, each with an exact p-value, and the verdict over all. Pure.

Four families, for every user and every set of nodes that might be captured:

- draw: first draws fall into T as often as its share of the capacity (a sum of binomials, one per spell). This checks the
client.
- nodes: per user, first draws over all nodes at once (chi-square), if there are too many sets to list.
- land: the number of requests that nodes in T report as opened matches T's share. This is P(u in R(T)).
- loss: draws without an answer are distributed over users in proportion to their draws, and over T in proportion to its draws
  (hypergeometric, per spell). It needs no loss rate of an honest network, and is the most powerful: it detects withheld or
  misdelivered requests of one user by the dozen, while shares need tens of thousands.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from cloister.client.routing_audit.records import Sent, TrialLog
from cloister.client.routing_audit.tails import (
    Probabilities,
    add,
    binomial,
    chi_square_tail,
    holm,
    hypergeometric,
    two_sided,
    upper_tail,
)

Family = Literal["draw", "nodes", "land", "loss", "timing"]
MOST_NODES_LISTED = 6
LEAST_EXPECTED = 5.0
EVERYBODY = "everybody"


@dataclass(frozen=True)
class HypothesisResult:
    """One hypothesis, tested.

    Attributes:
        family: the family of the hypothesis.
        user: the user; `EVERYBODY` for all users together.
        captured: the set T; empty if it concerns users or all nodes.
        p_value: probability of a count at least as extreme under honest routing, before correction for multiple tests.
        observed, expected: the count and its expectation; for chi-square the statistic and its degrees of freedom.
        trials: number of draws, requests or losses counted.
    """

    family: Family
    user: str
    captured: tuple[str, ...]
    p_value: float
    observed: float
    expected: float
    trials: int


def subsets(nodes: list[str]) -> list[tuple[str, ...]]:
    """Returns possible sets of captured nodes, one of each set and its complement; single nodes if there are many.

    2 ** (n - 1) - 1 sets for up to `MOST_NODES_LISTED` nodes.
    """
    if len(nodes) > MOST_NODES_LISTED:
        return [(node,) for node in nodes]
    sizes = range(1, len(nodes) // 2 + 1)
    listed = [group for size in sizes for group in combinations(nodes, size)]
    return [group for group in listed if 2 * len(group) < len(nodes) or nodes[0] in group]


def examine(log: TrialLog) -> list[HypothesisResult]:
    """Returns every hypothesis with its p-value: for n nodes and u users about 3 * (u + 1) * (2 ** (n - 1) - 1)."""
    findings: list[HypothesisResult] = []
    groups = subsets(log.nodes())
    for user, sent in [(EVERYBODY, list(log.sent)), *((u, [r for r in log.sent if r.user == u]) for u in log.users())]:
        findings.append(_nodes(log, user, sent))
        for captured in groups:
            findings.append(_draw(log, user, sent, captured))
            findings.append(_land(log, user, sent, captured))
            findings.append(_loss_of_nodes(log, user, sent, captured))
    findings.extend(_loss_of_users(log))
    return findings


def count_tests(nodes: int, users: int) -> int:
    """Returns the number of hypotheses of `examine`, plus those of `compare_times`."""
    groups = len(subsets([str(number) for number in range(nodes)]))
    return (users + 1) * (1 + 3 * groups) + 2 * users


def _by_spell(sent: Iterable[Sent]) -> Iterator[tuple[int, list[Sent]]]:
    spells: dict[int, list[Sent]] = {}
    for request in sent:
        spells.setdefault(request.spell, []).append(request)
    yield from sorted(spells.items())


def _finding(
    family: Family, user: str, captured: tuple[str, ...], parts: list[Probabilities], observed: int, trials: int
) -> HypothesisResult:
    distribution = add(parts)
    expected = float(sum(k * p for k, p in enumerate(distribution)))
    return HypothesisResult(family, user, captured, two_sided(distribution, observed), observed, expected, trials)


def _draw(log: TrialLog, user: str, sent: list[Sent], captured: tuple[str, ...]) -> HypothesisResult:
    parts = [binomial(len(requests), log.spells[spell].share(captured)) for spell, requests in _by_spell(sent)]
    return _finding("draw", user, captured, parts, sum(request.draws[0] in captured for request in sent), len(sent))


def _land(log: TrialLog, user: str, sent: list[Sent], captured: tuple[str, ...]) -> HypothesisResult:
    opened = [request for request in sent if request.opened]
    parts = [binomial(len(requests), log.spells[spell].share_of_up(captured)) for spell, requests in _by_spell(opened)]
    observed = sum(any(node in captured for node in request.opened) for request in opened)
    return _finding("land", user, captured, parts, observed, len(opened))


def _loss_of_nodes(log: TrialLog, user: str, sent: list[Sent], captured: tuple[str, ...]) -> HypothesisResult:
    parts: list[Probabilities] = []
    observed = lost_in_all = 0
    for spell, requests in _by_spell(sent):
        draws = [one for request in requests for one in request.losses(log.spells[spell].down)]
        of_captured = sum(node in captured for node, _ in draws)
        lost = sum(is_lost for _, is_lost in draws)
        parts.append(hypergeometric(len(draws), of_captured, lost))
        observed += sum(is_lost for node, is_lost in draws if node in captured)
        lost_in_all += lost
    return _finding("loss", user, captured, parts, observed, lost_in_all)


def _loss_of_users(log: TrialLog) -> Iterator[HypothesisResult]:
    """Yields for each user whether its share of losses exceeds that of its draws; per spell and node, so that a node that loses
    all users' requests equally causes no charge."""
    draws: Counter[tuple[int, str, str]] = Counter()
    losses: Counter[tuple[int, str, str]] = Counter()
    for request in log.sent:
        for node, is_lost in request.losses(log.spells[request.spell].down):
            draws[request.spell, node, request.user] += 1
            losses[request.spell, node, request.user] += is_lost
    places = sorted({(spell, node) for spell, node, _ in draws})
    users = log.users()
    of_all = {place: (sum(draws[*place, u] for u in users), sum(losses[*place, u] for u in users)) for place in places}
    for user in users:
        parts = [hypergeometric(of_all[place][0], draws[*place, user], of_all[place][1]) for place in places]
        distribution = add(parts)
        observed = sum(losses[*place, user] for place in places)
        expected = float(sum(k * p for k, p in enumerate(distribution)))
        lost = sum(lost for _, lost in of_all.values())
        yield HypothesisResult("loss", user, (), upper_tail(distribution, observed), observed, expected, lost)


def _nodes(log: TrialLog, user: str, sent: list[Sent]) -> HypothesisResult:
    """Chi-square of first draws over all nodes; spells with an expected count below 5 are covered by the exact tests."""
    statistic, degrees, counted = 0.0, 0, 0
    for spell, requests in _by_spell(sent):
        capacities = log.spells[spell].capacities
        expected = {node: len(requests) * log.spells[spell].share((node,)) for node in capacities}
        if min(expected.values()) < LEAST_EXPECTED:
            continue
        seen = Counter(request.draws[0] for request in requests)
        statistic += sum((seen[node] - expected[node]) ** 2 / expected[node] for node in capacities)
        degrees += len(capacities) - 1
        counted += len(requests)
    return HypothesisResult("nodes", user, (), chi_square_tail(statistic, degrees), statistic, float(degrees), counted)


HONEST_ABOVE = 1e-4
"""False-positive rate: at most one in ten thousand trials of honest routing, over all tests (Holm's correction)."""


@dataclass(frozen=True)
class RoutingVerdict:
    """The result of a trial.

    Attributes:
        p_value: the smallest p-value, corrected by Holm for the number of tests.
        worst: the findings with the smallest corrected p-values and those p-values, smallest first.
        tests: number of hypotheses.
        strays: requests that reached a node which could not open them.
    """

    p_value: float
    worst: tuple[tuple[HypothesisResult, float], ...]
    tests: int
    strays: int

    @property
    def honest(self) -> bool:
        """Whether routing by capacity alone is not rejected."""
        return self.p_value > HONEST_ABOVE


def judge(log: TrialLog, worst: int = 5) -> RoutingVerdict:
    """Tests every hypothesis, corrected for their number."""
    findings = examine(log)
    corrected = holm(finding.p_value for finding in findings)
    pairs = sorted(zip(findings, corrected, strict=True), key=lambda pair: (pair[1], pair[0].p_value))
    return RoutingVerdict(pairs[0][1] if pairs else 1.0, tuple(pairs[:worst]), len(findings), log.strays)


LEAST_TIMES = 20
"""Minimum sample size of each side: below it, the normal approximation of the rank sum is too inaccurate for a charge."""


def compare_times(times: Sequence[tuple[str, float]]) -> Iterator[HypothesisResult]:
    """Yields for each user whether the times of its requests rank above or below those of all others.

    Args:
        times: user and seconds of each request; infinite for one that took too long.
    """
    for user in sorted({user for user, _ in times}):
        own = [seconds for who, seconds in times if who == user]
        others = [seconds for who, seconds in times if who != user]
        if min(len(own), len(others)) >= LEAST_TIMES:
            observed, expected, p_value = rank_sum(own, others)
            yield HypothesisResult("timing", user, (), p_value, observed, expected, len(own))


def rank_sum(own: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Returns the sum of the ranks of `own` among all, its expectation, and the two-sided p-value."""
    ranks = _rank([*own, *others])
    n, m = len(own), len(others)
    total = n + m
    observed = sum(ranks[: len(own)])
    expected = n * (total + 1) / 2.0
    ties = sum(count**3 - count for count in Counter([*own, *others]).values())
    variance = n * m / 12.0 * (total + 1 - ties / (total * (total - 1.0)))
    if variance <= 0.0:
        return observed, expected, 1.0
    z = max(abs(observed - expected) - 0.5, 0.0) / math.sqrt(variance)
    return observed, expected, math.erfc(z / math.sqrt(2.0))


def _rank(values: Iterable[float]) -> list[float]:
    """Returns ranks from 1; equal values get the mean of their ranks."""
    given = list(values)
    order = sorted(range(len(given)), key=given.__getitem__)
    ranks = [0.0] * len(given)
    at = 0
    while at < len(order):
        end = at
        while end < len(order) and given[order[end]] == given[order[at]]:
            end += 1
        for index in order[at:end]:
            ranks[index] = (at + 1 + end) / 2.0
        at = end
    return ranks
