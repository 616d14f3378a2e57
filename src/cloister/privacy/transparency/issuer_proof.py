"""Proof that an issuer stated two keys for one time, as a file that anybody can check. No I/O, no clock."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from cloister.privacy.transparency.epoch import IssuerEntry
from cloister.privacy.transparency.issuer_keys import IssuerIdentity, find_contradiction
from cloister.privacy.transparency.note import PublicKey
from cloister.privacy.transparency.refusal import Reason, TransparencyError


class IssuerProof(Struct, frozen=True, forbid_unknown_fields=True):
    """Two statements of one issuer that cannot both be.

    Attributes:
        issuer_key: verifies both; it is the checker's to say whose that is.
        statements: as the epoch file has them.
    """

    issuer_key: Annotated[str, Meta(max_length=256)]
    statements: tuple[IssuerEntry, IssuerEntry]


def encode_proof(issuer: IssuerIdentity, statements: tuple[IssuerEntry, IssuerEntry]) -> bytes:
    """Returns the file's content, JSON."""
    proof = IssuerProof(str(issuer.key), statements)
    return msgspec.json.format(msgspec.json.encode(proof, order="sorted")) + b"\n"


def check_proof(data: bytes, key: PublicKey) -> tuple[IssuerEntry, IssuerEntry]:
    """Returns the two statements if they prove what the file says.

    Args:
        key: the issuer's verifier key, from the trust file and not from the proof.

    Raises:
        TransparencyError: it is malformed, of another issuer, not signed, or the statements do not contradict each other.
    """
    try:
        proof = msgspec.json.decode(data, type=IssuerProof)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise TransparencyError(Reason.MALFORMED, "this is no proof that a client wrote about an issuer") from None
    if proof.issuer_key != str(key):
        raise TransparencyError(Reason.BAD_SIGNATURE, "the proof is about another issuer than the one whose key was given")
    issuer = IssuerIdentity(proof.statements[0].url, key)
    if not all(map(issuer.has_signed, proof.statements)):
        raise TransparencyError(Reason.BAD_SIGNATURE, "the issuer did not sign both statements, so they prove nothing")
    if find_contradiction(proof.statements) is None:
        raise TransparencyError(Reason.MALFORMED, "both statements can be true at once, so they prove nothing")
    return proof.statements
