"""A certificate authority of our own: certifies, answers whether it revoked a certificate, and lists those that it did."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA1, SHA256, SHA384, HashAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import ocsp
from cryptography.x509.oid import ExtendedKeyUsageOID

from cloister.trust.attestation.certificates import digest_key

MADE = datetime(2023, 1, 1, tzinfo=UTC)
ENDS = datetime(2043, 1, 1, tzinfo=UTC)


class Authority:
    """A key with its certificate.

    Args:
        name: common name.
        issuer: who certifies it; None: itself.
        is_authority: whether it may certify.
        answers: whether it may sign OCSP responses for its issuer.
        path_length: how many authorities may stand below it; None: any number.
        extension: one more, as another certificate has it.
    """

    def __init__(
        self,
        name: str,
        issuer: Authority | None = None,
        *,
        is_authority: bool = True,
        answers: bool = False,
        path_length: int | None = None,
        extension: x509.Extension[x509.ExtensionType] | None = None,
    ) -> None:
        self.key = ec.generate_private_key(ec.SECP384R1())
        usage = x509.KeyUsage(not is_authority, False, False, False, False, is_authority, is_authority, False, False)
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject if issuer is None else issuer.certificate.subject)
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(MADE)
            .not_valid_after(ENDS)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=path_length), critical=True)
            .add_extension(usage, critical=True)
        )
        if answers:
            builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.OCSP_SIGNING]), critical=False)
        if extension is not None:
            builder = builder.add_extension(extension.value, critical=extension.critical)
        self.certificate = builder.sign(self.key if issuer is None else issuer.key, SHA384())
        self.chain: list[Authority] = [self, *(issuer.chain if issuer else [])]

    @property
    def roots(self) -> frozenset[str]:
        """What pins the end of its chain."""
        return frozenset({digest_key(self.chain[-1].key.public_key())})

    @property
    def certificates(self) -> list[x509.Certificate]:
        """Its chain, to the root."""
        return [one.certificate for one in self.chain]

    @property
    def pem(self) -> bytes:
        """Its chain in PEM."""
        return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in self.certificates)

    def answer(
        self,
        certificate: x509.Certificate,
        since: float,
        *,
        days: float | None = 7,
        status: ocsp.OCSPCertStatus = ocsp.OCSPCertStatus.GOOD,
        signer: Authority | None = None,
        beside: Sequence[Authority] = (),
        algorithm: HashAlgorithm | None = None,
    ) -> bytes:
        """An OCSP response about a certificate that this authority issued, DER.

        Args:
            since: Unix seconds from which it holds.
            days: how long; None: it names no end.
            signer: who signs it, with its own certificate beside; this authority unless given.
            beside: whose certificates stand before that one.
            algorithm: of the certificate's identifier, SHA-1 as everybody uses unless given.
        """
        moment = datetime.fromtimestamp(since, UTC)
        is_revoked = status is ocsp.OCSPCertStatus.REVOKED
        builder = ocsp.OCSPResponseBuilder().add_response(
            cert=certificate,
            issuer=self.certificate,
            algorithm=algorithm or SHA1(),
            cert_status=status,
            this_update=moment,
            next_update=None if days is None else moment + timedelta(days=days),
            revocation_time=moment if is_revoked else None,
            revocation_reason=None,
        )
        signing = signer or self
        builder = builder.responder_id(ocsp.OCSPResponderEncoding.HASH, signing.certificate)
        if signer is not None:
            builder = builder.certificates([*(one.certificate for one in beside), signer.certificate])
        return builder.sign(signing.key, SHA256()).public_bytes(Encoding.DER)

    def list_revoked(
        self, since: float, *revoked: x509.Certificate, days: float = 7, partial: bool = False, signer: Authority | None = None
    ) -> bytes:
        """A CRL of this authority, DER; `partial` says that it covers certificates of users only."""
        moment = datetime.fromtimestamp(since, UTC)
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(moment)
            .next_update(moment + timedelta(days=days))
        )
        if partial:
            scope = x509.IssuingDistributionPoint(None, None, True, False, None, False, False)
            builder = builder.add_extension(scope, critical=True)
        for certificate in revoked:
            entry = x509.RevokedCertificateBuilder().serial_number(certificate.serial_number).revocation_date(moment)
            builder = builder.add_revoked_certificate(entry.build())
        return builder.sign((signer or self).key, SHA384()).public_bytes(Encoding.DER)
