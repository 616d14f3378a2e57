"""A Nitro hypervisor of our own: a root, certificates and the key that signs documents, so that a document can say anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding

from cloister.trust.attestation.cbor import encode_array, encode_bytes, encode_text
from cloister.trust.attestation.certificates import digest_key

MADE = datetime(2025, 6, 1, tzinfo=UTC)
NOW = MADE.timestamp() + 600
PCRS = {number: bytes(48) for number in range(16)} | {number: bytes((0x10 + number,)) * 48 for number in range(5)}
_PROTECTED = bytes.fromhex("a1013822")  # {1: -35}
_NULL = b"\xf6"


def encode_uint(value: int) -> bytes:
    """An unsigned number as CBOR, below 2**64."""
    if value < 24:
        return bytes((value,))
    for code, length in ((24, 1), (25, 2), (26, 4)):
        if value < 1 << 8 * length:
            return bytes((code,)) + value.to_bytes(length, "big")
    return b"\x1b" + value.to_bytes(8, "big")


def encode_map(items: dict[bytes, bytes]) -> bytes:
    """A map of up to 23 items that are encoded already."""
    return bytes((0xA0 | len(items),)) + b"".join(key + value for key, value in items.items())


def seal(protected: bytes, payload: bytes, signature: bytes, unprotected: bytes = b"\xa0") -> bytes:
    """A COSE_Sign1 of these parts."""
    return b"\x84" + encode_bytes(protected) + unprotected + encode_bytes(payload) + encode_bytes(signature)


@dataclass
class NitroPlatform:
    """Certificates, and the key that signs documents.

    Attributes:
        hours: how long the enclave's certificate holds.
        made: when certificates and documents were made.
    """

    hours: int = 3
    made: datetime = MADE
    _keys: list[ec.EllipticCurvePrivateKey] = field(init=False)

    def __post_init__(self) -> None:
        self._keys = [ec.generate_private_key(ec.SECP384R1()) for _ in range(4)]
        names = ["aws.nitro-enclaves", "zonal", "instance", "enclave"]
        self.chain = [self._certify(names, place) for place in range(4)]

    @property
    def roots(self) -> frozenset[str]:
        return frozenset({digest_key(self._keys[0].public_key())})

    def payload(self, **changes: object) -> dict[str, bytes]:
        """The fields of a document, encoded; `changes` replace or (None) drop them."""
        pcrs = changes.pop("pcrs", PCRS)
        assert isinstance(pcrs, dict)
        encoded: dict[str, bytes | None] = {
            "module_id": encode_text("i-0-enc0"),
            "digest": encode_text("SHA384"),
            "timestamp": encode_uint(int(self.made.timestamp() * 1000)),
            "pcrs": encode_map({encode_uint(number): encode_bytes(value) for number, value in pcrs.items()}),
            "certificate": encode_bytes(self.chain[-1]),
            "cabundle": encode_array([encode_bytes(certificate) for certificate in self.chain[:-1]]),
            "public_key": _NULL,
            "user_data": _NULL,
            "nonce": _NULL,
        }
        for name, value in changes.items():
            assert value is None or isinstance(value, bytes)
            encoded[name] = value
        return {name: value for name, value in encoded.items() if value is not None}

    def document(self, **changes: object) -> bytes:
        """A signed document."""
        return self.sign(encode_map({encode_text(name): value for name, value in self.payload(**changes).items()}))

    def sign(self, payload: bytes, protected: bytes = _PROTECTED, unprotected: bytes = b"\xa0") -> bytes:
        """Returns a COSE_Sign1 around a payload."""
        signed = encode_array([encode_text("Signature1"), encode_bytes(protected), encode_bytes(b""), encode_bytes(payload)])
        r, s = decode_dss_signature(self._keys[-1].sign(signed, ec.ECDSA(SHA384())))
        return seal(protected, payload, r.to_bytes(48, "big") + s.to_bytes(48, "big"), unprotected)

    def _certify(self, names: list[str], place: int) -> bytes:
        is_authority = place < len(names) - 1
        life = timedelta(days=365) if is_authority else timedelta(hours=self.hours)
        usage = x509.KeyUsage(not is_authority, False, False, False, False, is_authority, is_authority, False, False)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(names[place]))
            .issuer_name(_name(names[max(0, place - 1)]))
            .public_key(self._keys[place].public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self.made - timedelta(minutes=1))
            .not_valid_after(self.made + life)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(usage, critical=True)
        )
        return builder.sign(self._keys[max(0, place - 1)], SHA384()).public_bytes(Encoding.DER)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
