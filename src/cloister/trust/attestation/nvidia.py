"""Checks that a GPU is an NVIDIA GPU whose report contains our nonce. No I/O, no clock.

A GPU's evidence is added to the processor's, in the extras `gpu-N-report` and `gpu-N-chain`. Its nonce is the hash of the
processor's REPORT_DATA, so it cannot be copied from another node. The expected measurements of its firmware, and revocation
statuses, are in NVIDIA's collateral: without it a strict profile refuses the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384

from cloister.trust.attestation.base import AttestationPolicy, Findings, GpuFloor
from cloister.trust.attestation.certificates import check_chain, elliptic_key, is_authority, load_certificates
from cloister.trust.attestation.evidence import Evidence, EvidenceError, gpu_nonce
from cloister.trust.attestation.gpu_report import GpuReport, read_gpu_report
from cloister.trust.attestation.revocation import check_revocation
from cloister.trust.attestation.rim import NO_COLLATERAL, RIM_ROOTS, GpuCollateral, check_measurements, verify_collateral

NVIDIA_ROOTS = frozenset({"a90c4eb5acfd3e3d03a25db6a26b84f720ad0503196c627c21ddd48dd85b06a4"})
"""SHA-256 of the key of NVIDIA's Device Identity CA as SubjectPublicKeyInfo."""

MAX_GPUS = 8
_DICE_TCB_INFO = x509.ObjectIdentifier("2.23.133.5.4.1")  # TCG DICE: the firmware that the certificate's key belongs to
_SHA384_HEAD = bytes.fromhex("06096086480165030402020430")  # its OID, then an octet string of 48 bytes


def report_extra(number: int) -> str:
    """Returns the name of the extra that holds the report of GPU `number`, from 0."""
    return f"gpu-{number}-report"


def chain_extra(number: int) -> str:
    """Returns the name of the extra that holds the certificates of GPU `number`, PEM, from the leaf to the root."""
    return f"gpu-{number}-chain"


def list_gpus(extra: Mapping[str, bytes]) -> Iterator[int]:
    """Yields the numbers of the GPUs that evidence has reports of."""
    return (number for number in range(MAX_GPUS) if report_extra(number) in extra)


class GpuVerifier:
    """Checks the GPUs of evidence, with NVIDIA's collateral.

    Args:
        roots: SHA-256 of trusted root keys of devices, hex.
        rim_roots: the same for reference measurements.
    """

    def __init__(self, roots: frozenset[str] = NVIDIA_ROOTS, rim_roots: frozenset[str] = RIM_ROOTS) -> None:
        self._roots = roots
        self._rim_roots = rim_roots

    def verify(self, evidence: Evidence, policy: AttestationPolicy, now: float) -> Findings:
        """Returns the findings about all GPUs; empty if there is none and none is required.

        Raises:
            AttestationError: see `verify_collateral`.
        """
        findings = Findings()
        numbers = list(list_gpus(evidence.extra))
        if policy.gpu and not numbers:
            findings.fail("gpu", "a confidential GPU is wanted, and the evidence has none")
        collateral = NO_COLLATERAL
        if numbers:
            collateral = verify_collateral(findings, evidence.extra, policy, now, self._rim_roots)
        for number in numbers:
            chain = evidence.extra.get(chain_extra(number), b"")
            nonce = gpu_nonce(evidence.report_data)
            report = evidence.extra[report_extra(number)]
            findings.extend(self.verify_report(report, chain, nonce, policy, now, collateral))
        return findings

    def verify_report(
        self,
        data: bytes,
        encoded_chain: bytes,
        nonce: bytes,
        policy: AttestationPolicy,
        now: float,
        collateral: GpuCollateral = NO_COLLATERAL,
    ) -> Findings:
        """Checks a single report.

        Args:
            data: the report.
            encoded_chain: PEM, from the certificate that signs reports to the root.
            nonce: the required nonce, 32 bytes.
            policy: the client's policy.
            now: Unix seconds.
            collateral: NVIDIA's collateral.
        """
        findings = Findings()
        try:
            report = read_gpu_report(data)
            chain = load_certificates(encoded_chain)
            if not check_chain(findings, chain, self._roots, now, "NVIDIA"):
                return findings
            if not _check_signature(findings, report, chain[0]):
                return findings
        except EvidenceError as error:
            findings.fail("gpu-report-form", error.message)
            return findings
        findings.check(
            "gpu-nonce",
            report.nonce == nonce,
            "the GPU's report was made for this very statement",
            "the GPU's report was made for another statement, or on another node (its nonce differs)",
        )
        if not report.firmware_id:
            findings.doubt(policy, "gpu-firmware-id", "the GPU does not say which firmware holds its key (old drivers do not)")
        else:
            findings.check(
                "gpu-firmware-id",
                report.firmware_id == _read_firmware_id(chain[0]),
                "the GPU runs the firmware that its certificate was made for",
                "the GPU runs another firmware than its certificate was made for (FWID)",
            )
        if policy.gpu_floor is not None:
            _check_floor(findings, report, policy.gpu_floor)
        # The GPU itself signs the certificate of its firmware, with the key of the second one; NVIDIA tracks revocation of the
        # others.
        issued = chain if is_authority(chain[0]) else chain[1:]
        check_revocation(findings, policy, issued, collateral.statuses, now, "gpu-revocation")
        check_measurements(findings, report, collateral.rims, policy)
        return findings


def _check_floor(findings: Findings, report: GpuReport, floor: GpuFloor) -> None:
    is_new = _order(report.driver, 10) >= _order(floor.driver, 10) and _order(report.vbios, 16) >= _order(floor.vbios, 16)
    findings.check(
        "gpu-floor",
        is_new,
        f"driver {report.driver} and VBIOS {report.vbios} are new enough",
        f"the GPU has driver {report.driver} and VBIOS {report.vbios}; wanted are at least {floor.driver} and {floor.vbios}",
    )


def _order(version: str, base: int) -> list[int]:
    """Returns a version as comparable numbers; an invalid one is older than all."""
    try:
        return [int(part, base) for part in version.split(".")]
    except ValueError:
        return []


def _check_signature(findings: Findings, report: GpuReport, leaf: x509.Certificate) -> bool:
    half = len(report.signature) // 2
    r, s = int.from_bytes(report.signature[:half], "big"), int.from_bytes(report.signature[half:], "big")
    try:
        elliptic_key(leaf).verify(encode_dss_signature(r, s), report.signed, ECDSA(SHA384()))
    except InvalidSignature:
        return findings.check("gpu-report-signature", False, "", "the GPU's report was altered: its signature does not fit")
    text = f"the report was signed by the GPU (driver {report.driver}, VBIOS {report.vbios})"
    return findings.check("gpu-report-signature", True, text, "")


def _read_firmware_id(leaf: x509.Certificate) -> bytes | None:
    try:
        value = leaf.extensions.get_extension_for_oid(_DICE_TCB_INFO).value
    except x509.ExtensionNotFound:
        return None
    assert isinstance(value, x509.UnrecognizedExtension)
    _, head, digest = value.value.rpartition(_SHA384_HEAD)
    return digest if head else None
