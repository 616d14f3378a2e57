"""Programs of one user that share a state file hold the log to what either of them saw."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cloister.client import EpochRefusedError, Limits, Session
from cloister.client.protocol import Reply
from cloister.client.session import PreparedRequest
from cloister.client.shared_view import MOST_PROOFS
from cloister.trust.attestation import AttestationPolicy
from cloister.trust.transparency.checks import Memory, View
from cloister.trust.transparency.note import open_checkpoint
from cloister.types.errors import ConfigError
from tests.trust.transparency.world import World

WELL_KNOWN = "https://relay.example/.well-known/cloister/"


class Relayed(World):
    """A world whose files a relay hands out."""

    def step(self) -> None:
        """Publishes the next epoch."""
        self.now += 60
        self.published = self.publish()

    def find(self, url: str) -> bytes:
        path = url.removeprefix(WELL_KNOWN)
        if path == "epoch":
            return self.published.bundle
        if path.startswith("log/"):
            resource = self.log.resource(path.removeprefix("log/"))
            assert resource is not None
            return resource[0]
        return self.published.evidence[path.removeprefix("evidence/")]


@pytest.fixture
def world(tmp_path: Path) -> Relayed:
    world = Relayed(tmp_path / "world")
    world.step()
    return world


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "client" / "view.json"


def make_session(world: Relayed, state: Path) -> Session:
    return Session(
        "https://relay.example", trust=world.trust, api_key="key", policy=AttestationPolicy(accept_software=True), state=state,
        limits=Limits(least_present=0), now=lambda: world.now,
    )  # fmt: skip


def prepare(session: Session, world: Relayed, meanwhile: Callable[[int], None] = lambda turn: None) -> PreparedRequest:
    """Does what precedes a request; `meanwhile` is called before each question but those for the epoch is answered, with the
    number of epochs that were asked for."""
    session.doubt()
    session._believed_at = 0
    step, turns = session.prepare(), 0
    ask = next(step)
    while True:
        body = world.find(ask.url)
        if ask.url.endswith("/epoch"):
            turns += 1
        else:
            meanwhile(turns)
        try:
            ask = step.send(Reply(200, {}, body))
        except StopIteration as stopped:
            return stopped.value


def twin_of(world: Relayed, directory: Path) -> Relayed:
    """A second log under the same keys, for somebody else's eyes."""
    twin = Relayed(
        directory, now=world.now, log_key=world.log_key, release_key=world.release_key, witness_keys=world.witness_keys
    )
    twin.step()
    return twin


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_two_programs_that_are_shown_two_logs_find_it_and_keep_both_checkpoints(
    world: Relayed, state: Path, tmp_path: Path, more: int
) -> None:
    first, second = make_session(world, state), make_session(world, state)
    twin = twin_of(world, tmp_path / "twin")
    for _ in range(max(more, 0)):
        twin.step()
    for _ in range(max(-more, 0)):
        world.step()
    prepare(first, world)
    kept = state.read_bytes()
    for session in (second, make_session(world, state)):
        with pytest.raises(EpochRefusedError, match="Both signed checkpoints are kept") as caught:
            prepare(session, twin)
    assert state.read_bytes() == kept, "the other program's view was not overwritten"
    notes = sorted(state.parent.glob("view.*.note"))
    assert [note.name.split("-")[0] for note in notes] == ["view.seen", "view.shown"]
    assert all(str(note) in caught.value.message for note in notes)
    seen, shown = (open_checkpoint(note.read_text(), world.log.key)[0] for note in notes)
    assert (seen.size - shown.size, seen.root == shown.root) == (-more, False)


def test_a_program_reads_on_from_what_another_one_saw(world: Relayed, state: Path) -> None:
    sessions = [make_session(world, state) for _ in range(2)]
    for turn in range(4):
        prepare(sessions[turn % 2], world)
        assert Memory(state).load() == sessions[turn % 2]._seen.begin().own
        world.step()
    assert not list(state.parent.glob("*.note"))


def test_a_program_that_was_overtaken_reads_the_log_again_and_goes_on(world: Relayed, state: Path) -> None:
    slow, fast = make_session(world, state), make_session(world, state)

    def overtake(turn: int) -> None:
        if turn == 1 and Memory(state).load() == View():
            world.step()
            prepare(fast, world)

    ready = prepare(slow, world, overtake)
    assert ready.epoch.epoch == 2
    assert Memory(state).load().epoch == 2


def test_a_program_that_was_overtaken_by_one_that_saw_another_log_sends_nothing(
    world: Relayed, state: Path, tmp_path: Path
) -> None:
    slow, fast = make_session(world, state), make_session(world, state)
    twin = twin_of(world, tmp_path / "twin")

    def overtake(turn: int) -> None:
        if turn == 1 and Memory(state).load() == View():
            prepare(fast, twin)

    with pytest.raises(EpochRefusedError, match="two trees of one size"):
        prepare(slow, world, overtake)
    assert len(list(state.parent.glob("*.note"))) == 2


def test_a_file_that_never_rests_is_an_error_and_not_a_loop(world: Relayed, state: Path) -> None:
    session, writer = make_session(world, state), make_session(world, state)
    turns = []

    def write(turn: int) -> None:
        if turn not in turns:
            turns.append(turn)
            world.step()
            prepare(writer, world)

    with pytest.raises(ConfigError, match="give this one its own"):
        prepare(session, world, write)


def test_a_relay_with_many_old_copies_does_not_fill_the_disk(world: Relayed, state: Path) -> None:
    old = world.published
    for _ in range(MOST_PROOFS + 2):
        world.step()
        session = make_session(world, state)
        prepare(session, world)
        newest, world.published = world.published, old
        with pytest.raises(EpochRefusedError) as caught:
            prepare(session, world)
        world.published = newest
    assert "move them away" in caught.value.message
    assert len(list(state.parent.glob("*.note"))) == 2 * MOST_PROOFS


def test_what_a_killed_writer_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "view.json")
    assert memory.save(View(size=1), View())
    (left,) = leave_unfinished(memory.path)
    (of_others,) = leave_unfinished(tmp_path / "other.json")
    assert memory.save(View(size=2), View(size=1))
    assert not left.exists()
    assert of_others.exists()  # its writer may be at it now


def leave_unfinished(path: Path) -> list[Path]:
    """Starts to write a file in a process that is killed on the way."""
    before = set(path.parent.iterdir())
    code = (
        "import os, pathlib, signal, sys\n"
        "from cloister.trust.transparency import files\n"
        "files.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "files.write_whole(pathlib.Path(sys.argv[1]), b'half')\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], timeout=300, check=False)
    return sorted(set(path.parent.iterdir()) - before)
