"""DSSE envelopes, and the in-toto statements in them. No I/O, no clock.

Sources: secure-systems-lab/dsse protocol.md (PAE, version 1), in-toto attestation framework v1 (Statement), SLSA provenance v1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from cloister.trust.transparency.note import PrivateKey, PublicKey
from cloister.trust.transparency.refusal import Reason, TransparencyError

IN_TOTO = "application/vnd.in-toto+json"
PROVENANCE = "https://slsa.dev/provenance/v1"


class EnvelopeSignature(Struct, frozen=True, omit_defaults=True):
    """A signature of an envelope.

    Attributes:
        sig: over `pae` of the envelope; 64 bytes for Ed25519.
        keyid: a hint about the key: the verifier key's name and id, joined by a plus sign.
    """

    sig: Annotated[bytes, Meta(max_length=512)]
    keyid: Annotated[str, Meta(max_length=256)] = ""


class Envelope(Struct, frozen=True, rename={"payload_type": "payloadType"}):
    """A payload with its type, and signatures of both."""

    payload: bytes
    payload_type: str
    signatures: Annotated[tuple[EnvelopeSignature, ...], Meta(min_length=1, max_length=16)]


class Subject(Struct, frozen=True):
    """The subject of a statement: a name, and its digests in hex by algorithm."""

    name: str
    digest: dict[str, str]


class InTotoStatement(Struct, frozen=True, rename={"type": "_type", "predicate_type": "predicateType"}):
    """An in-toto statement, version 1."""

    subject: tuple[Subject, ...]
    predicate_type: str
    predicate: dict[str, Any]
    type: Literal["https://in-toto.io/Statement/v1"] = "https://in-toto.io/Statement/v1"


def pae(payload_type: str, payload: bytes) -> bytes:
    """The pre-authentication encoding: the signed bytes, in which type and payload are unambiguous."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def seal_envelope(payload_type: str, payload: bytes, keys: Iterable[PrivateKey]) -> Envelope:
    """Signs a payload with each of the keys."""
    message = pae(payload_type, payload)
    return Envelope(payload, payload_type, tuple(EnvelopeSignature(key.sign(message), _key_id(key.public)) for key in keys))


def open_envelope(envelope: Envelope, payload_type: str, keys: Iterable[PublicKey]) -> bytes:
    """The payload, if one of the keys signed it as this type. Key ids are hints only: every key is tried.

    Raises:
        TransparencyError: it has another type, or none of the keys signed it.
    """
    message = pae(payload_type, envelope.payload)
    if envelope.payload_type != payload_type or not any(
        key.verify(signature.sig, message) for key in keys for signature in envelope.signatures
    ):
        raise TransparencyError(Reason.BAD_SIGNATURE, "the envelope is not signed by a key that is trusted for releases")
    return envelope.payload


def make_provenance(subjects: Mapping[str, str], definition: Mapping[str, Any], builder: str) -> bytes:
    """A SLSA provenance statement about things with these SHA-256 digests, as canonical JSON.

    Args:
        subjects: hex digests by name.
        definition: `buildDefinition` of SLSA provenance v1.
        builder: URI of the builder.
    """
    subject = tuple(Subject(name, {"sha256": digest}) for name, digest in sorted(subjects.items()))
    predicate = {"buildDefinition": dict(definition), "runDetails": {"builder": {"id": builder}}}
    return msgspec.json.encode(InTotoStatement(subject, PROVENANCE, predicate), order="sorted")


def read_statement(payload: bytes) -> InTotoStatement:
    """Reads an in-toto statement.

    Raises:
        TransparencyError: it is malformed.
    """
    try:
        return msgspec.json.decode(payload, type=InTotoStatement)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TransparencyError(Reason.MALFORMED, f"the envelope does not hold an in-toto statement: {error}") from None


def _key_id(key: PublicKey) -> str:
    return f"{key.name}+{key.key_id.hex()}"
