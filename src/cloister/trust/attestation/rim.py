"""NVIDIA's reference measurements: Reference Integrity Manifests, SWID tags (ISO/IEC 19770-2) with an XML signature. Pure.

A manifest lists the expected measurements of one version of a driver or VBIOS. It is signed under its own root, so the measured
node can supply it. signxml handles canonical XML and the signature; only the content that it reports as signed is read.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from cryptography import x509

from cloister.trust.attestation.base import AttestationError, AttestationPolicy, Findings
from cloister.trust.attestation.certificates import MAX_CHAIN, check_chain, load_certificates
from cloister.trust.attestation.evidence import EvidenceError
from cloister.trust.attestation.gpu_report import GpuReport
from cloister.trust.attestation.revocation import NO_STATUSES, Statuses, check_revocation, read_statuses
from cloister.types.extras import install_command

RIM_ROOTS: Final = frozenset({"dec1dc316477aa851eebdf51327ae9f864bc8d89254657ed1e7eb9168af1e1a3"})
"""SHA-256 of the key of the "NVIDIA CoRIM signing Root CA" as SubjectPublicKeyInfo."""

MAX_RIM_BYTES: Final = 64 * 1024
MAX_ALTERNATIVES: Final = 64
_SWID = "{http://standards.iso.org/iso/19770/-2/2015/schema.xsd}"
_SIGNATURE = "{http://www.w3.org/2000/09/xmldsig#}"
_SHA384 = "{http://www.w3.org/2001/04/xmlenc#sha384}"
_FIRST_INDEX = 1  # manifests count from 0, SPDM from 1


@dataclass(frozen=True, slots=True)
class Rim:
    """A manifest with a verified signature.

    Attributes:
        product: the GPU's chip, such as GH100.
        version: version of its driver or VBIOS.
        measurements: by index as in a GPU's report (from 1), the accepted values, hex.
        chain: certificates from the signing one to the root.
    """

    product: str
    version: str
    measurements: dict[int, frozenset[str]]
    chain: tuple[x509.Certificate, ...]


def verify_rim(findings: Findings, data: bytes, roots: frozenset[str], now: float) -> Rim | None:
    """Checks a manifest's chain and signature, and reads it.

    Args:
        findings: receives the steps.
        data: the file.
        roots: SHA-256 of the trusted root keys, hex.
        now: Unix seconds at which its certificates must be valid.

    Returns:
        The manifest, or None if it is not signed under a trusted root.

    Raises:
        AttestationError: signxml is not installed.
    """
    library, etree = _import_libraries()
    try:
        chain = _read_chain(etree, data)
        if not check_chain(findings, chain, roots, now, "NVIDIA's reference measurements"):
            return None
        signed = _verify_signature(library, data, chain[0], now)
        rim = _read_tag(signed, chain)
    except EvidenceError as error:
        findings.fail("rim-form", error.message)
        return None
    except library.InvalidSignature:  # digests too
        findings.fail("rim-signature", "NVIDIA's reference measurements were altered: their signature does not fit")
        return None
    except (library.InvalidInput, ValueError, etree.LxmlError) as error:
        findings.fail("rim-form", f"NVIDIA's reference measurements cannot be read ({type(error).__name__})")
        return None
    findings.prove("rim-signature", f"NVIDIA signed the reference measurements of {rim.product} {rim.version}")
    return rim


def _verify_signature(library: Any, data: bytes, signer: x509.Certificate, now: float) -> Any:
    config = library.SignatureConfiguration(
        location="./",
        signature_methods=frozenset({library.SignatureMethod.ECDSA_SHA384}),
        digest_algorithms=frozenset({library.DigestAlgorithm.SHA384}),
        verification_time=datetime.fromtimestamp(now, UTC),
    )
    return library.XMLVerifier().verify(data, x509_cert=signer, expect_config=config).signed_xml


def _read_chain(etree: Any, data: bytes) -> list[x509.Certificate]:
    """Reads the certificates in the signature, from the signer's to the root; the chain is trusted only for its root."""
    if len(data) > MAX_RIM_BYTES:
        raise EvidenceError(f"reference measurements have at most {MAX_RIM_BYTES} bytes, not {len(data)}")
    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False)
    root = etree.fromstring(data, parser=parser)
    if root.getroottree().docinfo.doctype:
        raise EvidenceError("reference measurements with a document type are not read")
    encoded = [element.text or "" for element in root.iterfind(f"./{_SIGNATURE}Signature//{_SIGNATURE}X509Certificate")]
    if not 0 < len(encoded) <= MAX_CHAIN:
        raise EvidenceError(f"reference measurements have 1 to {MAX_CHAIN} certificates, not {len(encoded)}")
    try:
        return [load_certificates(base64.b64decode("".join(text.split()), validate=True))[0] for text in encoded]
    except binascii.Error:
        raise EvidenceError("a certificate of the reference measurements is not base64") from None


def _read_tag(signed: Any, chain: Sequence[x509.Certificate]) -> Rim:
    if signed is None or signed.tag != f"{_SWID}SoftwareIdentity":
        raise EvidenceError("what is signed as reference measurements is no SoftwareIdentity")
    meta = signed.find(f"{_SWID}Meta")
    payload = signed.find(f"{_SWID}Payload")
    if meta is None or payload is None or not meta.get("colloquialVersion"):
        raise EvidenceError("the reference measurements lack their version or their values")
    measurements: dict[int, frozenset[str]] = {}
    for resource in payload.iterfind(f"{_SWID}Resource"):
        if resource.get("type") != "Measurement" or resource.get("active") not in ("True", "False"):
            raise EvidenceError("the reference measurements have an entry of a kind that is not known here")
        index = int(resource.get("index", "")) + _FIRST_INDEX
        if index in measurements:
            raise EvidenceError(f"the reference measurements have index {index} twice")
        if resource.get("active") == "True":
            measurements[index] = _read_values(resource)
    if not measurements:
        raise EvidenceError("the reference measurements have no active value")
    product, version = _to_text(meta.get("product", "")), _to_text(meta.get("colloquialVersion"))
    return Rim(product, version, measurements, tuple(chain))


