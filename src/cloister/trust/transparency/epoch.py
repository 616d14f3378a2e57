"""The epoch file: the nodes, keys and issuers valid for the next hour, the same for every client; and the bundle that proves
it.

It is canonical JSON (sorted keys, no white space), so that one epoch is one string of bytes, and those bytes are a leaf of the
log: a client that saw the leaf under a witnessed checkpoint knows that everybody else was given the same list.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from cloister.trust.transparency.refusal import Reason, TransparencyError

EPOCH_PREFIX = b"cloister epoch v1\n"
"""What the log's leaf begins with, so that no other kind of leaf can be read as an epoch."""

MAX_EPOCH_BYTES = 65_535 - len(EPOCH_PREFIX)
"""A log entry has 16 bits for its length (C2SP tlog-tiles); some 300 nodes fit."""

MAX_EPOCH_S = 3600
"""Node keys live an hour at most, and so does the list that names them."""

MAX_CLOCK_SKEW_S = 300
"""How far behind a client's clock may be when an epoch begins. Its end has no such room: the nodes' keys are gone by then."""

MAX_CAPACITY = 1_000_000
"""Shares are counted in whole numbers; the sum of all of them stays far below 2^53."""

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
        url: where it is; clients ask it through a relay only.
        keys: its key configurations, `application/ohttp-keys` (RFC 9458, section 3.1).
    """

    url: Url
    keys: Keys


class IssuerEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """An issuer of tokens.

    Attributes:
        url: where it is.
        token_key: its public key as RFC 9578 has it (SPKI with the RSASSA-PSS OID).
        not_before, not_after: Unix seconds from which it signs, and at which it ends: one key at a time, for everybody.
        signature: the issuer's, over all the rest (`issuer_keys`); clients buy under no key without one.
        budget: output tokens that one of the key's tokens pays for; unset in entries older than this field, under which clients
            buy nothing.
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
        capacity: its share of the draw, above 0.
        keys: its key configurations, `application/ohttp-keys`, in epochs older than this rule; now empty. Its evidence has
            them, and `node_id` is their digest.
        evidence_sha256: SHA-256 of its evidence document, in hex.
        member: name of the member that it is, of the membership that holds (`membership`).
    """

    node_id: Hex
    capacity: Annotated[int, Meta(gt=0, le=MAX_CAPACITY)]
    keys: Annotated[bytes, Meta(max_length=8192)]
    evidence_sha256: Hex
    member: MemberName = ""


class Epoch(Struct, frozen=True, forbid_unknown_fields=True):
    """One list for every client, valid in [not_before, not_after).

    Attributes:
        epoch: counts up by one.
        not_before: Unix time in seconds from which on it holds.
        not_after: Unix time in seconds at which it ends; `MAX_EPOCH_S` after not_before at most.
        gateway: where requests go.
        issuers: whose tokens the gateway takes, sorted by URL, then key.
        nodes: what a client draws from, sorted by node_id; no node_id stands twice.
        release: digest of the release that every node runs.
        profile: the privacy profile that every node runs under.
        witnesses: verifier keys of the witnesses that are asked, sorted; whom a client believes is its own choice.
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
        """The sum over all nodes."""
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
    """Makes an epoch in its one order.

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
    """The canonical JSON: the same epoch is always the same bytes."""
    return msgspec.json.encode(epoch, order="sorted")


def epoch_leaf(epoch: Epoch) -> bytes:
    """The entry of the log for this epoch."""
    return EPOCH_PREFIX + encode_epoch(epoch)


def parse_epoch(data: bytes) -> Epoch:
    """Reads canonical JSON; every other way to write the same epoch is refused.

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
    """Checks what the types cannot say: order, doubles, and how long it holds.

    Raises:
        TransparencyError: one of them is broken.
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
    """Checks that the epoch holds now.

    Args:
        epoch: what to check.
        now: Unix time in seconds.

    Raises:
        TransparencyError: it does not hold yet, by more than a clock may be off, or no longer.
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
