"""What a client asks of a node beside what its hardware says."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from cloister.client.node_verification import fill_policy, judge_node
from cloister.trust.attestation import AttestationPolicy
from cloister.trust.attestation.base import Outcome
from cloister.trust.attestation.evidence import read_evidence, read_statement
from cloister.trust.transparency.epoch import NodeEntry
from tests.trust.transparency.world import World, make_evidence


@pytest.mark.parametrize(("life_s", "failed"), [(3600, False), (70, True)])
def test_evidence_that_ends_before_its_epoch_is_refused_since_it_is_judged_once_an_epoch(
    tmp_path: Path, life_s: int, failed: bool
) -> None:
    world = World(tmp_path)
    believed = world.believe(world.publish().bundle)
    document = make_evidence(world.release, now=world.now, life_s=life_s)
    statement = read_statement(read_evidence(document).statement)
    node = NodeEntry(statement.node_id, statement.capacity, statement.keys, hashlib.sha256(document).hexdigest())
    findings = judge_node(node, document, believed, world.trust, AttestationPolicy(accept_software=True), world.now)
    assert ("life" in {step.slug for step in findings.of(Outcome.FAILED)}) is failed


def test_the_release_says_what_hardware_may_measure_and_the_users_own_policy_says_more(tmp_path: Path) -> None:
    world = World(tmp_path)
    believed = world.believe(world.publish().bundle)
    launch = {"sev-snp": "aa" * 48, "tdx": "bb" * 48, "tdx-rtmr1": "cc" * 48}
    release = msgspec.structs.replace(believed.release, launch=launch)
    own = {"tdx-rtmr0": frozenset({"ee" * 48}), "tdx-rtmr1": frozenset({"ff" * 48})}
    policy = fill_policy(AttestationPolicy(measurements=own), replace(believed, release=release))
    assert policy.measurements == {"sev-snp": {"aa" * 48}, "tdx": {"bb" * 48}, **own}
