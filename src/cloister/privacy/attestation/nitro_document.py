"""The attestation document of an AWS Nitro enclave as fields: COSE_Sign1 (RFC 9052 section 4.2) around a CBOR map. Pure.

Fields and their bounds: "Nitro Enclaves Attestation Process" of the repository aws-nitro-enclaves-nsm-api, section 3.1. Nothing
is believed yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeVar

from cloister.privacy.attestation.cbor import Item, encode_array, encode_bytes, encode_text, read_cbor
from cloister.privacy.attestation.evidence import EvidenceError
from cloister.privacy.attestation.registers import NUM_PCRS

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
    """What a document says.

    Attributes:
        module_id: the enclave's name, with that of its instance.
        timestamp_ms: when the document was made, Unix milliseconds.
        pcrs: registers by number, SHA-384.
        certificate: of the key that signed, DER.
        cabundle: from the root to the issuer of `certificate`, DER.
        public_key, user_data, nonce: what the enclave asked to have signed; None where it gave none.
        signature: r and s, 48 bytes each, big endian.
        signed: the bytes that the signature is over (`Sig_structure`).
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
        EvidenceError: it is not one, or not signed as documents are.
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
