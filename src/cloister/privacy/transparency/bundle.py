"""What the gateway serves as its epoch: the epoch and everything that a client needs to believe it. No I/O, no clock."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from cloister.privacy.transparency.epoch import Count, Epoch
from cloister.privacy.transparency.refusal import Reason, TransparencyError

MAX_BUNDLE_BYTES = 262_144
"""An epoch of the largest size, a release, a minimum release, three proofs and a checkpoint, with room to spare."""

Hash = Annotated[bytes, Meta(min_length=32, max_length=32)]
Proof = Annotated[tuple[Hash, ...], Meta(max_length=64)]


class LoggedEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of the log with its proof.

    Attributes:
        entry: the bytes of the leaf.
        index: which leaf it is, from 0.
        proof: RFC 6962 inclusion proof under the bundle's checkpoint, the lowest hash first.
    """

    entry: Annotated[bytes, Meta(max_length=65_535)]
    index: Count
    proof: Proof


class EpochBundle(Struct, frozen=True, forbid_unknown_fields=True):
    """One file, the same for every client, at `/.well-known/cloister/epoch`.

    Attributes:
        checkpoint: C2SP checkpoint with the signatures of the log and of its witnesses.
        epoch: the epoch; `epoch_leaf(epoch)` is the entry that `proof` is about.
        index: which leaf of the log the epoch is.
        proof: its inclusion proof under the checkpoint.
        release: the entry of the release that the epoch names.
        minimum: the newest entry that says which releases are revoked; None if there is none yet.
    """

    checkpoint: Annotated[str, Meta(max_length=16_384)]
    epoch: Epoch
    index: Count
    proof: Proof
    release: LoggedEntry
    minimum: LoggedEntry | None


def encode_bundle(bundle: EpochBundle) -> bytes:
    """Canonical JSON, as epochs are."""
    return msgspec.json.encode(bundle, order="sorted")


def parse_bundle(data: bytes) -> EpochBundle:
    """Reads a bundle; whether it can be believed is `checks.verify_bundle`'s to say.

    Raises:
        TransparencyError: too large, or not of this form.
    """
    if len(data) > MAX_BUNDLE_BYTES:
        raise TransparencyError(Reason.TOO_LARGE, f"the epoch bundle is over {MAX_BUNDLE_BYTES:,} bytes")
    try:
        bundle = msgspec.json.decode(data, type=EpochBundle)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TransparencyError(Reason.MALFORMED, f"the epoch bundle cannot be read: {error}") from None
    if encode_bundle(bundle) != data:
        raise TransparencyError(Reason.NOT_CANONICAL, "the epoch bundle is not in its canonical form")
    return bundle
