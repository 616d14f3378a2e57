"""Checks evidence of AWS Nitro Enclaves: AWS's root, the enclave's certificate, the document, then its content. Pure.

The attester is the Nitro hypervisor, and so AWS, which also runs the host: this trust differs from that in a processor vendor.
So a policy must list this kind explicitly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384

from cloister.trust.attestation.base import MAX_CLOCK_SKEW_S, NUM_PCRS, AttestationPolicy, Findings, check_register
from cloister.trust.attestation.cbor import Item, encode_array, encode_bytes, encode_text, read_cbor
from cloister.trust.attestation.certificates import check_chain, elliptic_key, load_certificates
from cloister.trust.attestation.evidence import MAX_LIFE_S, Evidence, EvidenceError, Statement, read_statement

# The attestation document of an AWS Nitro enclave as fields: COSE_Sign1 (RFC 9052 section 4.2) around a CBOR map. Pure.
#
# Fields and their limits: "Nitro Enclaves Attestation Process" of the repository aws-nitro-enclaves-nsm-api, section 3.1.
# Nothing is verified yet.


MAX_DOCUMENT_BYTES: Final = 32 * 1024
SIGNATURE_BYTES: Final = 96
_DIGEST: Final = "SHA384"
_DIGEST_BYTES: Final = 48
_ES384: Final = {1: -35}  # the one protected header: algorithm (1) is ECDSA with SHA-384
_OPTIONAL: Final = {"public_key", "user_data", "nonce"}
_FIELDS: Final = {"module_id", "timestamp", "digest", "pcrs", "certificate", "cabundle"} | _OPTIONAL

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class NitroDocument:
    """The content of a document.

    Attributes:
        module_id: the enclave's name, with that of its instance.
        timestamp_ms: when the document was made, Unix milliseconds.
        pcrs: registers by number, SHA-384.
        certificate: of the key that signed, DER.
        cabundle: from the root to the issuer of `certificate`, DER.
        public_key, user_data, nonce: data that the enclave requested to be signed; None if absent.
        signature: r and s, 48 bytes each, big endian.
        signed: the signed bytes (`Sig_structure`).
    """

    module_id: str
    timestamp_ms: int
    pcrs: dict[int, bytes]
    certificate: bytes
    cabundle: tuple[bytes, ...]
    public_key: bytes | None
    user_data: bytes | None
    nonce: bytes | None
    signature: bytes
    signed: bytes

    @property
    def is_debug(self) -> bool:
        """Whether PCR0 to PCR2 are zeros, as AWS sets them in debug mode."""
        return not any(any(self.pcrs[number]) for number in range(3))


def read_document(data: bytes) -> NitroDocument:
    """Reads a document.

    Raises:
        EvidenceError: it is not one, or has another signature format.
    """
    if len(data) > MAX_DOCUMENT_BYTES:
        raise EvidenceError(f"a Nitro document has at most {MAX_DOCUMENT_BYTES} bytes, not {len(data)}")
    envelope = read_cbor(data)
    if not isinstance(envelope, list) or len(envelope) != 4:
        raise EvidenceError("the Nitro document is no COSE_Sign1 of four parts")
    protected, unprotected, payload, signature = envelope
    if unprotected != {}:
        raise EvidenceError("the Nitro document has headers that are not signed")
    protected, payload, signature = (_expect(part, bytes, "envelope") for part in (protected, payload, signature))
    if read_cbor(protected) != _ES384 or len(signature) != SIGNATURE_BYTES:
        raise EvidenceError("the Nitro document is not signed with ECDSA P-384 and SHA-384")
    signed = encode_array([encode_text("Signature1"), encode_bytes(protected), encode_bytes(b""), encode_bytes(payload)])
    return _read_payload(_expect(read_cbor(payload), dict, "payload"), signature, signed)


def _read_payload(fields: dict[Item, Item], signature: bytes, signed: bytes) -> NitroDocument:
    if not _FIELDS - _OPTIONAL <= fields.keys() <= _FIELDS:
        raise EvidenceError(f"the Nitro document has other fields than {', '.join(sorted(_FIELDS))}")
    if fields["digest"] != _DIGEST:
        raise EvidenceError(f"the Nitro document's registers are not {_DIGEST}")
    bundle = _expect(fields["cabundle"], list, "cabundle")
    return NitroDocument(
        module_id=_expect(fields["module_id"], str, "module_id"),
        timestamp_ms=_expect(fields["timestamp"], int, "timestamp"),
        pcrs=_read_pcrs(_expect(fields["pcrs"], dict, "pcrs")),
        certificate=_expect(fields["certificate"], bytes, "certificate"),
        cabundle=tuple(_expect(certificate, bytes, "cabundle") for certificate in bundle),
        public_key=_read_optional(fields, "public_key"),
        user_data=_read_optional(fields, "user_data"),
        nonce=_read_optional(fields, "nonce"),
        signature=signature,
        signed=signed,
    )


def _read_pcrs(pcrs: dict[Item, Item]) -> dict[int, bytes]:
    read: dict[int, bytes] = {}
    for number, value in pcrs.items():
        if not isinstance(number, int) or number not in range(NUM_PCRS):
            raise EvidenceError(f"the Nitro document has registers beside PCR0 to PCR{NUM_PCRS - 1}")
        read[number] = _expect(value, bytes, "pcrs")
        if len(read[number]) != _DIGEST_BYTES:
            raise EvidenceError(f"PCR{number} of the Nitro document has {len(read[number])} bytes, not {_DIGEST_BYTES}")
    if not {0, 1, 2} <= read.keys():
        raise EvidenceError("the Nitro document lacks one of PCR0, PCR1 and PCR2, which measure the enclave's image")
    return read


def _read_optional(fields: dict[Item, Item], name: str) -> bytes | None:
    value = fields.get(name)
    return None if value is None else _expect(value, bytes, name)


def _expect(value: object, kind: type[_T], name: str) -> _T:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise EvidenceError(f"{name} of the Nitro document is of another type than it should be")
    return value


AWS_ROOTS: Final = frozenset({"f2caf5ecc6190b4a8399b78bc58a2bbcd0382375db8a1bfd78a82743874fd225"})
"""SHA-256 of the key of the root "aws.nitro-enclaves" (G1) as SubjectPublicKeyInfo. AWS publishes the SHA-256 of its
certificate: 641a0321a3e244efe456463195d606317ed7cdcc3c1756e09893f3c68f79bb5b."""

_IMAGE: Final = {0: "PCR0 (the enclave's image)", 1: "PCR1 (kernel and boot)", 2: "PCR2 (application)"}
_PARENT: Final = {3: "PCR3 (the instance's role)", 4: "PCR4 (the instance)"}


def nitro_nonce(statement: Statement) -> bytes:
    """Returns the required nonce of a document: SHA-256 of the log's checkpoint in the statement, 32 bytes."""
    return hashlib.sha256(statement.checkpoint.encode()).digest()


