"""The engines of a node in its statement: a node is one trust unit, whose engines are as many, and as hardened, as it states;
and its members, other machines whose evidence comes with the node's. Pure: no I/O, no clock."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Final

from cloister.trust.attestation.base import Findings, Outcome
from cloister.trust.attestation.evidence import Evidence, EvidenceError, Statement, read_evidence, read_statement

ENGINE: Final = "engine"
DRAWN: Final = "capacity_random"
_SETTINGS: Final = ("replicas", "router", "prefill", "decode", "kv_transfer")


_MEMBER: Final = "unit-member-"
_SAME: Final = ("release", "model", "profile", "profile_digest", "configuration")
"""What a member states as its leader does."""


def member_extra(number: int) -> str:
    """Returns the name that a member's evidence has in the leader's `extra`; members count from 1."""
    return f"{_MEMBER}{number}"


def read_members(evidence: Evidence) -> list[tuple[Evidence, Statement]]:
    """Returns the evidence and the statement of each member that comes with a leader's, in order, unverified.

    Raises:
        EvidenceError: one cannot be read, has members itself, or there are gaps.
    """
    found = [name for name in evidence.extra if name.startswith(_MEMBER)]
    if set(found) != {member_extra(number) for number in range(1, len(found) + 1)}:
        raise EvidenceError("the evidence of the unit's members is not numbered in a row")
    members = [read_evidence(evidence.extra[member_extra(number)]) for number in range(1, len(found) + 1)]
    if any(name.startswith(_MEMBER) for member in members for name in member.extra):
        raise EvidenceError("a member of the unit brings members of its own")
    return [(member, read_statement(member.statement)) for member in members]


def check_members(findings: Findings, evidence: Evidence, statement: Statement, verify: Callable[[Evidence], Findings]) -> None:
    """Adds a step for each other machine of a node's unit: it is verified as the node is, and states what the node states.

    Args:
        evidence, statement: of the node, verified.
        verify: returns the steps for one machine under the client's policy.
    """
    try:
        members = read_members(evidence)
    except EvidenceError as error:
        findings.fail("unit-member", error.message)
        return
    if sorted(_digest(of_member.unit_key) for _, of_member in members) != list(statement.unit_members):
        findings.fail(
            "unit-member",
            f"the node states {len(statement.unit_members)} other machines of its unit, and the evidence of {len(members)} "
            "comes with it, or of others: one was added, left out or exchanged; take another node",
        )
        return
    for number, (member, of_member) in enumerate(members, 1):
        _check_member(findings, number, statement, of_member, verify(member), member.kind)


def _check_member(
    findings: Findings, number: int, statement: Statement, of_member: Statement, steps: Findings, kind: str
) -> None:
    who = f"machine {number} of the node's unit"
    failed = [step.text for step in steps.of(Outcome.FAILED)]
    failed += [f"its {name.replace('_', ' ')} is not the node's" for name in _SAME if _differ(statement, of_member, name)]
    if of_member.not_after < statement.not_after:
        failed.append("its evidence ends before the node's, which would be relied on afterwards")
    if failed:
        findings.fail("unit-member", f"{who} is refused: {'; '.join(failed)}")
        return
    told = (
        f"{who} is verified as the node is: the same release, model, profile and configuration, {len(of_member.hardening)} "
        f"hardening measures, evidence of kind {kind}; nobody but it has the key that the node lists"
    )
    if doubts := [step.text for step in steps.of(Outcome.NOT_PROVED)]:
        findings.leave_open("unit-member", f"{told}; but {'; '.join(doubts)}")
    else:
        findings.prove("unit-member", told)


def _differ(statement: Statement, of_member: Statement, name: str) -> bool:
    return bool(getattr(statement, name) != getattr(of_member, name))


def _digest(unit_key: bytes) -> str:
    return hashlib.sha256(unit_key).hexdigest()


def engine_name(index: int) -> str:
    """Returns the name that the measures of an engine process have in a statement."""
    return f"{ENGINE}-{index}" if index else ENGINE


def check_unit(findings: Findings, statement: Statement) -> None:
    """Adds a step for the engines of a node that has several, or states that it has.

    Its settings say how many engines it has; its hardening has the measures of each engine process that was started when the
    statement was made. A node whose front and engines do not agree is refused, and so is one whose requests are not drawn.
    """
    settings = _read(statement.configuration)
    named = {name.rpartition(".")[0] for name in statement.hardening}
    engines = {name for name in named if name == ENGINE or name.startswith(f"{ENGINE}-")}
    num_engines = settings.get("replicas", 1)
    if type(num_engines) is int and num_engines == 1 and len(engines) <= 1 and not statement.unit_members:
        return
    is_number = type(num_engines) is int and num_engines == len(engines)
    if not is_number or engines != {engine_name(index) for index in range(len(engines))}:
        findings.fail(
            "unit",
            f"the node states {_show(num_engines)} engines, and its evidence has the measures of {len(engines)}: one was "
            "added, left out or exchanged; take another node",
        )
        return
    measures: dict[str, set[str]] = {}
    for process, _, measure in (name.rpartition(".") for name in statement.hardening):
        measures.setdefault(process, set()).add(measure)
    if any(measures[engine] != measures[ENGINE] for engine in engines):
        findings.fail(
            "unit", "the engines of the node do not have the same measures, so one may be less hardened; take another node"
        )
        return
    findings.check(
        "unit",
        settings.get("router") == DRAWN,
        f"the node is one unit of {_count(num_engines)}{_describe_machines(statement)}{_describe_roles(settings)}, each of "
        "them measured; an engine is drawn by capacity, and nothing that others send decides",
        f"inside the node, requests are divided by {_show(settings.get('router'))}, which can be steered",
    )


def _show(value: object) -> str:
    return str(value)[:16]


def _count(num_engines: object) -> str:
    return "1 engine" if num_engines == 1 else f"{num_engines} engines"


def _describe_machines(statement: Statement) -> str:
    num_others = len(statement.unit_members)
    if num_others <= 1:
        return " and of as many on one further machine" if num_others else ""
    return f" and of as many on each of {num_others} further machines"


def _describe_roles(settings: Mapping[str, object]) -> str:
    if not settings.get("prefill"):
        return ""
    return (
        f" ({_show(settings['prefill'])} compute prompts, {_show(settings.get('decode'))} go on with answers; KV passes by the "
        f"transport {_show(settings.get('kv_transfer'))})"
    )


def _read(configuration: Mapping[str, str]) -> dict[str, object]:
    """Returns the settings that say what a unit is, as far as there are any. What is no JSON is None."""
    found: dict[str, object] = {}
    for name in _SETTINGS:
        if (written := configuration.get(f"setting {name}")) is not None:
            try:
                found[name] = json.loads(written)
            except (ValueError, RecursionError):
                found[name] = None
    return found
