"""Certificate chains up to a root that is pinned by key. No I/O, no clock.

The vendors' hierarchies are not a web PKI: there is no host name, AMD's VCEK has the serial number 0, and roots are identified
by key. So this module checks the chain itself: each certificate is signed by the next one, which is a CA; all are valid now;
the last is pinned.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from cloister.trust.attestation.base import Findings
from cloister.trust.attestation.evidence import EvidenceError

MAX_CHAIN = 8


def load_certificates(data: bytes) -> list[x509.Certificate]:
    """Reads one certificate in DER, or several in PEM, in order.

    Raises:
        EvidenceError: there are none, too many, or the data are not certificates.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a VCEK's serial number is 0, whatever RFC 5280 says
            if data.lstrip().startswith(b"-----BEGIN"):
                chain = x509.load_pem_x509_certificates(data)
            else:
                chain = [x509.load_der_x509_certificate(data)]
            for certificate in chain:
                _parse_whole(certificate)
    except Exception as error:  # a dozen types, depending on the error: ValueError, InvalidVersion, UnsupportedAlgorithm, ...
        raise EvidenceError(f"a certificate of the evidence cannot be read ({type(error).__name__})") from None
    if not 0 < len(chain) <= MAX_CHAIN:
        raise EvidenceError(f"the evidence has a chain of {len(chain)} certificates; 1 to {MAX_CHAIN} are read")
    return chain


def digest_key(key: CertificatePublicKeyTypes) -> str:
    """Returns the SHA-256 digest of a public key as SubjectPublicKeyInfo, hex: roots are pinned by it."""
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def elliptic_key(certificate: x509.Certificate) -> EllipticCurvePublicKey:
    """Returns a certificate's elliptic-curve key.

    Raises:
        EvidenceError: its key has another type.
    """
    key = certificate.public_key()
    if not isinstance(key, EllipticCurvePublicKey):
        raise EvidenceError("the certificate that should sign the report has no elliptic-curve key")
    return key


def check_chain(findings: Findings, chain: Sequence[x509.Certificate], roots: frozenset[str], now: float, maker: str) -> bool:
    """Adds the errors of a chain, or that it is proved.

    Args:
        findings: receives `chain-*` steps.
        chain: from the certificate that signs the report to the root.
        roots: `digest_key` of the trusted roots.
        now: Unix seconds at which all of them must be valid.
        maker: vendor of the chain, for messages.

    Returns:
        Whether the whole chain is valid.
    """
    names = " <- ".join(name_subject(certificate) for certificate in chain)
    if digest_key(chain[-1].public_key()) not in roots:
        findings.fail(
            "chain-root", f"the certificates end in {name_subject(chain[-1])}, which is no root of {maker} that is known here"
        )
        return False
    issuers = [*chain[1:], chain[-1]]  # the root signs itself
    for below, (certificate, issuer) in enumerate(zip(chain, issuers, strict=True)):
        if not is_authority(issuer, below if certificate is not issuer else 0):
            text = f"{name_subject(issuer)} may not sign certificates of this kind, but signed {name_subject(certificate)}"
            findings.fail("chain-authority", text)
            return False
        try:
            certificate.verify_directly_issued_by(issuer)
        except (InvalidSignature, ValueError, TypeError, UnsupportedAlgorithm):
            findings.fail(
                "chain-signature", f"the certificate {name_subject(certificate)} was not signed by {name_subject(issuer)}"
            )
            return False
    moment = datetime.fromtimestamp(now, UTC)
    for certificate in chain:
        if not certificate.not_valid_before_utc <= moment <= certificate.not_valid_after_utc:
            first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
            findings.fail("chain-expired", f"{name_subject(certificate)} holds from {first:%Y-%m-%d} to {last:%Y-%m-%d} only")
            return False
    findings.prove("chain", f"the certificates lead to a root of {maker}: {names}")
    return True


def is_authority(certificate: x509.Certificate, below: int = 0) -> bool:
    """Returns whether a certificate may sign others (RFC 5280 section 4.2.1.9).

    Args:
        below: number of authorities between it and the end of the chain.
    """
    try:
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    except x509.ExtensionNotFound:
        return False
    return constraints.ca and usage and (constraints.path_length is None or below <= constraints.path_length)


def name_subject(certificate: x509.Certificate) -> str:
    """Returns a certificate's common name, in printable form."""
    names = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    shown = str(names[0].value) if names else "a certificate without a name"
    return "".join(letter for letter in shown[:64] if letter.isprintable())


def _parse_whole(certificate: x509.Certificate) -> None:
    """Parses all fields, which are lazy, so that errors occur before anything is trusted."""
    for field in ("subject", "issuer", "not_valid_before_utc", "not_valid_after_utc", "serial_number", "extensions"):
        getattr(certificate, field)
    certificate.public_key()
