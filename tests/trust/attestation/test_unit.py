"""A node with several engines: its evidence covers each of them, and one that says something else is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cloister.trust.attestation import Findings
from cloister.trust.attestation.unit import check_unit, engine_name
from tests.trust.attestation.test_verify import SOFTWARE, STATEMENT, failures, verify

SETTINGS = {"setting quant": '"none"', "setting router": '"capacity_random"'}


def hardening(*engines: str) -> dict[str, str]:
    return {f"{name}.seccomp": "applied: on" for name in ("front", *engines)}


def check(num_engines: object, *engines: str, **settings: str) -> Findings:
    configuration = {**SETTINGS, "setting replicas": str(num_engines), **{f"setting {k}": v for k, v in settings.items()}}
    policy = replace(SOFTWARE, configuration=configuration)
    return verify(policy, configuration=configuration, hardening=hardening(*engines))


def unit_of(findings: Findings) -> str:
    return next(step.text for step in findings if step.slug == "unit")


def test_a_node_of_one_engine_is_judged_as_before():
    assert [step.slug for step in verify()] == [step.slug for step in verify() if step.slug != "unit"]
    assert check(1, "engine").accepted


def test_a_unit_whose_engines_are_all_measured_is_proved():
    findings = check(3, "engine", "engine-1", "engine-2")
    assert findings.accepted
    assert "one unit of 3 engines" in unit_of(findings)


def test_an_engine_that_lacks_a_measure_of_the_others_is_refused():
    configuration = {**SETTINGS, "setting replicas": "2"}
    policy = replace(SOFTWARE, configuration=configuration, hardening=frozenset({"seccomp", "landlock"}))
    measured = {f"{name}.{measure}": "applied: on" for name in ("front", "engine") for measure in ("seccomp", "landlock")}
    whole = {**measured, "engine-1.seccomp": "applied: on", "engine-1.landlock": "applied: on"}
    assert verify(policy, configuration=configuration, hardening=whole).accepted
    less = verify(policy, configuration=configuration, hardening={**measured, "engine-1.seccomp": "applied: on"})
    assert "do not have the same measures" in unit_of(less)
    assert not less.accepted


def test_roles_and_how_kv_passes_are_said():
    findings = check(3, "engine", "engine-1", "engine-2", prefill="1", decode="2", kv_transfer='"sealed"')
    assert "1 compute prompts, 2 go on with answers" in unit_of(findings)
    assert "transport sealed" in unit_of(findings)


@pytest.mark.parametrize(
    "engines",
    [
        ("engine",),  # one was not started, or is not measured
        ("engine", "engine-1", "engine-2"),  # one more than was published
        ("engine", "engine-2"),  # another one in its place
        (),
    ],
)
def test_more_or_fewer_engines_than_were_stated_are_refused(engines: tuple[str, ...]):
    findings = check(2, *engines)
    assert "unit" in failures(findings)
    assert "2 engines" in unit_of(findings)


def test_an_engine_beside_a_node_of_one_is_refused():
    assert "unit" in failures(check(1, "engine", "engine-1"))


def test_other_numbers_than_the_release_are_refused_as_any_setting():
    configuration = {**SETTINGS, "setting replicas": "2"}
    findings = verify(configuration=configuration, hardening=hardening("engine", "engine-1"))
    assert "configuration" in failures(findings)


def test_a_unit_that_divides_requests_by_load_is_refused():
    findings = check(2, "engine", "engine-1", router='"least_load"')
    assert "unit" in failures(findings)
    assert "can be steered" in unit_of(findings)


@pytest.mark.parametrize("number", ["{", "true", '"2"', "0", "-1", "2.5", "null", "9999999999"])
def test_a_number_that_is_none_is_refused(number: str):
    findings = check(number, "engine", "engine-1")
    assert "unit" in failures(findings)


def test_names_are_what_evidence_allows():
    findings = Findings()
    check_unit(findings, STATEMENT)
    assert list(findings) == []
    assert [engine_name(index) for index in range(3)] == ["engine", "engine-1", "engine-2"]
