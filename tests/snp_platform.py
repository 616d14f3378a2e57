"""An SEV-SNP platform of our own: ARK, ASK and VCEK made here, so that a report can say anything and still be signed."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding

from cloister.trust.attestation.certificates import digest_key

MADE = datetime(2025, 1, 1, tzinfo=UTC)
NOW = datetime(2025, 6, 1, tzinfo=UTC).timestamp()
CHIP_ID = bytes(range(1, 65))
TCB = bytes((3, 0, 0, 0, 0, 0, 23, 219))  # boot loader 3, TEE 0, SNP 23, microcode 219
GOOD_POLICY = 0x30000  # SMT, and the bit that must be one
_PSS = padding.PSS(mgf=padding.MGF1(SHA384()), salt_length=48)
_SPL = {"1": 3, "2": 0, "3": 23, "8": 219}


def make_report(
    report_data: bytes,
    *,
    guest_policy: int = GOOD_POLICY,
    vmpl: int = 0,
    measurement: bytes = b"\x4d" * 48,
    host_data: bytes = bytes(32),
    report_id_ma: bytes = b"\xff" * 32,
    tcb: bytes = TCB,
    launch_tcb: bytes = TCB,
    chip_id: bytes = CHIP_ID,
    flags: int = 0,
    version: int = 2,
    algorithm: int = 1,
) -> bytes:
    """The signed part of a report, 0x2A0 bytes."""
    report = bytearray(0x2A0)
    struct.pack_into("<IIQ", report, 0, version, 0, guest_policy)
    struct.pack_into("<II", report, 0x30, vmpl, algorithm)
    report[0x38:0x40] = tcb
    struct.pack_into("<I", report, 0x48, flags)
    report[0x50:0x90] = report_data
    report[0x90:0xC0] = measurement
    report[0xC0:0xE0] = host_data
    report[0x160:0x180] = report_id_ma
    report[0x180:0x188] = tcb
    report[0x1A0:0x1E0] = chip_id
    report[0x1F0:0x1F8] = launch_tcb
    return bytes(report)


@dataclass
class SnpPlatform:
    """Certificates, and the key that signs reports."""

    chip_id: bytes = CHIP_ID
    provider: str | None = None  # whose key (VLEK) signs instead of the chip's
    days: int = 365
    revokes_ask: bool = False
    crl_days: int = 365
    _ark: rsa.RSAPrivateKey = field(init=False)
    _vcek: ec.EllipticCurvePrivateKey = field(init=False)

    def __post_init__(self) -> None:
        self._ark, ask = (rsa.generate_private_key(65537, 2048) for _ in range(2))
        self._vcek = ec.generate_private_key(ec.SECP384R1())
        self._ark_certificate = self._certify("ARK", self._ark, "ARK", self._ark, days=7300)
        middle, leaf = ("ASK", "VCEK") if self.provider is None else ("ASVK", "VLEK")
        self._names = leaf.lower(), middle.lower(), "ark"
        self._ask_certificate = self._certify(middle, ask, "ARK", self._ark, days=7300)
        self._vcek_certificate = self._certify(leaf, self._vcek, middle, ask, days=self.days, is_chip=True)
        self._crl = self._revoke()

    @property
    def roots(self) -> frozenset[str]:
        return frozenset({digest_key(self._ark.public_key())})

    @property
    def extra(self) -> dict[str, bytes]:
        """What evidence carries beside the report."""
        chain = self._vcek_certificate, self._ask_certificate, self._ark_certificate
        named = zip(self._names, (c.public_bytes(Encoding.DER) for c in chain), strict=True)
        return dict(named) | {"crl": self._crl}

    def sign(self, report: bytes) -> bytes:
        """Returns the whole report."""
        r, s = decode_dss_signature(self._vcek.sign(report, ec.ECDSA(SHA384())))
        return report + r.to_bytes(72, "little") + s.to_bytes(72, "little") + bytes(368)

    def _certify(
        self,
        name: str,
        key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey,
        issuer: str,
        issuer_key: rsa.RSAPrivateKey,
        *,
        days: int,
        is_chip: bool = False,
    ) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(_name(issuer))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(MADE)
            .not_valid_after(MADE + timedelta(days=days))
        )
        if is_chip:
            for part, number in _SPL.items():
                builder = builder.add_extension(_extension(f"3.{part}", _number(number)), critical=False)
            if self.provider is None:
                builder = builder.add_extension(_extension("4", self.chip_id), critical=False)
            else:
                text = self.provider.encode()
                builder = builder.add_extension(_extension("5", bytes((0x16, len(text))) + text), critical=False)
        else:
            usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
            builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            builder = builder.add_extension(usage, critical=True)
        return builder.sign(issuer_key, SHA384(), rsa_padding=_PSS)

    def _revoke(self) -> bytes:
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(_name("ARK"))
            .last_update(MADE)
            .next_update(MADE + timedelta(days=self.crl_days))
        )
        if self.revokes_ask:
            revoked = x509.RevokedCertificateBuilder().serial_number(self._ask_certificate.serial_number).revocation_date(MADE)
            builder = builder.add_revoked_certificate(revoked.build())
        return builder.sign(self._ark, SHA384(), rsa_padding=_PSS).public_bytes(Encoding.DER)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _extension(part: str, value: bytes) -> x509.UnrecognizedExtension:
    return x509.UnrecognizedExtension(x509.ObjectIdentifier(f"1.3.6.1.4.1.3704.1.{part}"), value)


def _number(number: int) -> bytes:
    encoded = number.to_bytes(number.bit_length() // 8 + 1, "big")
    return bytes((2, len(encoded))) + encoded
