"""What was verified, in a person's words: one line for the epoch, and the steps of each node. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from cloister.client.session import Session
from cloister.privacy.attestation import Findings, Outcome

_MARKS = {Outcome.PROVED: "proved", Outcome.NOT_PROVED: "NOT PROVED", Outcome.FAILED: "REFUSED"}


def tell_epoch(session: Session) -> Iterator[str]:
    """Yields lines about the epoch that the session believes, and about each of its nodes."""
    believed = session.believed
    if believed is None:
        return
    epoch = believed.epoch
    yield (
        f"Epoch {epoch.epoch}: {len(epoch.nodes)} nodes, release {believed.release.version} ({epoch.release[:16]}), "
        f"profile {epoch.profile}; in the log at size {believed.checkpoint.size}, cosigned by enough witnesses."
    )
    capacity = epoch.capacity
    for node in epoch.nodes:
        findings = session.findings[node.node_id]
        yield f"Node {node.node_id[:16]}, drawn with chance {node.capacity}/{capacity}: {_sum_up(findings)}"
        for step in findings:
            yield f"  {_MARKS[step.outcome]}: {step.text.removeprefix('NOT PROVED: ')}"


def _sum_up(findings: Findings) -> str:
    if not findings.accepted:
        return "REFUSED; nothing is sent to it"
    if not findings.proved:
        return f"accepted; NOT PROVED: {len(findings.of(Outcome.NOT_PROVED))} of {len(findings)} steps"
    return "accepted; everything that was asked is proved"
