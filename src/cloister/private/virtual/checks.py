"""What every run of a sealed unit of several machines must keep to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from cloister.cluster.virtual.checks import GOOD_ENDS, RECOVERY_S, JobAnswer, SequenceAnswer
from cloister.engine.poison_requests import NUM_SAFE_LOSSES
from cloister.engine.request_client import GRACE_S
from cloister.private.virtual.machines import NodeLife
from cloister.private.virtual.scenario import UnitScenario
from cloister.types.request import FinishReason

SLACK_S: Final = 1.0
"""A deadline is enforced between steps."""
_ROUNDING_S: Final = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class StatementSeen:
    """A statement of a leader, as a client sees it.

    Attributes:
        members: digests of the members' keys.
        ends_s: Unix seconds.
        opens_until_s: so long its key opens requests at least, Unix seconds.
    """

    life: NodeLife
    members: frozenset[str]
    ends_s: int
    opens_until_s: float


@dataclass(slots=True)
class RequestTrail:
    """Where a request was.

    Attributes:
        statement: under which its client sealed it.
        lives: the nodes of whose engines each got it, in order.
        asked: the machines to whose engines its worker wanted a channel.
    """

    statement: StatementSeen | None = None
    lives: list[NodeLife] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)


def check_unit_answer(answer: JobAnswer, alone: Sequence[SequenceAnswer], scenario: UnitScenario, late_s: float) -> list[str]:
    """Compares an answer with that of one engine alone.

    Args:
        late_s: for how long all machines were suspended.
    """
    name, wrong = answer.request.request_id, list[str]()
    if answer.refusal is not None:
        return [f"{name} was refused and answered"] if any(answer.ends) or any(answer.token_ids) else []
    for index, expected in enumerate(alone):
        ends, where = answer.ends[index], f"{name}[{index}]"
        if len(ends) > 1 or not (ends or answer.has_left or answer.is_cut):
            wrong.append(f"{where} ended {len(ends)} times")
        end = ends[0] if ends else None
        given = answer.token_ids[index], answer.texts[index], end
        if end in GOOD_ENDS and given != (expected.token_ids, expected.text, expected.end):
            wrong.append(f"{where} got another answer than from one engine alone")
        if end not in GOOD_ENDS and given[0] != expected.token_ids[: len(given[0])]:
            wrong.append(f"{where} got other tokens than from one engine alone, until it ended by {end}")
        wrong += _check_unit_end(where, end, expected.end, answer, scenario, late_s)
    return wrong


def _check_unit_end(
    where: str, end: FinishReason | None, alone: FinishReason, answer: JobAnswer, scenario: UnitScenario, late_s: float
) -> list[str]:
    """Says whether a sequence may end like this, and when."""
    assert answer.ended_s is not None
    took_s, limit_s = answer.ended_s - answer.sent_s, answer.job.timeout_s
    if end is FinishReason.TIMEOUT and took_s < limit_s - _ROUNDING_S:
        return [f"{where} timed out after {took_s:.3f} of {limit_s:.3f} s"]
    if end is FinishReason.TIMEOUT and limit_s > longest_unit_trouble_s(scenario):
        return [f"{where} timed out, though nothing was wrong for long"]
    if took_s > limit_s + GRACE_S + late_s + SLACK_S:
        return [f"{where} ended {took_s - limit_s:.1f} s after its deadline"]
    if end is FinishReason.REJECTED and alone is not FinishReason.REJECTED:
        return [f"{where} was rejected, which one engine alone does not"]
    if end is FinishReason.ABORT:
        return [f"{where} was aborted, though its client waited"]
    if end is FinishReason.ERROR and answer.job.kills_after is None and not may_be_accused(scenario):
        return [f"{where} failed, though its engines died at most {NUM_SAFE_LOSSES} times"]
    return []


def may_be_accused(scenario: UnitScenario) -> bool:
    """Whether a request that kills no engine may end with an error: steps fail, or three engines of the leader's machine can
    have died while they had it. What happens elsewhere, and to the network, accuses nobody."""
    own = Counter(fault.kind for fault in scenario.faults if fault.machine == 0)
    num_killers = sum(job.kills_after is not None for job in scenario.jobs)
    num_deaths = own["crash"] + own["hang"] + own["suspend"]
    return any(fault.kind == "fail_step" for fault in scenario.faults) or num_killers > 0 or num_deaths > NUM_SAFE_LOSSES


def longest_unit_trouble_s(scenario: UnitScenario) -> float:
    """Returns a time within which a unit has overcome all faults of a scenario and answered everything."""
    num_killers = sum(job.kills_after is not None for job in scenario.jobs)
    lasting_s = sum(RECOVERY_S + (0.0 if fault.kind == "hang" else fault.lasts_s) for fault in scenario.faults)
    return 15.0 + 3 * RECOVERY_S * num_killers + lasting_s


def check_trail(answer: JobAnswer, trail: RequestTrail) -> list[str]:
    """Checks that only machines to which the client has agreed got a request, and that no failure elsewhere brought it to a
    further machine: once it was at a member, or was to be, it is at the leader only."""
    name, wrong = answer.request.request_id, list[str]()
    elsewhere = [life for life in trail.lives if life.machine]
    if elsewhere and trail.statement is not None:
        strange = [life.machine for life in elsewhere if life.key.digest not in trail.statement.members]
        if strange:
            wrong.append(f"{name} was given to machine {strange[0]}, which the statement of its client does not list")
    if len(elsewhere) > 1 or len(trail.asked - {0}) > 1:
        machines = [life.machine for life in trail.lives]
        wrong.append(f"{name} was given to machines {machines}, and wanted {sorted(trail.asked)}: more than one member")
    return wrong