class NitroVerifier:
    """Checks `nitro` evidence. A document has `report_data(statement)` as user data, the statement's keys as public key and
    `nitro_nonce` as nonce.

    Args:
        roots: SHA-256 of the trusted root keys, hex.
    """

    kind = "nitro"

    def __init__(self, roots: frozenset[str] = AWS_ROOTS) -> None:
        self._roots = roots

    def verify(self, evidence: Evidence, policy: AttestationPolicy, now: float) -> Findings:
        """See `Verifier.verify`."""
        findings = Findings()
        try:
            statement = read_statement(evidence.statement)
        except EvidenceError as error:
            findings.fail("statement", error.message)
            return findings
        document = self.verify_document(findings, evidence.report, now)
        if document is not None:
            _check_bindings(findings, document, evidence.report_data, statement)
            judge_document(findings, document, policy, now)
        return findings

    def verify_document(self, findings: Findings, data: bytes, now: float) -> NitroDocument | None:
        """Checks a document's signature and returns the document; None if it is not signed by a trusted key.

        Args:
            findings: receives the steps.
            data: the document.
            now: Unix seconds at which its certificates must be valid; the enclave's is valid for three hours.
        """
        try:
            document = read_document(data)
            encoded = [document.certificate, *reversed(document.cabundle)]
            chain = [certificate for one in encoded for certificate in _load_der(one)]
            if check_chain(findings, chain, self._roots, now, "AWS") and _check_signature(findings, document, chain[0]):
                return document
        except EvidenceError as error:
            findings.fail("report-form", error.message)
        return None


