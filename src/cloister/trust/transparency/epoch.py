"""The epoch file: the nodes, keys and issuers valid for the next hour, the same for every client; and the bundle with its
proofs.

It is canonical JSON (sorted keys, no white space), so that an epoch has a single encoding, which is a leaf of the log: a client
that verifies the leaf under a witnessed checkpoint knows that all others got the same list.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from cloister.trust.transparency.refusal import Reason, TransparencyError

EPOCH_PREFIX = b"cloister epoch v1\n"
"""Prefix of the log's leaf, so that no other kind of leaf can be read as an epoch."""

MAX_EPOCH_BYTES = 65_535 - len(EPOCH_PREFIX)
"""A log entry has 16 bits for its length (C2SP tlog-tiles); about 300 nodes fit."""

MAX_EPOCH_S = 3600
"""Maximum validity of an epoch: node keys live for at most an hour."""

MAX_CLOCK_SKEW_S = 300
"""Tolerance for a client's clock at the start of an epoch. There is none at its end: the nodes' keys are destroyed by then."""

MAX_CAPACITY = 1_000_000
"""Maximum capacity. Capacities are integers whose sum stays far below 2^53."""

Hex = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Url = Annotated[str, Meta(pattern=r"^https?://[!-~]+\Z", max_length=512)]
Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]*\Z", max_length=64)]
MemberName = Annotated[str, Meta(pattern=r"^[!-*,-~]*\Z", max_length=128)]
VerifierKey = Annotated[str, Meta(pattern=r"^[!-~]+\Z", max_length=256)]
Count = Annotated[int, Meta(ge=0, lt=2**53)]
Budget = Annotated[int, Meta(gt=0, lt=10**9)]
Keys = Annotated[bytes, Meta(min_length=1, max_length=8192)]


class GatewayEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """The gateway.

    Attributes:
        url: its URL; clients reach it through a relay only.
        keys: its key configurations, `application/ohttp-keys` (RFC 9458, section 3.1).
    """

    url: Url
    keys: Keys


class IssuerEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """An issuer of tokens.

    Attributes:
        url: its URL.
        token_key: its public key as in RFC 9578 (SPKI with the RSASSA-PSS OID).
        not_before, not_after: period in which it signs, Unix seconds: one key at a time for all clients.
        signature: the issuer's signature over all other fields (`issuer_keys`); clients buy only under signed keys.
        budget: output tokens that one blind token of the key pays for; unset in entries older than this field, under which
            clients buy nothing.
    """

    url: Url
    token_key: Keys
    not_before: Count
    not_after: Count = 0
    signature: Annotated[bytes, Meta(max_length=64)] = b""
    budget: Budget | UnsetType = UNSET


