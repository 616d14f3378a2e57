"""Evidence without hardware, signed by the node itself. It proves nothing, and is reported as such.

It permits running and testing the whole path on any machine. The signature (Ed25519, with a key for one statement) only shows
that the bytes were not damaged in transit.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from cloister.trust.attestation.base import AttestationPolicy, Findings
from cloister.trust.attestation.evidence import Evidence, report_data

_CONTEXT = b"cloister software evidence v1\n"
_KEY_BYTES = 32
_SIGNATURE_BYTES = 64


class SoftwareAttester:
    """Creates evidence on any machine."""

    kind = "software"

    def attest(self, statement: bytes) -> Evidence:
        """Signs REPORT_DATA with a one-time key."""
        key = Ed25519PrivateKey.generate()
        signature = key.sign(_CONTEXT + report_data(statement))
        return Evidence(self.kind, statement, key.public_key().public_bytes_raw() + signature)


class SoftwareVerifier:
    """Refuses, or accepts as not proved."""

    kind = "software"

    def verify(self, evidence: Evidence, policy: AttestationPolicy, now: float) -> Findings:
        """See `Verifier.verify`."""
        findings = Findings()
        if not policy.accept_software:
            findings.fail(
                "hardware",
                "no hardware vouches for this node, whose owner can read what it is sent; --accept-software lets it through",
            )
            return findings
        findings.leave_open(
            "hardware",
            "NOT PROVED: no hardware vouches for this node, whose owner can read what it is sent",
        )
        findings.check(
            "report-signature",
            _is_signed(evidence),
            "the evidence reached us undamaged",
            "the evidence was altered after it was made",
        )
        return findings


def _is_signed(evidence: Evidence) -> bool:
    if len(evidence.report) != _KEY_BYTES + _SIGNATURE_BYTES:
        return False
    key, signature = evidence.report[:_KEY_BYTES], evidence.report[_KEY_BYTES:]
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, _CONTEXT + evidence.report_data)
    except InvalidSignature:
        return False
    return True
