"""A TDX platform of our own: certificates, collateral and quotes made after real ones, so that a quote can say anything."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from cloister.trust.attestation.tdx import read_quote
from tests import attestation_vectors as real

NOW = datetime.fromtimestamp(real.NOW, UTC)
SGX_EXTENSION = x509.ObjectIdentifier("1.2.840.113741.1.13.1")
BODY = real.td_quote()[48:632]
_ENCLAVE_AT = 632 + 4 + 128 + 6
_AUTHENTICATION = bytes(range(32))


def make_body(**changes: bytes | int) -> bytes:
    """The body of the real quote with other attributes, measurement or report data."""
    body = bytearray(BODY)
    places = {"seam_attributes": 112, "attributes": 120, "mrtd": 136, "report_data": 520}
    places |= {"mrconfigid": 184, "mrowner": 232, "mrownerconfig": 280}
    for name, value in changes.items():
        encoded = value.to_bytes(8, "little") if isinstance(value, int) else value
        body[places[name] : places[name] + len(encoded)] = encoded
    return bytes(body)


@dataclass
class TdxPlatform:
    """Certificates, collateral, and the keys that sign quotes.

    Attributes:
        status: what the collateral says of the platform's TCB.
    """

    status: str = "UpToDate"
    _root: ec.EllipticCurvePrivateKey = field(init=False)
    _pck: ec.EllipticCurvePrivateKey = field(init=False)

    def __post_init__(self) -> None:
        self._root, middle, self._pck, tcb = (ec.generate_private_key(ec.SECP256R1()) for _ in range(4))
        names = "Root CA", "Platform CA", "PCK", "TCB Signing"
        root, platform, pck, signing = names
        self.root = _certify(root, self._root, root, self._root)
        middle_certificate = _certify(platform, middle, root, self._root)
        (extension,) = [e for e in _real_pck().extensions if e.oid == SGX_EXTENSION]
        leaf = _certify(pck, self._pck, platform, middle, extension=extension.value)
        self._chain = _to_pem(leaf, middle_certificate, self.root)
        signer = _to_pem(_certify(signing, tcb, root, self._root, ca=False), self.root)
        given = json.loads(real.td_collateral())
        module, levels, platforms = given["tcb_info"].partition('"tcbLevels":[{"tcb":{"sgxtcbcomponents"')
        assert levels
        tcb_info = module + levels + platforms.replace('"tcbStatus":"UpToDate"', f'"tcbStatus":"{self.status}"')
        self.collateral = json.dumps(
            {
                "pck_crl_issuer_chain": _to_pem(middle_certificate, self.root).decode(),
                "root_ca_crl": _revoke_none(root, self._root).hex(),
                "pck_crl": _revoke_none(platform, middle).hex(),
                "tcb_info_issuer_chain": signer.decode(),
                "tcb_info": tcb_info,
                "tcb_info_signature": _sign(tcb, tcb_info.encode()).hex(),
                "qe_identity_issuer_chain": signer.decode(),
                "qe_identity": given["qe_identity"],
                "qe_identity_signature": _sign(tcb, given["qe_identity"].encode()).hex(),
            }
        ).encode()

    def quote(self, body: bytes, *, body_type: int | None = None) -> bytes:
        """Returns a quote with this body: of version 4, or of version 5 with a type of body (2: TDX 1.0, 3: TDX 1.5)."""
        key = ec.generate_private_key(ec.SECP256R1())
        public = key.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)[1:]
        enclave = bytearray(real.td_quote()[_ENCLAVE_AT : _ENCLAVE_AT + 384])
        enclave[320:384] = hashlib.sha256(public + _AUTHENTICATION).digest() + bytes(32)
        signed = real.td_quote()[:48] + body
        if body_type is not None:
            signed = struct.pack("<H", 5) + real.td_quote()[2:48] + struct.pack("<HI", body_type, len(body)) + body
        chain = struct.pack("<HI", 5, len(self._chain)) + self._chain
        authentication = struct.pack("<H", len(_AUTHENTICATION)) + _AUTHENTICATION
        inner = bytes(enclave) + _sign(self._pck, bytes(enclave)) + authentication + chain
        data = _sign(key, signed) + public + struct.pack("<HI", 6, len(inner)) + inner
        return signed + struct.pack("<I", len(data)) + data


def _real_pck() -> x509.Certificate:
    return x509.load_pem_x509_certificates(read_quote(real.td_quote()).pck_chain.rstrip(b"\0"))[0]


def _sign(key: ec.EllipticCurvePrivateKey, data: bytes) -> bytes:
    r, s = decode_dss_signature(key.sign(data, ec.ECDSA(SHA256())))
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def _certify(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    ca: bool = True,
    extension: x509.ExtensionType | None = None,
) -> x509.Certificate:
    is_authority = ca and extension is None
    usage = x509.KeyUsage(not is_authority, False, False, False, False, is_authority, is_authority, False, False)
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - timedelta(days=30))
        .not_valid_after(NOW + timedelta(days=3650))
        .add_extension(authority, critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(usage, critical=True)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    )
    if extension is not None:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(issuer_key, SHA256())


def _revoke_none(issuer: str, key: ec.EllipticCurvePrivateKey) -> bytes:
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(_name(issuer))
        .last_update(NOW - timedelta(days=1))
        .next_update(NOW + timedelta(days=29))
        .add_extension(authority, critical=False)
        .add_extension(x509.CRLNumber(1), critical=False)
    )
    return builder.sign(key, SHA256()).public_bytes(Encoding.DER)


def _to_pem(*certificates: x509.Certificate) -> bytes:
    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in certificates)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"Test {name}")])
