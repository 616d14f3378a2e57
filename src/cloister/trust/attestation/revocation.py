"""Certificate revocation: OCSP responses (RFC 6960) and CRLs (RFC 5280) that are stapled to evidence. No I/O, no clock.

A client that queried a vendor's server would reveal the node that it is about to use, so the node fetches and staples
responses. A response is valid if it is signed by the certificate's issuer, or by a responder delegated by that issuer (RFC 6960
section 4.2.2.2), and if it is fresh: within its own validity and not older than the policy's limit.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.x509 import ocsp
from cryptography.x509.oid import ExtendedKeyUsageOID

from cloister.trust.attestation.base import MAX_CLOCK_SKEW_S, AttestationPolicy, Findings
from cloister.trust.attestation.certificates import MAX_CHAIN, name_subject
from cloister.trust.attestation.evidence import EvidenceError

MAX_STATUSES: Final = 64
_BLOCK = re.compile(rb"-----BEGIN (OCSP RESPONSE|X509 CRL)-----\s+([A-Za-z0-9+/=\s]+)-----END \1-----\s*")
_REVOKED: Final = {ocsp.OCSPCertStatus.GOOD: False, ocsp.OCSPCertStatus.REVOKED: True, ocsp.OCSPCertStatus.UNKNOWN: None}
_SKEW = timedelta(seconds=MAX_CLOCK_SKEW_S)
_LEAST_DIGEST_BYTES: Final = 32  # SHA-1 signatures are rejected; its digest is sufficient to identify a certificate


@dataclass(frozen=True, slots=True)
class CertificateStatus:
    """The status of one certificate in a response or list with an authorized signature.

    Attributes:
        is_revoked: None: unknown to its issuer.
        since, until: validity period; None: no end is given.
    """

    is_revoked: bool | None
    since: datetime
    until: datetime | None

    def holds(self, oldest: datetime, moment: datetime) -> bool:
        """Whether it is not older than `oldest` and valid at `moment`."""
        return oldest <= self.since <= moment + _SKEW and (self.until is None or moment <= self.until)


@dataclass(frozen=True, slots=True)
class Statuses:
    """Responses and lists as received; nothing in them is verified yet."""

    responses: tuple[ocsp.OCSPResponse, ...] = ()
    lists: tuple[x509.CertificateRevocationList, ...] = ()


NO_STATUSES: Final = Statuses()


def encode_statuses(responses: Sequence[bytes], lists: Sequence[bytes]) -> bytes:
    """Returns OCSP responses and CRLs, each in DER, as concatenated PEM blocks."""
    blocks = [("OCSP RESPONSE", der) for der in responses] + [("X509 CRL", der) for der in lists]
    return b"".join(
        f"-----BEGIN {label}-----\n{base64.b64encode(der).decode()}\n-----END {label}-----\n".encode() for label, der in blocks
    )


def read_statuses(data: bytes) -> Statuses:
    """Reads what `encode_statuses` wrote.

    Raises:
        EvidenceError: the data are not responses and lists, or there are too many.
    """
    blocks = _BLOCK.findall(data)
    if _BLOCK.sub(b"", data).strip() or len(blocks) > MAX_STATUSES:
        raise EvidenceError(f"revocation statuses are up to {MAX_STATUSES} PEM blocks of OCSP responses and CRLs")
    try:
        decoded = [(label, base64.b64decode(b"".join(text.split()), validate=True)) for label, text in blocks]
        responses = [ocsp.load_der_ocsp_response(der) for label, der in decoded if label == b"OCSP RESPONSE"]
        lists = [x509.load_der_x509_crl(der) for label, der in decoded if label != b"OCSP RESPONSE"]
    except (ValueError, TypeError, binascii.Error, UnsupportedAlgorithm, x509.InvalidVersion):
        raise EvidenceError("a revocation status is neither an OCSP response nor a CRL") from None
    if any(response.response_status is not ocsp.OCSPResponseStatus.SUCCESSFUL for response in responses):
        raise EvidenceError("an OCSP response says that its responder could not answer; have the node fetch it again")
    return Statuses(tuple(responses), tuple(lists))


def check_revocation(
    findings: Findings, policy: AttestationPolicy, chain: Sequence[x509.Certificate], statuses: Statuses, now: float, slug: str
) -> None:
    """Adds a step for whether any certificate of a chain was revoked.

    Args:
        findings: receives one step: the first certificate that is revoked or has no fresh status, or that all are valid.
        policy: maximum age of a status (`revocation_max_age_s`).
        chain: from the first certificate to check to the root, which is never revoked; its signatures were checked.
        statuses: the stapled statuses.
        now: Unix seconds.
        slug: slug of the step.
    """
    moment = datetime.fromtimestamp(now, UTC)
    oldest = moment - timedelta(seconds=policy.revocation_max_age_s)
    lacking: list[str] = []
    for certificate, issuer in pairwise(chain):
        try:
            known = list(_find(certificate, issuer, statuses, moment))
        except Exception as error:  # parsed lazily; a dozen types, depending on the error
            findings.fail(slug, f"a revocation status cannot be read ({type(error).__name__}); have the node fetch it again")
            return
        if any(status.is_revoked for status in known):  # an old "revoked" still counts: it is permanent
            findings.fail(slug, f"{name_subject(issuer)} revoked the certificate {name_subject(certificate)}")
            return
        if not any(status.is_revoked is False and status.holds(oldest, moment) for status in known):
            lacking.append(name_subject(certificate))
    if lacking:
        age_h = policy.revocation_max_age_s / 3600
        text = f"no OCSP response or CRL of the last {age_h:.0f} h says whether these were revoked: {', '.join(lacking)}"
        findings.doubt(policy, slug, f"{text}; have the node staple fresh ones (--nvidia-collateral)")
    else:
        findings.prove(slug, f"none of {', '.join(name_subject(certificate) for certificate in chain[:-1])} was revoked")


def _find(
    certificate: x509.Certificate, issuer: x509.Certificate, statuses: Statuses, moment: datetime
) -> Iterator[CertificateStatus]:
    for response in statuses.responses:
        if _is_signed_for(response, issuer, moment):
            for single in response.responses:
                if _is_about(single, certificate, issuer):
                    yield CertificateStatus(_REVOKED[single.certificate_status], single.this_update_utc, single.next_update_utc)
    for crl in statuses.lists:
        if crl.issuer == issuer.subject and _is_whole(crl) and _verifies_list(crl, issuer):
            is_revoked = crl.get_revoked_certificate_by_serial_number(certificate.serial_number) is not None
            yield CertificateStatus(is_revoked, crl.last_update_utc, crl.next_update_utc)


def _is_about(single: ocsp.OCSPSingleResponse, certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    asked = ocsp.OCSPRequestBuilder().add_certificate(certificate, issuer, single.hash_algorithm).build()
    names = ("serial_number", "issuer_name_hash", "issuer_key_hash")
    return all(getattr(single, name) == getattr(asked, name) for name in names)


def _is_signed_for(response: ocsp.OCSPResponse, issuer: x509.Certificate, moment: datetime) -> bool:
    try:
        beside = response.certificates[:MAX_CHAIN]
    except ValueError:  # malformed ones
        return False
    delegates = [certificate for certificate in beside if _is_delegate(certificate, issuer, moment)]
    return any(_verifies_response(response, signer) for signer in (issuer, *delegates))


def _is_delegate(certificate: x509.Certificate, issuer: x509.Certificate, moment: datetime) -> bool:
    try:
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        holds = certificate.not_valid_before_utc <= moment <= certificate.not_valid_after_utc
        certificate.verify_directly_issued_by(issuer)
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return holds and ExtendedKeyUsageOID.OCSP_SIGNING in usage


def _verifies_response(response: ocsp.OCSPResponse, signer: x509.Certificate) -> bool:
    try:
        key, algorithm = signer.public_key(), response.signature_hash_algorithm
        if algorithm is None or algorithm.digest_size < _LEAST_DIGEST_BYTES:
            return False
        if isinstance(key, EllipticCurvePublicKey):
            key.verify(response.signature, response.tbs_response_bytes, ECDSA(algorithm))
            return True
        if isinstance(key, RSAPublicKey):
            key.verify(response.signature, response.tbs_response_bytes, PKCS1v15(), algorithm)
            return True
    except (InvalidSignature, UnsupportedAlgorithm):
        pass
    return False


def _is_whole(crl: x509.CertificateRevocationList) -> bool:
    """Rejects partial, delta and indirect lists, which have critical extensions (RFC 5280 section 5.2)."""
    try:
        return not any(extension.critical for extension in crl.extensions)
    except (ValueError, x509.DuplicateExtension):
        return False


def _verifies_list(crl: x509.CertificateRevocationList, issuer: x509.Certificate) -> bool:
    try:
        return crl.is_signature_valid(issuer.public_key())  # type: ignore[arg-type]  # a key that cannot sign raises TypeError
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return False
