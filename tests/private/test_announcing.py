"""A node's evidence: made for each key, never longer than the key lives, and refused by clients when it is anything else."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from cloister.private.attesting import Announcer
from cloister.private.unsealing import LocalUnsealer
from cloister.trust.attestation import AttestationError, AttestationPolicy, Evidence, Outcome, read_evidence, read_statement
from cloister.trust.attestation.measuring import (
    encode_manifest,
    measure_configuration,
    measure_model,
    measure_profile,
    read_manifest,
)
from cloister.trust.attestation.node import Facts, gather_facts, with_host
from cloister.trust.attestation.software import SoftwareAttester
from cloister.trust.attestation.verify import verify_evidence
from cloister.trust.sealing import NODE_KEY_LIFE_S, NODE_KEY_OVERLAP_S, KeyRing, Receiver, ReplayCache
from cloister.trust.transparency.release import Release
from tests.private import units

START = 1_790_000_000.0
HARDENING = {"front.seccomp": "applied: on"}
FACTS = replace(units.FACTS, configuration={"setting quant": '"none"'}, capacity=3)
POLICY = replace(units.POLICY, configuration=FACTS.configuration, hardening=frozenset())


class Node:
    """Keys, an announcer, and a clock that is moved by hand."""

    def __init__(self, facts: Facts = FACTS, attester: SoftwareAttester | None = None) -> None:
        self.now = START
        self.ring = KeyRing(START)
        unsealer = LocalUnsealer(Receiver(self.ring, ReplayCache(NODE_KEY_LIFE_S)), lambda: self.now)
        self.announcer = Announcer(
            unsealer,
            attester or SoftwareAttester(),
            facts,
            START,
            lambda: HARDENING,
            lambda: "a checkpoint\n",
            now=lambda: self.now,
        )

    def renew(self) -> bool:
        return asyncio.run(self.announcer.renew())

    @property
    def evidence(self) -> Evidence:
        document = self.announcer.evidence()
        assert document is not None
        return read_evidence(document)


def failures(node: Node, policy: AttestationPolicy = POLICY, evidence: Evidence | None = None) -> list[str]:
    findings = verify_evidence(evidence or node.evidence, policy, node.now)
    return [step.slug for step in findings.of(Outcome.FAILED)]


def test_a_node_has_no_evidence_before_it_made_some_and_then_for_its_current_key():
    node = Node()
    assert node.announcer.evidence() is None
    assert node.renew()
    statement = read_statement(node.evidence.statement)
    assert statement.keys == node.ring.publish()
    assert statement.node_id == hashlib.sha256(node.ring.publish()).hexdigest()
    assert statement.checkpoint == "a checkpoint\n"
    assert failures(node) == []


def test_evidence_is_made_once_for_each_key():
    node = Node()
    node.renew()
    first = node.announcer.evidence()
    node.now += 60
    assert not node.renew()
    assert node.announcer.evidence() == first
    node.now = START + NODE_KEY_LIFE_S - NODE_KEY_OVERLAP_S
    assert node.renew()
    assert node.announcer.evidence() != first
    assert read_statement(node.evidence.statement).keys == node.ring.publish()


@pytest.mark.parametrize("late_s", [0, 1, 600])
def test_evidence_never_outlives_its_key_however_late_the_node_looks(late_s: int):
    node = Node()

    async def live() -> None:
        for tick in range(0, int(NODE_KEY_LIFE_S * 2), 30):
            node.now = START + tick + (late_s if tick > 2600 else 0)
            await node.announcer.renew()
            statement = read_statement(node.evidence.statement)
            key = node.ring.current
            assert key.created_s - 30 - late_s <= statement.not_before <= key.created_s
            assert statement.not_after <= key.expires_s

    asyncio.run(live())
    assert node.ring.current.created_s > START + NODE_KEY_LIFE_S - 60, "keys were replaced"


def test_evidence_that_has_ended_is_neither_served_nor_accepted():
    node = Node()
    node.renew()
    evidence = node.evidence
    node.now += NODE_KEY_LIFE_S
    assert node.announcer.evidence() is None
    assert failures(node, evidence=evidence) == ["expiry"]


def test_where_hardware_fails_the_evidence_of_the_key_before_stays_to_its_end():
    class Failing(SoftwareAttester):
        fails = False

        def attest(self, statement: bytes) -> Evidence:
            if self.fails:
                raise AttestationError("the kernel gives no report")
            return super().attest(statement)

    attester = Failing()
    node = Node(attester=attester)
    node.renew()
    first = node.announcer.evidence()
    attester.fails = True
    node.now += NODE_KEY_LIFE_S - NODE_KEY_OVERLAP_S
    with pytest.raises(AttestationError):
        node.renew()
    assert node.announcer.evidence() == first
    attester.fails = False
    assert node.renew()


def test_a_machine_that_gives_no_evidence_is_found_out_before_the_node_serves():
    class Nowhere(SoftwareAttester):
        def attest(self, statement: bytes) -> Evidence:
            raise AttestationError("this is no confidential guest")

    asyncio.run(Node().announcer.rehearse())
    with pytest.raises(AttestationError, match="no confidential guest"):
        asyncio.run(Node(attester=Nowhere()).announcer.rehearse())


def test_a_node_of_another_profile_is_refused_by_a_client_that_wants_private():
    facts = replace(FACTS, profile="open", profile_digest=measure_profile("open"))
    node = Node(facts)
    node.renew()
    assert failures(node) == ["profile", "profile-digest"]


def test_a_node_of_another_release_is_refused():
    node = Node(replace(FACTS, release="1a" * 32))
    node.renew()
    assert failures(node) == ["release"]


PROGRAM = """
import sys
from pathlib import Path
from cloister.trust.attestation.node import gather_facts
from cloister.types.errors import CloisterError
folder, model, profile = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
try:
    print(gather_facts(profile, model, 1, folder).release)
