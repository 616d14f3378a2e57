"""Whether another machine may be part of this node's unit: its evidence is verified as a client verifies a node's, against what
this node states about itself. Pure but for libraries; time is an argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from cloister.private.unit.pairing import UnitRefusedError, digest_of
from cloister.trust.attestation import (
    AttestationError,
    AttestationPolicy,
    Evidence,
    EvidenceError,
    Outcome,
    Statement,
    Verifier,
    read_evidence,
    read_statement,
)
from cloister.trust.attestation.node import Facts
from cloister.trust.attestation.nvidia import GpuVerifier
from cloister.trust.attestation.software import SoftwareAttester
from cloister.trust.attestation.verify import HOST, VERIFIERS, name_chips, verify_evidence
from cloister.trust.transparency.membership import is_signed_by
from cloister.trust.transparency.note import PublicKey

_SAME: Final = "start all machines of a unit"
_REMEDIES: Final[Mapping[str, str]] = {
    "kind": f"{_SAME} with the same --attester",
    "hardware": f"{_SAME} with the same --attester",
    "expiry": "set the clocks of both machines",
    "profile": f"{_SAME} with the same --profile",
    "profile-digest": f"{_SAME} from the same release",
    "release": f"{_SAME} from the same release (--release)",
    "model": f"{_SAME} with the same --model, adapters and files beside it",
    "configuration": f"{_SAME} with the same settings",
    "hardening": f"{_SAME} on machines that put the same measures in force (cloister doctor)",
    "gpu": f"{_SAME} with the same --attest-gpus",
    "tcb": "say in --unit-policy what is accepted",
}
"""What the operator can do, by the step that failed."""


@dataclass(frozen=True)
class PeerVerifier:
    """Verifies the other machines of a unit.

    Args:
        facts: what this node states.
        own: this node's evidence for any statement, which names its chips.
        hardening: returns the outcome of each measure of this node.
        gpu: whether GPUs are attested.
        member_key: the key by which the unit is a member of the cloud, which signs evidence of each of its machines; None if
            it is no member.
        policy: what the operator accepts besides, as a client's policy does: firmware, providers, registers that the release
            does not name. It cannot accept a release, a model, settings, a profile, a register of the release or a kind of
            hardware that differs, nor software.
        names_checkpoint: whether this node's evidence names a checkpoint of the log: strict clients refuse a unit of which one
            machine names none.
        verifiers: by kind.
    """

    facts: Facts
    own: Evidence
    hardening: Callable[[], Mapping[str, str]]
    gpu: bool = False
    member_key: PublicKey | None = None
    policy: AttestationPolicy | None = None
    names_checkpoint: bool = False
    verifiers: Mapping[str, Verifier] = field(default_factory=lambda: VERIFIERS)

    def load_libraries(self, now: float) -> None:
        """Does once what verifications do: libraries import parts of themselves at first use, and the front of a sealed node
        may import nothing once it is locked down.

        Raises:
            AttestationError: a library is missing; the message says which.
        """
        if self.own.kind in self.verifiers:
            self.verifiers[self.own.kind].verify(self.own, self._policy(), now)
        GpuVerifier().verify(self.own, self._policy(), now)

    def judge_member(self, document: bytes, now: float) -> Statement:
        """Returns the statement of a node that may be a member.

        Raises:
            UnitRefusedError: it may not; the message says why and what to change.
        """
        statement = self._judge("the member", document, now)
        if statement.unit_members:
            raise UnitRefusedError(
                "role", "the member is refused: it leads a unit of its own; start it with --unit-port and no --unit-members"
            )
        return statement

    def judge_leader(self, document: bytes, own_key: bytes, now: float) -> Statement:
        """Returns the statement of a node that may be the leader of this one.

        Args:
            own_key: this node's unit key.

        Raises:
            UnitRefusedError: it may not.
        """
        statement = self._judge("the leader", document, now)
        if digest_of(own_key) not in statement.unit_members:
            raise UnitRefusedError(
                "not-listed", "the leader is refused: its statement does not list this member, so no client has agreed to it"
            )
        return statement

    def _judge(self, whose: str, document: bytes, now: float) -> Statement:
        evidence, statement = _read(whose, document)
        try:
            findings = verify_evidence(evidence, self._policy(), now, verifiers=self.verifiers)
            chips = name_chips(evidence) if findings.accepted else frozenset()
            own_chips = name_chips(self.own)
        except (EvidenceError, AttestationError) as error:
            raise _refuse_evidence(whose, error) from None
        for failed in findings.of(Outcome.FAILED):
            remedy = f"; {_REMEDIES[failed.slug]}" if failed.slug in _REMEDIES else ""
            raise UnitRefusedError(failed.slug, f"{whose} is refused: {failed.text}{remedy}")
        _check_role(whose, statement)
        if self.member_key is not None and not is_signed_by(self.member_key, evidence):
            raise UnitRefusedError(
                "member",
                f"{whose} is refused: its evidence is not signed with this node's member key; {_SAME} with the same "
                "--member-key",
            )
        if self.names_checkpoint and not statement.checkpoint:
            raise UnitRefusedError(
                "checkpoint",
                f"{whose} is refused: its evidence names no checkpoint of the log, so clients would refuse the whole node; "
                "start it with --log-checkpoint, as this one",
            )
        if chips & own_chips:
            raise UnitRefusedError(
                "chip", f"{whose} is refused: it is on the same chip as this node; run each machine of a unit on its own"
            )
        return statement

    def _policy(self) -> AttestationPolicy:
        """What this node demands: what it is itself. Software is accepted by a node that has nothing better to show."""
        facts = self.facts
        applied = {name.rpartition(".")[2] for name, told in self.hardening().items() if told.startswith("applied:")}
        base = self.policy or AttestationPolicy()
        return replace(
            base,
            profile=facts.profile,
            kinds=frozenset({self.own.kind}),
            accept_software=self.own.kind == SoftwareAttester.kind,
            releases=frozenset({facts.release}),
            models=frozenset({facts.model}),
            profile_digests=frozenset({facts.profile_digest}),
            configuration=facts.configuration,
            hardening=base.hardening | (applied - {HOST}),
            measurements={**base.measurements, **{name: frozenset({value}) for name, value in facts.launch.items()}},
            gpu=self.gpu or base.gpu,
        )


def read_leader_key(document: bytes) -> bytes:
    """Returns the unit key that evidence of a leader names; nothing is verified.

    Raises:
        UnitRefusedError: it is no evidence, or of no machine of a unit.
    """
    _, statement = _read("the leader", document)
    _check_role("the leader", statement)
    return statement.unit_key


def _read(whose: str, document: bytes) -> tuple[Evidence, Statement]:
    try:
        evidence = read_evidence(document)
        return evidence, read_statement(evidence.statement)
    except EvidenceError as error:
        raise _refuse_evidence(whose, error) from None


def _check_role(whose: str, statement: Statement) -> None:
    if not statement.unit_key:
        raise UnitRefusedError("role", f"{whose} is refused: it is no machine of a unit; start it with --unit-port")


def _refuse_evidence(whose: str, error: EvidenceError | AttestationError) -> UnitRefusedError:
    return UnitRefusedError("evidence", f"{whose} is refused: {error.message}")
