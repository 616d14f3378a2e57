"""Chains of certificates: each link is checked, and an authority does not stand higher than its issuer allows."""

from __future__ import annotations

import pytest

from cloister.trust.attestation import Findings, Outcome
from cloister.trust.attestation.certificates import check_chain
from tests.authority import Authority

NOW = 1_752_000_000.0


def failures(leaf: Authority) -> list[str]:
    findings = Findings()
    holds = check_chain(findings, leaf.certificates, leaf.roots, NOW, "nobody")
    assert holds == findings.accepted
    return [step.slug for step in findings.of(Outcome.FAILED)]


@pytest.mark.parametrize(("path_length", "slugs"), [(None, []), (1, []), (0, ["chain-authority"])])
def test_an_authority_certifies_as_many_others_as_its_issuer_allows(path_length: int | None, slugs: list[str]):
    root = Authority("root", path_length=path_length)
    leaf = Authority("leaf", Authority("middle", root), is_authority=False)
    assert failures(leaf) == slugs
    assert failures(Authority("leaf", root, is_authority=False)) == []


def test_an_authority_in_the_middle_that_may_only_certify_leaves_certifies_no_authority():
    ends = Authority("ends", Authority("root"), path_length=0)
    assert failures(Authority("leaf", ends, is_authority=False)) == []
    assert failures(Authority("leaf", Authority("smuggled", ends), is_authority=False)) == ["chain-authority"]
