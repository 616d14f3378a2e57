"""`cloister monitor`: an honest log is silent, and each thing that is wrong with one is told."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from msgspec import structs
from typer.testing import CliRunner

from cloister.cli import app
from cloister.client.monitoring import CONSISTENCY, Monitor, MonitorState, Report
from cloister.private.witness import witness_app
from cloister.trust.transparency.epoch import GatewayEntry, IssuerEntry, encode_bundle, parse_bundle
from cloister.trust.transparency.membership import NOTICE_S
from cloister.trust.transparency.note import cosign, parse_note
from cloister.trust.transparency.trust import encode_trust
from tests.loopback import serve
from tests.trust.transparency.test_membership import OTHER, log_alone
from tests.trust.transparency.world import World, make_evidence, make_release

ALL = {"node": 1, "a": 1}


class Watched(World):
    """A world behind a relay, and what its relay hands out as the epoch."""

    bundle = b""

    def step(self, seconds: float = 600, **changes: object) -> None:
        """Publishes the next epoch."""
        self.now += seconds
        documents = tuple(
            make_evidence(self.release, name=name, now=self.now, keys=f"{name} at {self.now}".encode()) for name in self.members
        )
        self.bundle = self.publish(**{"evidence": documents, **changes}).bundle

    def find(self, path: str, most_bytes: int = 0) -> bytes | None:
        if path == "epoch":
            return self.bundle
        resource = self.log.resource(path.removeprefix("log/"))
        return resource[0] if resource else None

    def watch(self, state: MonitorState | None = None) -> Report:
        return Monitor(self.find, self.trust).run(state or MonitorState(), self.now)


@pytest.fixture
def world(tmp_path: Path) -> Watched:
    world = Watched(tmp_path, members=dict(ALL))
    world.step()
    return world


def faults(report: Report) -> set[str]:
    return {fault.kind for fault in report.faults}


def test_an_honest_log_with_all_that_happens_in_one_has_no_fault(world: Watched) -> None:
    first = world.watch()
    assert faults(first) == set()
    world.log_members(2, {**ALL, "b": 1}, after_s=2 * NOTICE_S)
    world.step()
    world.log_release(make_release(2))
    world.members = {**ALL, "b": 1}
    world.step(2 * NOTICE_S)
    world.step(seconds=3600, gateway=GatewayEntry("https://gateway.example", b"its next keys"))
    second = world.watch(first.state)
    assert second.faults == []
    told = " ".join(remark.text for remark in second.remarks)
    assert re.search(r"membership 2 from \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC on: ", told)
    assert "membership 2 holds now" in told
    assert "release 2" in told
    assert world.watch(second.state).remarks == [], "nothing is new"
    assert world.watch().state == second.state, "who reads all of it comes to the same"


def add_node(world: Watched) -> None:
    nodes = parse_bundle(world.bundle).epoch.nodes
    world.bundle = log_alone(world, world.bundle, nodes=tuple(sorted((*nodes, structs.replace(OTHER, member="x")), key=str)))


def raise_capacity(world: Watched) -> None:
    first, *rest = parse_bundle(world.bundle).epoch.nodes
    world.bundle = log_alone(world, world.bundle, nodes=(structs.replace(first, capacity=99), *rest))


def leave_out(world: Watched) -> None:
    world.log_members(2, {"node": 1, "a": 1, "b": 1}, after_s=2 * NOTICE_S)
    world.step()
    world.members = {"node": 1}
    world.step()


def replace_all(world: Watched) -> None:
    world.log_members(2, {"b": 1, "captured": 1}, after_s=2 * NOTICE_S)
    world.step()
    world.members = {"b": 1, "captured": 1}
    world.step()


def hurry(world: Watched) -> None:
    for _ in range(6):
        world.bundle = log_alone(world, world.bundle)


def keep_node_keys(world: Watched) -> None:
    epoch = parse_bundle(world.bundle).epoch
    for hours in (1, 2):
        world.now += 3600
        begins = epoch.not_before + 3600 * hours
        world.bundle = log_alone(world, world.bundle, not_before=begins, not_after=begins + 3600)


def keep_gateway_keys(world: Watched) -> None:
    for _ in range(3):
        world.step(86400)


def turn_issuer_keys(world: Watched) -> None:
    for number in range(4):
        world.step(issuers=(IssuerEntry("https://issuer.example", b"key %d" % number, number),))


def name_unsigned_release(world: Watched) -> None:
    world.bundle = log_alone(world, world.bundle, release="ab" * 32)


def run_revoked_release(world: Watched) -> None:
    world.log_release(make_release(2))
    world.log_minimum(2)
    world.bundle = log_alone(world, world.bundle)


def count_wrong(world: Watched) -> None:
    honest = parse_bundle(world.bundle)
    wrong = encode_bundle(structs.replace(honest, epoch=structs.replace(honest.epoch, epoch=5)))
    world.bundle = log_alone(world, wrong)


def log_nonsense(world: Watched) -> None:
    world.log.append([b"something for one client"])
    world.step()


def hide_newest(world: Watched) -> None:
    old = parse_bundle(world.bundle)
    world.step(60)
    new = parse_bundle(world.bundle)
    size = new.index + 1
    proof = world.log.prove_inclusion(old.index, size)
    world.bundle = encode_bundle(structs.replace(new, epoch=old.epoch, index=old.index, proof=proof))


def stop(world: Watched) -> None:
    world.now += 3 * 3600


def ask_witnesses_late(world: Watched) -> None:
    bundle = parse_bundle(world.bundle)
    note = parse_note(bundle.checkpoint)
    world.now += 400
    late = replace(note, signatures=note.signatures[:1])
    late = late.add(*(cosign(note.text, key, int(world.now)) for key in world.witness_keys))
    world.bundle = encode_bundle(structs.replace(bundle, checkpoint=str(late)))


def forget_witnesses(world: Watched) -> None:
    bundle = parse_bundle(world.bundle)
    note = parse_note(bundle.checkpoint)
    world.bundle = encode_bundle(structs.replace(bundle, checkpoint=str(replace(note, signatures=note.signatures[:2]))))


WRONG: dict[str, tuple[Callable[[Watched], None], str]] = {
    "a node is added": (add_node, "membership"),
    "a capacity is raised": (raise_capacity, "capacity"),
    "most of the nodes are left out": (leave_out, "membership"),
    "all nodes are replaced": (replace_all, "membership"),
    "epochs come in short succession": (hurry, "pace"),
    "a node's key outlives its hour": (keep_node_keys, "keys"),
    "the gateway's keys are kept for days": (keep_gateway_keys, "keys"),
    "the issuer changes its key with every epoch": (turn_issuer_keys, "keys"),
    "a release is named that nobody signed": (name_unsigned_release, "release"),
    "a revoked release runs on": (run_revoked_release, "release"),
    "a number is left out": (count_wrong, "order"),
    "an entry is of no kind": (log_nonsense, "entry"),
    "an older epoch is handed out": (hide_newest, "order"),
    "no epoch follows": (stop, "cadence"),
    "witnesses are asked late": (ask_witnesses_late, "pace"),
    "witnesses are missing": (forget_witnesses, "checkpoint"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_told_by_its_kind(world: Watched, what: str) -> None:
    state = world.watch().state
    act, kind = WRONG[what]
    act(world)
    assert faults(world.watch(state)) == {kind}
    assert faults(world.watch()) == {kind}, "who comes later finds it too"


def twin_of(world: Watched, directory: Path) -> Watched:
    """A second log under the same keys, whose operator shows it to others."""
    twin = Watched(
        directory, now=world.now, log_key=world.log_key, release_key=world.release_key, witness_keys=world.witness_keys,
        members=dict(ALL),
    )  # fmt: skip
    twin.step(0)
    return twin


def test_a_log_that_was_rolled_back_or_rewritten_keeps_the_state_as_proof(world: Watched, tmp_path: Path) -> None:
    old = world.bundle
    world.step()
    state = world.watch().state
    twin = twin_of(world, tmp_path / "twin")
    twin.step(0)
    twin.step(1)
    for bundle, find in ((old, world.find), (twin.bundle, twin.find)):
        world.bundle = bundle if find == world.find else world.bundle
        report = Monitor(find, world.trust).run(state, world.now + 1)
        assert faults(report) == {CONSISTENCY}
        assert report.state == state
        assert report.proofs[0] == state.checkpoint


def test_monitors_that_compare_find_a_log_with_two_faces(world: Watched, tmp_path: Path) -> None:
    before = world.watch()
    world.step()
    after = world.watch()
    monitor = Monitor(world.find, world.trust)
    monitor.compare(after, "a slower monitor", before.note)
    assert after.faults == []
    twin = twin_of(world, tmp_path / "twin")
    for _ in range(3):
        monitor.compare(after, "another monitor", twin.watch().note)
        assert faults(after) == {CONSISTENCY}
        assert len(after.proofs) == 2
        after.remarks, after.proofs = [], []
        twin.step()  # shorter, as long, and longer
    monitor.compare(after, "somebody", "nonsense")
    assert [remark.kind for remark in after.remarks] == ["gossip"]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[Watched, str]]:
    """A world of now, behind a socket."""
    world = Watched(tmp_path, now=time.time(), members=dict(ALL))
    world.step(0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = world.find(self.path.removeprefix("/.well-known/cloister/"))
            self.send_response(404 if content is None else 200)
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *arguments: object) -> None:
            pass

    (tmp_path / "trust.json").write_bytes(encode_trust(world.trust))
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield world, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(300)


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["monitor", *map(str, arguments)])
    return result.exit_code, result.output


def test_the_command_is_silent_for_cron_and_its_status_says_the_outcome(live: tuple[Watched, str], tmp_path: Path) -> None:
    world, url = live
    state, note = tmp_path / "state" / "monitor.json", tmp_path / "note"
    common = (url, "--trust", tmp_path / "trust.json", "--state", state)
    status, told = run(*common, "--publish", note)
    assert (status, "nothing is wrong" in told) == (0, True)
    assert state.stat().st_mode & 0o077 == 0
    assert run(*common, "--quiet", "--peer", note, "--peer", f"{url}/.well-known/cloister/epoch") == (0, "")
    assert "cannot be reached" in run(*common, "--peer", tmp_path / "absent")[1]
    raise_capacity(world)
    status, told = run(*common, "--quiet")
    assert status == 1
    assert told.startswith("FAULT capacity: epoch 2")
    assert run(*common, "--quiet") == (0, ""), "a fault is told once"
    assert run(*common, "--quiet", "--from-start")[0] == 1
    assert run("http://127.0.0.1:1", *common[1:])[0] == 2


def test_a_witness_that_cosigned_another_tree_tells_it(live: tuple[Watched, str], tmp_path: Path) -> None:
    world, url = live
    common = (url, "--trust", tmp_path / "trust.json", "--state", tmp_path / "monitor.json")
    twin = twin_of(world, tmp_path / "twin")
    with serve(witness_app(world.witnesses[0])) as honest, serve(witness_app(twin.witnesses[1])) as other:
        assert run(*common, "--witness", f"{world.witnesses[0].key.name}={honest}")[0] == 0
        status, told = run(*common, "--witness", f"{world.witnesses[1].key.name}={other}")
    assert status == 1
    assert "knows another tree of this log" in told