except CloisterError as error:
    print(error.message)
"""


def start(folder: Path, model: Path, profile: str = "private") -> str:
    """What a node that was given this release says at its start."""
    command = [sys.executable, "-c", PROGRAM, str(folder), str(model), profile]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.strip()


@pytest.fixture
def released(tmp_path: Path) -> tuple[Path, Path, Release]:
    """A release of what is installed here, and its model."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    measured = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, cloister.trust.attestation.node\n"
            "from cloister.trust.attestation.measuring import *\n"
            "sys.stdout.buffer.write(encode_manifest(measure_code() | measure_package()))",
        ],
        capture_output=True,
        check=True,
        timeout=300,
    ).stdout
    digests = dict.fromkeys(("wheel", "lock", "interpreter"), "0d" * 32)
    release = Release(
        number=7,
        version="0.1.0",
        files=hashlib.sha256(measured).hexdigest(),
        model=measure_model(model),
        profile="private",
        profile_digest=measure_profile("private"),
        configuration=measure_configuration({}, model, {}),
        **digests,
    )
    folder = tmp_path / "release"
    folder.mkdir()
    (folder / "release.json").write_bytes(release.encode())
    (folder / "manifest.json").write_bytes(measured)
    return folder, model, release


@pytest.mark.parametrize("failure", [AttestationError("the hardware is busy"), OSError(24, "Too many open files")])
def test_a_failure_that_may_pass_is_told_once_and_tried_again(
    failure: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    node = Node(attester=FailingAttester(*[failure] * 3))
    asyncio.run(renew_until(node, monkeypatch, lambda: node.announcer.evidence() is not None))
    assert node.announcer.fault is None
    assert [str(failure.args[-1]) in record.getMessage() for record in caplog.records] == [True]


def test_a_node_ends_whose_evidence_is_not_renewed_any_more(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    node = Node(attester=FailingAttester(ValueError("of an error in the program")))
    asyncio.run(renew_until(node, monkeypatch, lambda: node.announcer.fault is not None))
    assert "start the node again" in str(node.announcer.fault)
    assert "ValueError" in caplog.text


class FailingAttester(SoftwareAttester):
    """Fails in these ways first."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)

    def attest(self, statement: bytes) -> Evidence:
        if self.failures:
            raise self.failures.pop()
        return super().attest(statement)


async def renew_until(node: Node, monkeypatch: pytest.MonkeyPatch, holds: Callable[[], bool]) -> None:
    monkeypatch.setattr("cloister.private.attesting.LOOK_EVERY_S", 0.001)
    renewing = asyncio.create_task(node.announcer.renew_forever())
    async with asyncio.timeout(300):
        while not holds():
            await asyncio.sleep(0.001)
    renewing.cancel()
    await asyncio.gather(renewing, return_exceptions=True)


def test_a_node_that_runs_its_release_states_the_digest_that_the_log_has(released: tuple[Path, Path, Release]):
    folder, model, release = released
    assert start(folder, model) == release.digest


def test_a_node_that_runs_something_else_does_not_start(released: tuple[Path, Path, Release]):
    folder, model, _ = released
    assert "its profile is private, and here it is team" in start(folder, model, "team")
    (model / "config.json").write_text("{ }")
    assert "its model is" in start(folder, model)
    changed = encode_manifest({**measure_of(folder), "site/cloister/__init__.py": "00" * 32})
    (folder / "manifest.json").write_bytes(changed)
    assert "is not the one of the release beside it" in start(folder, model)
    (folder / "manifest.json").unlink()
    assert "cannot read the release" in start(folder, model)


def test_a_file_that_differs_from_the_manifest_is_named(released: tuple[Path, Path, Release]):
    folder, model, release = released
    changed = encode_manifest({**measure_of(folder), "site/cloister/__init__.py": "00" * 32})
    (folder / "manifest.json").write_bytes(changed)
    fitting = msgspec.structs.replace(release, files=hashlib.sha256(changed).hexdigest())
    (folder / "release.json").write_bytes(fitting.encode())
    assert "this is not release 7: site/cloister/__init__.py differ" in start(folder, model)


def test_without_a_release_a_node_states_the_digest_of_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cloister.trust.attestation.node.measure_code", dict)  # the tests' own process may hold torch
    (tmp_path / "config.json").write_text("{}")
    facts = gather_facts("open", tmp_path, 2)
    assert (facts.profile, facts.capacity, facts.model) == ("open", 2, measure_model(tmp_path))
    assert len(facts.release) == 64


def test_the_host_is_said_to_be_excluded_by_hardware_only():
    missing = {**HARDENING, "host": "missing: host not excluded: who has SYS_PTRACE reads this memory"}
    assert with_host(missing, "software") == missing
    assert with_host(HARDENING, "software")["host"] == "missing: host not excluded"
    assert with_host(missing, "tdx")["host"].startswith("applied: the processor")


def measure_of(folder: Path) -> dict[str, str]:
    return read_manifest((folder / "manifest.json").read_bytes())
