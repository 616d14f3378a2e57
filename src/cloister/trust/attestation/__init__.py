"""What a node can prove of itself before anybody sends it a prompt, and who checks it.

`Evidence` is what travels; an `Attester` makes it on a node, `verify_evidence` checks it at a client under a
`AttestationPolicy`, and returns `Findings`: what was proved, what was not, and why it is refused.
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
