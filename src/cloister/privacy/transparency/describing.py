"""A log's entries in words, and a whole log checked by whoever has a copy of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from cloister.privacy.transparency.dsse import Envelope
from cloister.privacy.transparency.epoch import EPOCH_PREFIX, parse_epoch
from cloister.privacy.transparency.history import History
from cloister.privacy.transparency.membership import MEMBERSHIP_PREFIX, Membership
from cloister.privacy.transparency.merkle import hash_leaf, make_root, nodes_of
from cloister.privacy.transparency.note import PublicKey
from cloister.privacy.transparency.reader import LogReader
from cloister.privacy.transparency.refusal import Reason, TransparencyError
from cloister.privacy.transparency.release import MINIMUM_PREFIX, RELEASE_PREFIX, MinimumRelease, ReleaseEntry


def describe_entry(entry: bytes) -> dict[str, str | int]:
    """What an entry says; who signed it is not checked."""
    try:
        if entry.startswith(EPOCH_PREFIX):
            epoch = parse_epoch(entry.removeprefix(EPOCH_PREFIX))
            return {"kind": "epoch", "number": epoch.epoch, "nodes": len(epoch.nodes), "release": epoch.release}
        if entry.startswith(RELEASE_PREFIX):
            release = msgspec.json.decode(entry.removeprefix(RELEASE_PREFIX), type=ReleaseEntry).release
            return {"kind": "release", "number": release.number, "version": release.version, "release": release.digest}
        if entry.startswith(MINIMUM_PREFIX):
            envelope = msgspec.json.decode(entry.removeprefix(MINIMUM_PREFIX), type=Envelope)
            return {"kind": "minimum", "number": msgspec.json.decode(envelope.payload, type=MinimumRelease).minimum}
        if entry.startswith(MEMBERSHIP_PREFIX):
            envelope = msgspec.json.decode(entry.removeprefix(MEMBERSHIP_PREFIX), type=Envelope)
            membership = msgspec.json.decode(envelope.payload, type=Membership)
            return {
                "kind": "membership",
                "number": membership.number,
                "members": len(membership.members),
                "capacity": membership.capacity,
                "not_before": membership.not_before,
            }
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TransparencyError):
        return {"kind": "broken", "bytes": len(entry)}
    return {"kind": "unknown", "bytes": len(entry)}


def verify_log(reader: LogReader, release_keys: Sequence[PublicKey]) -> Iterator[str]:
    """Checks a whole log; one line for each thing that was found to hold.

    Raises:
        TransparencyError: the first thing that does not hold.
        ConfigError: there is no log.
    """
    checkpoint, note = reader.checkpoint()
    yield f"checkpoint of {checkpoint.size} entries, signed by {checkpoint.origin}, with {len(note.signatures)} signatures"
    entries = reader.entries(0, checkpoint.size, checkpoint.size)
    if make_root(nodes_of([hash_leaf(entry) for entry in entries]), checkpoint.size) != checkpoint.root:
        raise TransparencyError(Reason.NOT_CONSISTENT, "the entries do not have the checkpoint's root")
    if reader.root(checkpoint.size) != checkpoint.root:
        raise TransparencyError(Reason.NOT_CONSISTENT, "the tiles do not have the checkpoint's root")
    yield "every entry and every tile leads to the checkpoint's root"
    history = History(reader, release_keys)
    history.advance(checkpoint.size)
    newest = history.epoch
    yield f"epochs are numbered one after the other, up to {newest.epoch if newest else 0}"
    held = history.roll.current
    yield (
        f"membership {held.number} holds: {len(held.members)} nodes with the capacity {held.capacity}"
        if held
        else "no membership holds yet"
    )
    yield f"{len(history.releases)} releases are signed by a trusted key; {history.minimum} is the least that may run"
