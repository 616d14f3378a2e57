"""Keys and certificates by which processes recognise each other: TLS 1.3, each side expects one certificate.

A front and an engine host each draw a key, which never leaves the process. Only certificates are handed over, through whatever
starts the host: they are not secret, but nobody may replace them on the way. Engines that exchange KV share one key, derived
from the secret that their front gives them.
"""

from __future__ import annotations

import datetime
import os
import ssl
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

from cloister.types.errors import ConfigError

# A certificate never expires (RFC 5280, 4.1.2.5), so no machine's clock matters: the other side knows every bit of it.
_ALWAYS: Final = (
    datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC),
    datetime.datetime(9999, 12, 31, 23, 59, 59, 0, datetime.UTC),
)


_PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey
_PublicKey = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey


@dataclass(frozen=True, slots=True)
class Identity:
    """A key of one process or several, and its certificate.

    Attributes:
        certificate: PEM.
    """

    certificate: str
    _key: bytes

    @classmethod
    def make(cls) -> Identity:
        """Draws a key (P-256) and signs a certificate with it."""
        key = ec.generate_private_key(ec.SECP256R1())
        return cls._of(key, _certificate(key.public_key(), x509.random_serial_number()).sign(key, hashes.SHA256()))

    @classmethod
    def derive(cls, secret: bytes) -> Identity:
        """Returns the identity that all holders of a secret of 32 random bytes share: one key and certificate (Ed25519)."""
        key = ed25519.Ed25519PrivateKey.from_private_bytes(HKDF(hashes.SHA256(), 32, None, b"cloister/identity").derive(secret))
        return cls._of(key, _certificate(key.public_key(), 1).sign(key, None))

    @classmethod
    def _of(cls, key: _PrivateKey, certificate: x509.Certificate) -> Identity:
        return cls(
            certificate.public_bytes(serialization.Encoding.PEM).decode(),
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        )

    def __repr__(self) -> str:
        return "Identity()"

    def server_context(self, peer: str) -> ssl.SSLContext:
        """Returns the settings of a server whose only client has the certificate `peer`. Raises ConfigError as `read_peer`."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER, peer)
        context.num_tickets = 0  # no session is resumed, so each connection shows its certificates
        return context

    def client_context(self, peer: str) -> ssl.SSLContext:
        """Returns the settings of a client whose only server has the certificate `peer`. Raises ConfigError as `read_peer`."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT, peer)

    def _context(self, protocol: int, peer: str) -> ssl.SSLContext:
        read_peer(peer)
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate is known; a name adds nothing
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=peer)
        self._load_into(context)
        return context

    def _load_into(self, context: ssl.SSLContext) -> None:
        """Python reads keys from files only; this one is in memory."""
        descriptor = os.memfd_create("cloister-identity", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, self._key + self.certificate.encode())
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)


def _certificate(key: _PublicKey, serial_number: int) -> x509.CertificateBuilder:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "cloister")])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key)
        .serial_number(serial_number)
        .not_valid_before(_ALWAYS[0])
        .not_valid_after(_ALWAYS[1])
    )


def read_peer(certificate: str) -> bytes:
    """Returns the DER form of one certificate in PEM.

    Raises:
        ConfigError: it is not a certificate.
    """
    try:
        return x509.load_pem_x509_certificate(certificate.encode()).public_bytes(serialization.Encoding.DER)
    except ValueError:
        raise ConfigError("the other side's certificate is not in PEM; start both sides with the same version") from None


def is_peer(connection: object, certificate: bytes) -> bool:
    """Whether the other side of a TLS connection has shown exactly this certificate (DER), not one that it signed."""
    return isinstance(connection, ssl.SSLObject | ssl.SSLSocket) and connection.getpeercert(binary_form=True) == certificate
