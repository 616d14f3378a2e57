"""A client's checks of an epoch, now and later, and its view of the log. No clock.

The client keeps a `View`: the last size of the log and the frontier of its tree. For a newer checkpoint it reads every later
entry and adds it to the frontier. If the result is the checkpoint's root, no old entry was changed and no new one hidden: so a
single pass verifies consistency, finds revocations, and counts epochs. The epoch must be the newest entry of its checkpoint: so
there is one epoch for each size of the log, and witnesses ensure that there is one log.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from cloister.trust.transparency.epoch import (
    EPOCH_PREFIX,
    Count,
    Epoch,
    EpochBundle,
    Hash,
    LoggedEntry,
    check_epoch,
    check_times,
    epoch_leaf,
    parse_bundle,
    parse_epoch,
)
from cloister.trust.transparency.files import SECRET, locked, remove_unfinished_of, write_whole
from cloister.trust.transparency.history import Pace
from cloister.trust.transparency.membership import MEMBERSHIP_PREFIX, Membership, Past, Roll, adopt_baseline, check_members
from cloister.trust.transparency.merkle import extend_frontier, frontier_root, hash_leaf, verify_inclusion
from cloister.trust.transparency.note import Checkpoint, cosigned_at, open_checkpoint
from cloister.trust.transparency.refusal import Reason, TransparencyError
from cloister.trust.transparency.release import MINIMUM_PREFIX, Release, read_minimum, read_release
from cloister.trust.transparency.tiles import WIDTH, bundles_between, unpack_entries
from cloister.trust.transparency.trust import Trust
from cloister.types.errors import ConfigError

MAX_BUNDLES = 8192
"""Maximum number of log files that are read at once: two million entries, some centuries of epochs. Otherwise a log with a
false size, which only its own key signs, could keep a client fetching forever."""


class View(Struct, frozen=True, forbid_unknown_fields=True):
    """A client's stored view of a log; initially empty.

    Attributes:
        size: leaves of the newest verified checkpoint.
        frontier: roots of the complete subtrees of that tree, the largest first.
        checkpoint: that checkpoint, signed: one half of the proof if the log ever shows another.
        epoch: the number of the newest epoch; 0 before the first.
        minimum: no release with a smaller number runs.
        roll: the valid membership, and those that may follow.
        pace: rate of epochs.
        past: the memberships with which later ones are compared (`client.limits`); empty before the first.
    """

    size: Count = 0
    frontier: Annotated[tuple[Hash, ...], Meta(max_length=64)] = ()
    checkpoint: str = ""
    epoch: Count = 0
    minimum: Count = 0
    roll: Roll = Roll()
    pace: Pace = Pace()
    past: Past = ()


@dataclass(frozen=True)
class Logged:
    """A verified public epoch.

    Attributes:
        epoch: the list of nodes.
        release: the release of its nodes.
        checkpoint: the checkpoint that contains it; `note` is the same with its signatures.
        note: signed checkpoint, text.
    """

    epoch: Epoch
    release: Release
    checkpoint: Checkpoint
    note: str


@dataclass(frozen=True)
class VerifiedEpoch(Logged):
    """An epoch that passed every check.

    Attributes:
        membership: the members of the cloud, from which clients draw, including nodes that the epoch omits.
        view: the new view to store.
    """

    membership: Membership
    view: View


def needed_paths(data: bytes, trust: Trust, view: View) -> list[str]:
    """Returns the log files that a client must fetch to verify a bundle; none if the log has not grown.

    Returns:
        Paths below the log's URL, the keys of `fetched` in `believe`.

    Raises:
        TransparencyError: the bundle is malformed, or of another log, or the log is too long.
    """
    size = open_checkpoint(parse_bundle(data).checkpoint, trust.log)[0].size
    if size // WIDTH - view.size // WIDTH > MAX_BUNDLES:
        raise TransparencyError(Reason.TOO_LARGE, f"the log claims {size:,} entries, more than a client reads at once")
    return [tile.path for tile in bundles_between(view.size, size, size)]


def believe(data: bytes, trust: Trust, view: View, fetched: Mapping[str, bytes], now: float) -> VerifiedEpoch:
    """Verifies a bundle completely.

    Args:
        data: the gateway's epoch bundle.
        trust: the trust anchors.
        view: the stored view.
        fetched: content of the files from `needed_paths`.
        now: Unix time in seconds.

    Raises:
        TransparencyError: the first violated rule; nothing may be sent.
    """
    bundle = parse_bundle(data)
    checkpoint, _ = trust.open_checkpoint(bundle.checkpoint, now)
    check_inclusion(bundle, checkpoint)
    _check_epoch(bundle.epoch, trust, now)
    _check_history(checkpoint, bundle, view)
    after = _read_on(checkpoint, bundle, view, fetched, trust)
    release = check_release(bundle, trust, after)
    membership = check_members(bundle.epoch, after.roll.current)
    return VerifiedEpoch(bundle.epoch, release, checkpoint, bundle.checkpoint, membership, after)


def check_inclusion(bundle: EpochBundle, checkpoint: Checkpoint) -> None:
    """Checks that all entries of a bundle are in the tree, and that the epoch is the newest one.

    Raises:
        TransparencyError: one of them is not.
    """
    epoch = LoggedEntry(epoch_leaf(bundle.epoch), bundle.index, bundle.proof)
    for logged in (epoch, bundle.release, bundle.minimum):
        if logged:
            verify_inclusion(hash_leaf(logged.entry), logged.index, checkpoint.size, logged.proof, checkpoint.root)
    if bundle.index != checkpoint.size - 1:
        raise TransparencyError(
            Reason.NOT_NEWEST, "the epoch is not the newest entry of its checkpoint; there could be another one"
        )


def _check_epoch(epoch: Epoch, trust: Trust, now: float) -> None:
    check_epoch(epoch)
    check_times(epoch, now)
    if epoch.profile not in trust.profiles:
        accepted = " or ".join(sorted(trust.profiles))
        raise TransparencyError(
            Reason.UNKNOWN_PROFILE, f"the nodes run under the profile {epoch.profile}; this client takes {accepted}"
        )


def _check_history(checkpoint: Checkpoint, bundle: EpochBundle, view: View) -> None:
    if checkpoint.size < view.size:
        message = "the log is shorter than it was; it was rolled back, or this is an old copy"
        raise TransparencyError(Reason.ROLLED_BACK, message, (view.checkpoint, bundle.checkpoint))
    if checkpoint.size == view.size and checkpoint.root != frontier_root(view.frontier):
        message = "the log shows two trees of one size; keep both checkpoints, they prove that it lies"
        raise TransparencyError(Reason.SPLIT_VIEW, message, (view.checkpoint, bundle.checkpoint))


def _read_on(checkpoint: Checkpoint, bundle: EpochBundle, view: View, fetched: Mapping[str, bytes], trust: Trust) -> View:
    entries = list(unpack_fetched(view.size, checkpoint.size, fetched))
    frontier = extend_frontier(view.frontier, view.size, map(hash_leaf, entries))
    if frontier_root(frontier) != checkpoint.root:
        message = (
            "the log's entries do not lead from what was remembered to this checkpoint; it was rewritten, or shows two faces"
        )
        raise TransparencyError(Reason.NOT_CONSISTENT, message, (view.checkpoint, bundle.checkpoint))
    number, minimum, roll, pace = view.epoch, view.minimum, view.roll, view.pace
    for entry in entries:
        if entry.startswith(EPOCH_PREFIX):
            logged = parse_epoch(entry.removeprefix(EPOCH_PREFIX))
            if logged.epoch != number + 1:
                raise TransparencyError(
                    Reason.OUT_OF_ORDER, f"epoch {logged.epoch} follows epoch {number} in the log; two may hold at once"
                )
            number, pace = logged.epoch, pace.after(logged)
            roll = roll.begin(pace.begun)
        elif entry.startswith(MEMBERSHIP_PREFIX):
            roll = roll.add(entry, trust.log.name, trust.releases)
        elif entry.startswith(MINIMUM_PREFIX):
            with contextlib.suppress(TransparencyError):  # signed by another key it is ignored, and cannot block clients
                minimum = max(minimum, read_minimum(entry, trust.releases))
    if bundle.epoch.epoch != number:
        raise TransparencyError(Reason.OUT_OF_ORDER, f"the epoch is number {bundle.epoch.epoch}; the log's newest is {number}")
    return View(checkpoint.size, frontier, bundle.checkpoint, number, minimum, roll, pace, view.past)


def unpack_fetched(begin: int, size: int, fetched: Mapping[str, bytes]) -> Iterator[bytes]:
    """Yields the entries [begin, size) of a log from the files of `needed_paths`.

    Raises:
        TransparencyError: one is missing or malformed.
    """
    for tile in bundles_between(begin, size, size):
        data = fetched.get(tile.path)
        if data is None:
            raise TransparencyError(
                Reason.NOT_CONSISTENT, f"{tile.path} of the log could not be fetched, so its entries are unknown"
            )
        yield from unpack_entries(data, tile.width)[max(begin - tile.index * WIDTH, 0) :]


def check_release(bundle: EpochBundle, trust: Trust, view: View) -> Release:
    """Returns the release that the epoch names.

    Raises:
        TransparencyError: it is not signed by a trusted key, is another release, or was revoked.
    """
    release = read_release(bundle.release.entry, trust.releases)
    if release.digest != bundle.epoch.release:
        raise TransparencyError(Reason.WRONG_RELEASE, "the release that came with the epoch is not the one that it names")
    if release.profile != bundle.epoch.profile:
        raise TransparencyError(Reason.WRONG_RELEASE, "the release is for another privacy profile than the epoch's")
    if not release.configuration:
        raise TransparencyError(
            Reason.WRONG_RELEASE,
            f"release {release.number} says nothing of how its nodes are set, so they could be set to anything; log a release "
            "that was made by this version",
        )
    minimum = read_minimum(bundle.minimum.entry, trust.releases) if bundle.minimum else 0
    if minimum < view.minimum:
        raise TransparencyError(Reason.HIDDEN_MINIMUM, "the log revokes releases that the gateway does not speak of")
    if release.number < max(minimum, view.minimum):
        raise TransparencyError(
            Reason.REVOKED, f"release {release.number} was revoked; {view.minimum} is the least that may run"
        )
    return release


# Verifies a past epoch again from its bundle alone. No I/O, no clock.
#
# Checks that need the client's view or the log itself are omitted: that the log was not rewritten since, that the release was
# not revoked later, and which nodes were members. The witnesses' signatures replace the first.


def recall(data: bytes, trust: Trust) -> tuple[Logged, float]:
    """Returns the epoch that clients verified, and the first time at which they could (Unix seconds): when enough witnesses had
    cosigned.

    Raises:
        TransparencyError: a client that trusts these keys can never have accepted it.
    """
    bundle = parse_bundle(data)
    epoch = bundle.epoch
    check_epoch(epoch)
    _, note = open_checkpoint(bundle.checkpoint, trust.log)
    times = sorted(cosigned_at(note, trust.witnesses).values())
    moment = float(max([epoch.not_before, *times[: trust.threshold]]))
    checkpoint, _ = trust.open_checkpoint(bundle.checkpoint, moment)
    if moment >= epoch.not_after:
        raise TransparencyError(Reason.EXPIRED, "the epoch was over before enough witnesses had cosigned it")
    check_inclusion(bundle, checkpoint)
    if epoch.profile not in trust.profiles:
        raise TransparencyError(Reason.UNKNOWN_PROFILE, f"the nodes ran under the profile {epoch.profile}, which is not taken")
    release = check_release(bundle, trust, View())
    return Logged(epoch, release, checkpoint, bundle.checkpoint), moment


# A client's stored view of the log between runs: one small file that only advances.


class Memory:
    """A `View` on disk. Several clients of one user may share it."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser()

    def load(self) -> View:
        """Returns the stored view; an empty one on first use.

        Raises:
            ConfigError: the file is damaged, or of an older version. It is not ignored: an attacker who damaged it could hide a
                split view.
        """
        try:
            view = msgspec.convert(adopt_baseline(msgspec.json.decode(self.path.read_bytes(), type=dict[str, Any])), View)
        except FileNotFoundError:
            return View()
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            message = f"{self.path} is broken ({error}); remove it to read the log from its beginning again"
            raise ConfigError(message) from None
        if view.epoch and view.roll.current is None:  # no epoch is accepted without one
            raise ConfigError(
                f"{self.path} is of a version that knew no memberships; remove it to read the log from its beginning again"
            )
        return view

    def save(self, view: View, begun: View) -> bool:
        """Stores a view that extends the file's.

        Args:
            begun: the view that `load` returned.

        Returns:
            False: another program wrote the file meanwhile, and it was left unchanged. Its view may belong to another log,
                which sizes cannot show: load it, and continue reading the log from there.

        Raises:
            ConfigError: the file is damaged, or cannot be written.
        """
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make {self.path.parent}: {error.strerror}") from None
        with locked(self.path.parent):
            remove_unfinished_of(self.path)
            kept = self.load()
            if kept == begun:
                write_whole(self.path, msgspec.json.encode(view, order="sorted"), SECRET)
            return kept in (begun, view)
