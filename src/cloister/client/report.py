"""Formats what was verified for users: one line for the epoch, and the steps of each node. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from cloister.client.session import Session
from cloister.trust.attestation import Findings, Outcome

_MARKS = {Outcome.PROVED: "proved", Outcome.NOT_PROVED: "NOT PROVED", Outcome.FAILED: "REFUSED"}


def tell_epoch(session: Session) -> Iterator[str]:
    """Yields lines about the session's verified epoch, and about each of its nodes."""
    believed = session.believed
    if believed is None:
        return
    epoch = believed.epoch
    yield (
        f"Epoch {epoch.epoch}: {len(epoch.nodes)} nodes, release {believed.release.version} ({epoch.release[:16]}), "
        f"profile {epoch.profile}; in the log at size {believed.checkpoint.size}, cosigned by enough witnesses."
    )
    membership = believed.membership
    capacity = membership.capacity
    yield f"Membership {membership.number}, signed by a release key: {len(membership.members)} nodes, capacity {capacity}."
    present = {node.member for node in epoch.nodes}
    for member in membership.members:
        if member.name not in present:
            yield f"No node of {member.name}, drawn with chance {member.capacity}/{capacity}: such a draw fails"
    for node in epoch.nodes:
        findings = session.findings[node.node_id]
        yield f"Node {node.node_id[:16]} ({node.member}), drawn with chance {node.capacity}/{capacity}: {_sum_up(findings)}"
        for step in findings:
            yield f"  {_MARKS[step.outcome]}: {step.text.removeprefix('NOT PROVED: ')}"


def _sum_up(findings: Findings) -> str:
    if not findings.accepted:
        return "REFUSED; nothing is sent to it"
    if not findings.proved:
        return f"accepted; NOT PROVED: {len(findings.of(Outcome.NOT_PROVED))} of {len(findings)} steps"
    return "accepted; every requirement is proved"