class NodeEntry(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A node that a client may draw.

    Attributes:
        node_id: SHA-256 of the key configuration that its evidence binds, in hex.
        capacity: its weight in the draw, above 0.
        keys: its key configurations, `application/ohttp-keys`, in older epochs; now empty, because they are in its evidence,
            and `node_id` is their digest.
        evidence_sha256: SHA-256 of its evidence document, in hex.
        member: name of its member in the valid membership (`membership`).
    """

    node_id: Hex
    capacity: Annotated[int, Meta(gt=0, le=MAX_CAPACITY)]
    keys: Annotated[bytes, Meta(max_length=8192)]
    evidence_sha256: Hex
    member: MemberName = ""


class Epoch(Struct, frozen=True, forbid_unknown_fields=True):
    """The list of nodes for all clients, valid in [not_before, not_after).

    Attributes:
        epoch: number, increasing by one.
        not_before: start of its validity, Unix seconds.
        not_after: end of its validity, Unix seconds; at most `MAX_EPOCH_S` after not_before.
        gateway: the gateway for requests.
        issuers: issuers whose tokens the gateway accepts, sorted by URL, then key.
        nodes: nodes, sorted by unique node_id.
        release: digest of the release that every node runs.
        profile: the privacy profile that every node runs under.
        witnesses: verifier keys of the cosigning witnesses, sorted; clients have their own list of trusted ones.
    """

    epoch: Count
    not_before: Count
    not_after: Count
    gateway: GatewayEntry
    issuers: Annotated[tuple[IssuerEntry, ...], Meta(min_length=1, max_length=32)]
    nodes: Annotated[tuple[NodeEntry, ...], Meta(min_length=1)]
    release: Hex
    profile: Name
    witnesses: Annotated[tuple[VerifierKey, ...], Meta(max_length=16)]

    @property
    def capacity(self) -> int:
        """Total capacity of all nodes."""
        return sum(node.capacity for node in self.nodes)


def build_epoch(
    *,
    number: int,
    not_before: int,
    not_after: int,
    gateway: GatewayEntry,
    issuers: Iterable[IssuerEntry],
    nodes: Iterable[NodeEntry],
    release: str,
    profile: str,
    witnesses: Iterable[str],
) -> Epoch:
    """Creates an epoch in canonical order.

    Raises:
        TransparencyError: it would be refused by `parse_epoch`.
    """
    epoch = Epoch(
        epoch=number,
        not_before=not_before,
        not_after=not_after,
        gateway=gateway,
        issuers=tuple(sorted(issuers, key=_issuer_order)),
        nodes=tuple(sorted(nodes, key=lambda node: node.node_id)),
        release=release,
        profile=profile,
        witnesses=tuple(sorted(witnesses)),
    )
    return parse_epoch(encode_epoch(epoch))


def encode_epoch(epoch: Epoch) -> bytes:
    """The canonical JSON: equal epochs have equal bytes."""
    return msgspec.json.encode(epoch, order="sorted")


def epoch_leaf(epoch: Epoch) -> bytes:
    """The entry of the log for this epoch."""
    return EPOCH_PREFIX + encode_epoch(epoch)


def parse_epoch(data: bytes) -> Epoch:
    """Reads canonical JSON; refuses other encodings.

    Raises:
        TransparencyError: too large, not canonical, out of range, in another order, or with a node twice.
    """
    if len(data) > MAX_EPOCH_BYTES:
        raise TransparencyError(Reason.TOO_LARGE, f"the epoch has {len(data):,} bytes; {MAX_EPOCH_BYTES:,} are the most")
    try:
        epoch = msgspec.json.decode(data, type=Epoch)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TransparencyError(Reason.MALFORMED, f"the epoch file cannot be read: {error}") from None
    if encode_epoch(epoch) != data:
        raise TransparencyError(Reason.NOT_CANONICAL, "the epoch file is not in its canonical form")
    check_epoch(epoch)
    return epoch


def check_epoch(epoch: Epoch) -> None:
    """Checks constraints that types cannot express: order, duplicates, and validity.

    Raises:
        TransparencyError: one is violated.
    """
    if not 0 < epoch.not_after - epoch.not_before <= MAX_EPOCH_S:
        raise TransparencyError(Reason.MALFORMED, f"an epoch holds between 1 and {MAX_EPOCH_S} seconds; this one does not")
    node_ids = [node.node_id for node in epoch.nodes]
    orders = (
        ("nodes", node_ids, sorted(set(node_ids))),
        ("issuers", list(epoch.issuers), _in_order(epoch.issuers)),
        ("witnesses", list(epoch.witnesses), sorted(set(epoch.witnesses))),
    )
    for what, given, ordered in orders:
        if given != ordered:
            raise TransparencyError(Reason.NOT_CANONICAL, f"the epoch's {what} are not in order, or one stands twice")


def check_times(epoch: Epoch, now: float) -> None:
    """Checks that the epoch is valid now.

    Args:
        epoch: the epoch.
        now: Unix time in seconds.

    Raises:
        TransparencyError: it is not valid yet, beyond the clock tolerance, or no longer.
    """
    if now < epoch.not_before - MAX_CLOCK_SKEW_S:
        raise TransparencyError(Reason.NOT_YET_VALID, "the epoch does not hold yet; check this machine's clock")
    if now >= epoch.not_after:
        raise TransparencyError(Reason.EXPIRED, "the epoch is over; fetch the next one, or check this machine's clock")


def _issuer_order(issuer: IssuerEntry) -> tuple[str, bytes]:
    return (issuer.url, issuer.token_key)


def _in_order(issuers: tuple[IssuerEntry, ...]) -> list[IssuerEntry]:
    by_order = {_issuer_order(issuer): issuer for issuer in issuers}
    return [by_order[order] for order in sorted(by_order)]


# The epoch bundle that the gateway serves: the epoch with all the proofs a client needs. No I/O, no clock.


MAX_BUNDLE_BYTES = 262_144
"""An epoch of the largest size, a release, a minimum release, three proofs and a checkpoint, with a margin."""

Hash = Annotated[bytes, Meta(min_length=32, max_length=32)]
Proof = Annotated[tuple[Hash, ...], Meta(max_length=64)]


class LoggedEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of the log with its proof.

    Attributes:
        entry: the bytes of the leaf.
        index: index of the leaf, from 0.
        proof: RFC 6962 inclusion proof under the bundle's checkpoint, the lowest hash first.
    """

    entry: Annotated[bytes, Meta(max_length=65_535)]
    index: Count
    proof: Proof


class EpochBundle(Struct, frozen=True, forbid_unknown_fields=True):
    """One file, the same for every client, at `/.well-known/cloister/epoch`.

    Attributes:
        checkpoint: C2SP checkpoint with the signatures of the log and of its witnesses.
        epoch: the epoch; `epoch_leaf(epoch)` is the entry of `proof`.
        index: index of the epoch's leaf.
        proof: its inclusion proof under the checkpoint.
        release: the entry of the release that the epoch names.
        minimum: the newest revocation entry; None if there is none yet.
    """

    checkpoint: Annotated[str, Meta(max_length=16_384)]
    epoch: Epoch
    index: Count
    proof: Proof
    release: LoggedEntry
    minimum: LoggedEntry | None


def encode_bundle(bundle: EpochBundle) -> bytes:
    """Canonical JSON, like epochs."""
    return msgspec.json.encode(bundle, order="sorted")


def parse_bundle(data: bytes) -> EpochBundle:
    """Parses a bundle, without verifying it.

    Raises:
        TransparencyError: too large, or malformed.
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
