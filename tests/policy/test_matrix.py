"""The matrix in code says what the published threat tables say, and every feature of the build has its place in it."""

from __future__ import annotations

import pytest

from cloister.cli.policy import list_entries
from cloister.policy.features import FEATURES
from cloister.policy.matrix import ROWS, find_row, gather, row_of, rows_in_build
from cloister.policy.verdict import Profile, Verdict
from cloister.types.registry import Registry
from cloister.types.threat import Requirement, ThreatProfile

THREATS = {
    "paging, continuous batching, chunked prefill, TP, SP": "",
    "prefix cache": "SE",
    "disk or host offload": "SE",
    "duplication": "ST",
    "pulling (cache fetched by a node)": "SET",
    "request migration": "T",
    "disaggregated prefill/decode": "",
    "priority scheduling": "T",
    "request-level prediction": "T",
    "machine-level scheduler": "ET",
    "instance flip": "T",
    "global profiling": "P",
    "context- or datastore-based speculation (REST, Token Recycling, LLMA)": "S",
    "speculation in general": "S",
    "adaptive tuning of the optimisations": "ST",
    "key held by the whole system": "ET",
    "closed source": "V",
    "receipts of answers": "T",
    "images as input": "S",
    "stored requests and answers": "SE",
    "conversations that the web page keeps": "S",
    "engines forked from a template": "E",
    "engines that end while idle": "S",
}
STRICTNESS = [Verdict.ALLOWED, Verdict.MITIGATED, Verdict.REFUSED]
EVERY_RULING = [*(row.rulings for row in ROWS), *(feature.rulings for feature in FEATURES.values())]


def test_every_row_of_the_tables_is_there_with_its_threats() -> None:
    assert {row.name: row.threat.threats for row in ROWS} == {
        name: frozenset(map(Requirement, letters)) for name, letters in THREATS.items()
    }


def test_every_row_is_judged_by_every_profile_and_says_why() -> None:
    for rulings in EVERY_RULING:
        assert set(rulings) == set(Profile)
        assert all(ruling.text for ruling in rulings.values())


def test_no_two_rules_share_a_name() -> None:
    rulings = {id(ruling): ruling for judged in EVERY_RULING for ruling in judged.values()}.values()
    assert len({ruling.rule for ruling in rulings}) == len(rulings)


def test_a_rule_is_named_after_its_row_and_profile() -> None:
    assert row_of("prefix-cache").rulings[Profile.PARANOID].rule == "T6.prefix-cache.paranoid"
    for row in ROWS:
        assert all(ruling.rule == f"T6.{row.slug}.{profile}" for profile, ruling in row.rulings.items())


def test_a_stricter_profile_never_allows_more() -> None:
    for rulings in EVERY_RULING:
        levels = [STRICTNESS.index(rulings[profile].verdict) for profile in Profile]
        assert levels == sorted(levels)


def test_every_row_has_a_mitigation() -> None:
    assert all(row.threat.mitigations for row in ROWS)


def test_residues_and_steering_point_to_rows_with_that_threat() -> None:
    residues = {row.residue.feature: row for row in ROWS if row.residue}
    assert list(residues) == ["prefix cache", "disk offload", "duplication", "datastore speculation"]
    assert all(Requirement.STATELESS in row.threat.threats for row in residues.values())
    steerings = {row.steering.feature: row for row in ROWS if row.steering}
    assert list(steerings) == ["duplication", "pulling", "migration", "priority", "instance flip"]
    assert all(Requirement.NON_TARGETABLE in row.threat.threats for row in steerings.values())


def test_every_feature_of_the_build_owns_up_to_the_threats_of_its_row() -> None:
    entries = list_entries()
    assert {"fcfs", "static", "priority", "fair", "prefix cache", "step budget", "metrics"} <= {e.name for e in entries}
    for entry in entries:
        assert entry.threat.threats == find_row(entry.threat.row).threat.threats, entry.name


def test_what_is_in_the_build_comes_from_the_registries() -> None:
    tiers: Registry[type] = Registry("tier")
    assert rows_in_build(gather([tiers], {})) == ()
    tiers.register("disk", row_of("offload").threat)(dict)
    assert [row.slug for row in rows_in_build(gather([tiers], {}))] == ["offload"]


def test_a_feature_without_a_row_is_turned_down() -> None:
    registry: Registry[type] = Registry("tier")
    registry.register("tape", ThreatProfile(row="tape"))(dict)
    with pytest.raises(LookupError, match="no row 'tape'"):
        gather([registry], {})


def test_a_feature_that_plays_its_threats_down_is_turned_down() -> None:
    with pytest.raises(ValueError, match="differ in threats"):
        gather([], {"quiet cache": ThreatProfile(row="prefix cache")})