def _read_values(resource: Any) -> frozenset[str]:
    count, size = int(resource.get("alternatives", "")), int(resource.get("size", ""))
    if not 0 < count <= MAX_ALTERNATIVES:
        raise EvidenceError(f"a reference measurement has {count} alternatives; 1 to {MAX_ALTERNATIVES} are read")
    values = [bytes.fromhex(resource.get(f"{_SHA384}Hash{number}", "")) for number in range(count)]
    if any(len(value) != size or not size for value in values):
        raise EvidenceError("a reference measurement has another length than it says")
    return frozenset(value.hex() for value in values)


def _to_text(value: str) -> str:
    return "".join(letter for letter in value[:64] if letter.isprintable())


def _import_libraries() -> tuple[Any, Any]:
    try:
        import signxml
        from lxml import etree  # type: ignore[import-untyped]
    except ImportError:
        raise AttestationError(
            f"checking NVIDIA's reference measurements needs signxml; install it with: {install_command('attest')}"
        ) from None
    return signxml, etree


# NVIDIA's collateral of a GPU report: signed reference measurements and revocation status. No I/O, no clock.
#
# It is in the extras `gpu-rim-N` and `gpu-revocation`, once for all GPUs of a node.


MAX_RIMS: Final = 8
REVOCATION: Final = "gpu-revocation"
_NVDEC0_INDEX: Final = 36


def rim_extra(number: int) -> str:
    """Returns the name of the extra that holds reference measurements `number`, from 0."""
    return f"gpu-rim-{number}"


@dataclass(frozen=True, slots=True)
class GpuCollateral:
    """Collateral with verified signatures, except for the statuses, which are checked against a chain.

    Attributes:
        rims: reference measurements.
        statuses: OCSP responses and CRLs.
    """

    rims: tuple[Rim, ...] = ()
    statuses: Statuses = NO_STATUSES


NO_COLLATERAL: Final = GpuCollateral()


def verify_collateral(
    findings: Findings, extra: Mapping[str, bytes], policy: AttestationPolicy, now: float, roots: frozenset[str] = RIM_ROOTS
) -> GpuCollateral:
    """Returns NVIDIA's collateral in evidence, and adds steps for its signatures.

    Args:
        findings: receives the steps.
        extra: extras of the evidence.
        policy: a policy with its own values needs no reference measurements.
        now: Unix seconds.
        roots: SHA-256 of trusted root keys of reference measurements, hex.

    Raises:
        AttestationError: there are reference measurements, and signxml is not installed.
    """
    statuses = NO_STATUSES
    try:
        statuses = read_statuses(extra.get(REVOCATION, b""))
    except EvidenceError as error:
        findings.fail("gpu-revocation", error.message)
    rims: list[Rim] = []
    for data in (extra[rim_extra(number)] for number in range(MAX_RIMS) if rim_extra(number) in extra):
        rim = None if policy.gpu_measurements else verify_rim(findings, data, roots, now)
        if rim is not None:
            check_revocation(findings, policy, rim.chain, statuses, now, "rim-revocation")
            rims.append(rim)
    return GpuCollateral(tuple(rims), statuses)


def check_measurements(findings: Findings, report: GpuReport, rims: tuple[Rim, ...], policy: AttestationPolicy) -> None:
    """Adds a step for whether a GPU's measurements are those of the policy, or else those that NVIDIA signed for its driver and
    VBIOS."""
    wanted = policy.gpu_measurements
    if not wanted:
        chosen = [_choose(rims, version) for version in (report.driver, report.vbios)]
        missing = [
            f"{what} {version}"
            for what, version, rim in zip(("driver", "VBIOS"), (report.driver, report.vbios), chosen, strict=True)
            if rim is None
        ]
        if missing:
            findings.doubt(
                policy,
                "gpu-measurement",
                "GPU measurement unchecked: the evidence has no reference measurements of NVIDIA for "
                f"{' and '.join(missing)}; have the node staple their RIM files (--nvidia-collateral)",
            )
            return
        driver, vbios = (rim.measurements for rim in chosen if rim is not None)
        if driver.keys() & vbios.keys():
            both = ", ".join(map(str, sorted(driver.keys() & vbios.keys())))
            findings.fail("gpu-measurement", f"the reference measurements of driver and VBIOS both name index {both}")
            return
        wanted = {**driver, **vbios}
        if not report.has_nvdec:
            wanted.pop(_NVDEC0_INDEX, None)
    wrong = [index for index, values in sorted(wanted.items()) if report.measurements.get(index, b"").hex() not in values]
    findings.check(
        "gpu-measurement",
        not wrong,
        f"the GPU measures what was published ({len(wanted)} of {len(report.measurements)} values)",
        f"the GPU measures something else than was published, at index {', '.join(map(str, wrong))}",
    )


def _choose(rims: tuple[Rim, ...], version: str) -> Rim | None:
    return next((rim for rim in rims if rim.version.upper() == version.upper()), None)
