"""A policy in a file: what it says is what is demanded, and a slip in it is an error and not a demand less."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloister.cli.proxy import proxy
from cloister.trust.attestation import AttestationPolicy, SnpFloor
from cloister.trust.attestation.policy_file import parse_policy, read_policy, with_demands
from cloister.types.errors import ConfigError

EVERYTHING = b"""{
  "profile": "paranoid", "kinds": ["tdx"], "releases": ["0a"], "models": ["0b"], "profile_digests": ["0c"],
  "hardening": ["seccomp"], "measurements": {"tdx": ["0d"], "tdx-rtmr0": ["0e"], "tdx-rtmr3": ["0f"]},
  "snp_floor": {"snp": 23}, "tdx_statuses": ["UpToDate", "SWHardeningNeeded"], "gpu": true, "gpu_measurements": {"1": ["aa"]}
}"""


def test_every_field_is_read():
    assert parse_policy(EVERYTHING) == AttestationPolicy(
        profile="paranoid",
        kinds=frozenset({"tdx"}),
        releases=frozenset({"0a"}),
        models=frozenset({"0b"}),
        profile_digests=frozenset({"0c"}),
        hardening=frozenset({"seccomp"}),
        measurements={"tdx": frozenset({"0d"}), "tdx-rtmr0": frozenset({"0e"}), "tdx-rtmr3": frozenset({"0f"})},
        snp_floor=SnpFloor(snp=23),
        tdx_statuses=frozenset({"UpToDate", "SWHardeningNeeded"}),
        gpu=True,
        gpu_measurements={1: frozenset({"aa"})},
    )


def test_an_empty_policy_demands_what_the_default_demands():
    assert parse_policy(b"{}") == AttestationPolicy()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"measurement": {"tdx": ["00"]}}',
        b'{"snp_floor": {"micro_code": 3}}',
        b'{"releases": ["not hex"]}',
        b'{"releases": ["0A"]}',
        b'{"measurements": {"tdx": ["xx"]}}',
        b'{"measurements": {"tdx-rtmr4": ["00"]}}',
        b'{"measurements": {"tdx-mrtd": ["00"]}}',
        b'{"gpu": "yes"}',
        b'{"kinds": ["snp"]}',
    ],
)
def test_a_slip_is_an_error(content: bytes):
    with pytest.raises(ConfigError, match=r"policy"):
        parse_policy(content)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="absent"):
        read_policy(tmp_path / "absent.json")
    (tmp_path / "policy.json").write_bytes(EVERYTHING)
    assert read_policy(tmp_path / "policy.json").gpu


def test_the_command_line_adds_to_a_policy():
    policy = parse_policy(EVERYTHING)
    assert with_demands(policy) == policy
    added = with_demands(policy, profile="team", accept_software=True)
    assert (added.profile, added.accept_software, added.kinds) == ("team", True, policy.kinds)


def test_the_proxy_does_not_start_with_a_policy_that_has_a_slip(tmp_path: Path):
    (tmp_path / "policy.json").write_text('{"realeses": []}')
    with pytest.raises(ConfigError, match="no field realeses"):
        proxy("http://127.0.0.1:1", tmp_path / "trust", tmp_path / "key", policy=tmp_path / "policy.json", host="127.0.0.1")
