"""A monitor: reads a whole log through a relay, reports faults, and compares it with what others were shown.

A client verifies the newest epoch for itself; a monitor verifies all epochs for everyone. It needs no secret key, and nobody
has to trust its operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from cloister.client.errors import RelayUnreachableError
from cloister.client.limits import EARLY_S, LATE_S
from cloister.client.verify_node import MAX_LOG_BYTES, Fetch
from cloister.trust.transparency.epoch import MAX_BUNDLE_BYTES, EpochBundle, Hash, check_times, epoch_leaf, parse_bundle
from cloister.trust.transparency.files import SECRET, write_whole
from cloister.trust.transparency.membership import adopt_baseline
from cloister.trust.transparency.merkle import (
    extend_frontier,
    frontier_root,
    hash_leaf,
    prove_consistency,
    verify_consistency,
)
from cloister.trust.transparency.note import Checkpoint, Note, cosigned_at, open_checkpoint
from cloister.trust.transparency.refusal import Reason, TransparencyError
from cloister.trust.transparency.replay import Course, Remark, Replay
from cloister.trust.transparency.tiles import WIDTH, Tile, bundles_between, tile_nodes, unpack_entries
from cloister.trust.transparency.trust import Trust
from cloister.types.errors import ConfigError

CONSISTENCY = "consistency"
"""Kind of remarks that prove a dishonest log; the state is then left unchanged, because it is half of the proof."""


class MonitorState(Struct, frozen=True, forbid_unknown_fields=True):
    """The state of a monitor between runs.

    Attributes:
        size, frontier: of the tree read so far.
        checkpoint: its signed note.
        course: state of the replay.
    """

    size: int = 0
    frontier: Annotated[tuple[Hash, ...], Meta(max_length=64)] = ()
    checkpoint: str = ""
    course: Course = Course()


@dataclass
class Report:
    """The result of one run.

    Attributes:
        remarks: faults and news, in log order.
        proofs: signed checkpoints that contradict each other.
        note: the newest checkpoint with its cosignatures, for others to compare; empty if it was not verified.
        state: the new state to store.
    """

    remarks: list[Remark] = field(default_factory=list)
    proofs: list[str] = field(default_factory=list)
    note: str = ""
    state: MonitorState = field(default_factory=MonitorState)

    @property
    def faults(self) -> list[Remark]:
        """Remarks that an honest operator never causes."""
        return [remark for remark in self.remarks if remark.is_fault]

    def blame(self, kind: str, text: str, *proofs: str) -> None:
        """Adds a fault."""
        self.remarks.append(Remark(kind, text))
        self.proofs += [proof for proof in proofs if proof and proof not in self.proofs]


class Monitor:
    """Checks the new entries of a log once.

    Args:
        fetch: fetches public files of a relay or gateway.
        trust: keys of the log, its witnesses and releases.
    """

    def __init__(self, fetch: Fetch, trust: Trust) -> None:
        self._fetch = fetch
        self._trust = trust
        self._tiles: dict[str, bytes] = {}

    def run(self, state: MonitorState, now: float) -> Report:
        """Reads the entries since `state`.

        Raises:
            RelayUnreachableError: the files cannot be fetched.
        """
        report = Report(state=state)
        data = self._fetch("epoch", MAX_BUNDLE_BYTES)
        if data is None:
            raise RelayUnreachableError("there is no epoch; is this a relay or a gateway with a log?")
        try:
            bundle = parse_bundle(data)
            checkpoint, note = self._trust.open_checkpoint(bundle.checkpoint, now)
        except TransparencyError as error:
            report.blame("checkpoint", f"the newest epoch is not to be believed: {error.message}")
            return report
        entries = self._read_on(report, state, bundle, checkpoint)
        if entries is None:
            return report
        replay = Replay(self._trust.log.name, self._trust.releases, state.course)
        for index, entry in enumerate(entries, start=state.size):
            report.remarks += replay.take(index, entry)
        report.remarks += self._judge_newest(bundle, checkpoint, note, entries, now)
        frontier = extend_frontier(state.frontier, state.size, map(hash_leaf, entries))
        report.state = MonitorState(checkpoint.size, frontier, bundle.checkpoint, replay.course)
        report.note = bundle.checkpoint
        return report

    def compare(self, report: Report, who: str, text: str) -> None:
        """Compares a checkpoint that another party was shown, which must belong to the same log."""
        if not report.note:
            return
        try:
            theirs, _ = open_checkpoint(text, self._trust.log)
        except TransparencyError as error:
            report.remarks.append(Remark("gossip", f"{who} shows no checkpoint of this log: {error.message}", False))
            return
        ours, _ = open_checkpoint(report.note, self._trust.log)
        old, new = sorted((theirs, ours), key=lambda one: one.size)
        try:
            if old.size == new.size and old.root != new.root:
                raise TransparencyError(Reason.SPLIT_VIEW, "two trees of one size")
            if 0 < old.size < new.size:
                verify_consistency(old.size, new.size, old.root, new.root, self.prove_consistency(old.size, new.size))
        except TransparencyError as error:
            report.blame(
                CONSISTENCY,
                f"{who} was shown another log than we: {error.message}; keep both checkpoints, they prove it",
                text,
                report.note,
            )

    def prove_consistency(self, old: int, new: int) -> tuple[bytes, ...]:
        """Returns the proof between two trees of the log, from its tiles.

        Raises:
            TransparencyError: tiles are missing.
        """
        return prove_consistency(tile_nodes(self._read_tile, new), old, new)

    def _read_on(self, report: Report, state: MonitorState, bundle: EpochBundle, checkpoint: Checkpoint) -> list[bytes] | None:
        both = (state.checkpoint, bundle.checkpoint)
        if checkpoint.size < state.size:
            report.blame(CONSISTENCY, f"the log has {checkpoint.size} entries; it had {state.size}: it was rolled back", *both)
            return None
        entries: list[bytes] = []
        try:
            for tile in bundles_between(state.size, checkpoint.size, checkpoint.size):
                found = unpack_entries(self._read_tile(tile), tile.width)
                entries += found[max(state.size - tile.index * WIDTH, 0) :]
        except TransparencyError as error:
            report.blame(CONSISTENCY, f"not all of the log is shown: {error.message}", *both)
            return None
        if frontier_root(extend_frontier(state.frontier, state.size, map(hash_leaf, entries))) != checkpoint.root:
            report.blame(
                CONSISTENCY, "the entries do not lead from what was read before to this checkpoint: it was rewritten", *both
            )
            return None
        return entries

    def _judge_newest(
        self, bundle: EpochBundle, checkpoint: Checkpoint, note: Note, entries: Sequence[bytes], now: float
    ) -> Iterator[Remark]:
        if bundle.index != checkpoint.size - 1 or (entries and entries[-1] != epoch_leaf(bundle.epoch)):
            yield Remark("order", "the epoch that is handed out is not the newest entry of the log: there may be another one")
        try:
            check_times(bundle.epoch, now)
        except TransparencyError as error:
            yield Remark("cadence", f"no epoch holds now, so no client sends anything: {error.message}")
        times = sorted(cosigned_at(note, self._trust.witnesses).values())
        late_s = times[self._trust.threshold - 1] - bundle.epoch.not_before
        if late_s > LATE_S:
            yield Remark("pace", f"epoch {bundle.epoch.epoch} was cosigned {late_s} s after it began; clients refuse it")
        if late_s < -EARLY_S:
            yield Remark("pace", f"epoch {bundle.epoch.epoch} was cosigned {-late_s} s before it begins; clients refuse it")

    def _read_tile(self, tile: Tile) -> bytes:
        if tile.path not in self._tiles:
            data = self._fetch(f"log/{tile.path}", MAX_LOG_BYTES)
            if data is None:
                raise TransparencyError(Reason.NOT_CONSISTENT, f"{tile.path} of the log could not be fetched")
            self._tiles[tile.path] = data
        return self._tiles[tile.path]


def read_note(data: bytes) -> str:
    """Returns the checkpoint in a peer's data: a signed note, or the epoch bundle of a relay."""
    text = data.decode(errors="replace")
    if not text.startswith("{"):
        return text
    try:
        return parse_bundle(data).checkpoint
    except TransparencyError:
        return text


def load_state(path: Path) -> MonitorState:
    """Reads the stored state; an empty one on first use.

    Raises:
        ConfigError: the file is damaged. It is not ignored: an attacker who damaged it could hide a split view.
    """
    try:
        fields = msgspec.json.decode(path.expanduser().read_bytes(), type=dict[str, Any])
        if isinstance(fields.get("course"), dict):
            fields["course"] = adopt_baseline(fields["course"])
        return msgspec.convert(fields, MonitorState)
    except FileNotFoundError:
        return MonitorState()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is broken ({error}); remove it to read the log from its beginning again") from None


def save_state(path: Path, state: MonitorState) -> None:
    """Writes the state, mode 0600.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_whole(path.expanduser(), msgspec.json.encode(state, order="sorted"), SECRET)