def judge_document(findings: Findings, document: NitroDocument, policy: AttestationPolicy, now: float) -> None:
    """Checks the content of a signed document against a policy."""
    age_s = now - document.timestamp_ms / 1000
    findings.check(
        "document-age",
        -MAX_CLOCK_SKEW_S <= age_s <= MAX_LIFE_S + MAX_CLOCK_SKEW_S,
        f"the hypervisor made the document {max(0, age_s) / 60:.0f} min ago",
        f"the hypervisor made the document {age_s / 60:.0f} min ago; documents are accepted for {MAX_LIFE_S // 60} min: "
        "have the node attest again, and check this machine's clock",
    )
    findings.check(
        "debug",
        not document.is_debug,
        "the enclave was not started in debug mode",
        "the enclave was started in debug mode (PCR0 to PCR2 are zeros): its host reads its console, and nothing is measured",
    )
    _check_pcrs(findings, document.pcrs, policy)


def _check_pcrs(findings: Findings, pcrs: Mapping[int, bytes], policy: AttestationPolicy) -> None:
    named = {number for number in range(NUM_PCRS) if f"{NitroVerifier.kind}-pcr{number}" in policy.measurements}
    used = {number for number, value in pcrs.items() if any(value)}
    for number in sorted(_IMAGE.keys() | named | used - _PARENT.keys()):
        label = (_IMAGE | _PARENT).get(number, f"PCR{number}")
        check_register(findings, policy, f"pcr-{number}", f"{NitroVerifier.kind}-pcr{number}", pcrs.get(number, b""), label)
    if not _PARENT.keys() <= named:
        findings.prove(
            "pcr-parent", "PCR3 and PCR4 say who started the enclave, not what runs in it: compared where they are named"
        )


def _check_bindings(findings: Findings, document: NitroDocument, report_data: bytes, statement: Statement) -> None:
    findings.check(
        "report-data",
        document.user_data == report_data,
        "the hypervisor signed this very statement",
        "the hypervisor signed another statement than the one that was sent (user_data differs)",
    )
    findings.check(
        "public-key",
        document.public_key == statement.keys,
        "the hypervisor signed the keys that are sealed to",
        "the hypervisor signed other keys than the statement has, or none (public_key differs)",
    )
    findings.check(
        "document-nonce",
        document.nonce == nitro_nonce(statement),
        "the document was made for the checkpoint in the statement",
        "the document was made for another checkpoint than the statement has, or for none (nonce differs)",
    )


def _check_signature(findings: Findings, document: NitroDocument, leaf: x509.Certificate) -> bool:
    half = len(document.signature) // 2
    r, s = int.from_bytes(document.signature[:half], "big"), int.from_bytes(document.signature[half:], "big")
    try:
        elliptic_key(leaf).verify(encode_dss_signature(r, s), document.signed, ECDSA(SHA384()))
    except InvalidSignature:
        return findings.check("report-signature", False, "", "the document was altered: the enclave's signature does not fit")
    return findings.check("report-signature", True, "the document was signed by the Nitro hypervisor for this enclave", "")


def _load_der(encoded: bytes) -> list[x509.Certificate]:
    """PEM may have unsigned white space; documents must have DER."""
    if encoded[:1] != b"\x30":
        raise EvidenceError("a certificate of the Nitro document is not DER")
    return load_certificates(encoded)
