"""Attestation: a node's proofs about itself, and their verification before a prompt is sent.

An `Attester` creates `Evidence` on a node; `verify_evidence` checks it at a client under an `AttestationPolicy`, and returns
`Findings`: what was proved, what was not, and why it is refused.
"""

from cloister.trust.attestation.base import (
    AttestationError,
    AttestationPolicy,
    Attester,
    Finding,
    Findings,
    Outcome,
    SnpFloor,
    Verifier,
)
from cloister.trust.attestation.evidence import (
    Evidence,
    EvidenceError,
    Statement,
    gpu_nonce,
    read_evidence,
    read_statement,
    report_data,
)

__all__ = [
    "AttestationError",
    "AttestationPolicy",
    "Attester",
    "Evidence",
    "EvidenceError",
    "Finding",
    "Findings",
    "Outcome",
    "SnpFloor",
    "Statement",
    "Verifier",
    "gpu_nonce",
    "read_evidence",
    "read_statement",
    "report_data",
]
