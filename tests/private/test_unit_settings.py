"""Settings of a sealed unit of several machines: what they change, and each wrong combination with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloister.launch.settings import Settings, resolve_settings
from cloister.private.attesting import read_attesting
from cloister.trust.attestation.configuration import describe_settings
from cloister.types.config import parse_unit_members
from cloister.types.errors import ConfigError, PolicyError

MEMBERS = "10.0.0.2:9100,[fd00::2]:9101"


def resolve(**flags: object) -> Settings:
    return resolve_settings({"sealed": True, **flags})


def test_members_are_addresses_with_ports():
    assert parse_unit_members(MEMBERS) == (("10.0.0.2", 9100), ("fd00::2", 9101))
    assert parse_unit_members(" 10.0.0.2:9100 , ") == (("10.0.0.2", 9100),)
    assert parse_unit_members(None) == ()


@pytest.mark.parametrize(
    "given",
    [
        "",
        ",",
        "10.0.0.2",
        "10.0.0.2:",
        "10.0.0.2:0",
        "10.0.0.2:65536",
        "10.0.0.2:x",
        "node2.example:9100",
        "fd00::2",
        ":9100",
        "fd00::2:9100",
        "[10.0.0.2]:9100",
    ],
)
def test_what_is_no_address_is_refused_as_a_sealed_node_looks_up_no_names(given: str):
    with pytest.raises(ConfigError, match=r"IP:PORT") as refused:
        resolve(unit_members=given)
    assert refused.value.param == "unit_members"


@pytest.mark.parametrize("given", ["10.0.0.2:1,10.0.0.2:1", ",".join(f"10.0.0.{n}:1" for n in range(8))])
def test_members_are_named_once_and_at_most_seven(given: str):
    with pytest.raises(ConfigError, match="once, at most 7"):
        resolve(unit_members=given)


def test_a_node_leads_a_unit_or_is_a_member_of_one():
    with pytest.raises(ConfigError, match="leads a unit or is a member"):
        resolve(unit_members=MEMBERS, unit_port=9100)


def test_the_unit_port_is_not_the_nodes():
    with pytest.raises(ConfigError, match="another port"):
        resolve(unit_port=8000)
    with pytest.raises(ConfigError, match="at least 1"):
        resolve(unit_port=0)


def test_a_policy_without_a_unit_has_no_effect_and_is_refused():
    with pytest.raises(ConfigError, match="machines of a unit"):
        resolve(unit_policy="policy.json")
    assert Path("policy.json") in read_attesting(resolve(unit_port=9100, unit_policy="policy.json").server.config).files


@pytest.mark.parametrize("given", [{"unit_members": MEMBERS}, {"unit_port": 9100}, {"unit_policy": "p"}])
def test_a_server_that_is_not_sealed_has_no_unit(given: dict[str, object]):
    with pytest.raises(ConfigError, match="--sealed"):
        resolve_settings(given)


@pytest.mark.parametrize("given", [{"unit_members": MEMBERS}, {"unit_port": 9100}], ids=lambda given: next(iter(given)))
def test_profiles_below_paranoid_allow_a_unit_of_machines(given: dict[str, object]):
    for profile in ("private", "team", "open"):
        assert resolve(profile=profile, **given).policy.allows("sealed-unit")
    with pytest.raises(PolicyError, match="never leaves the machine") as refused:
        resolve(profile="paranoid", **given)
    assert next(iter(given)) in refused.value.message


def test_engines_are_drawn_and_the_settings_of_leader_and_member_are_one_configuration():
    leader, member = resolve(unit_members=MEMBERS, port=8001), resolve(unit_port=9100, unit_policy="p")
    assert leader.server.config.router == member.server.config.router == "capacity_random"
    assert describe_settings(leader.server.config) == describe_settings(member.server.config)
    alone = describe_settings(resolve().server.config)
    assert describe_settings(leader.server.config) != alone, "a member draws as its leader does"
    with pytest.raises(ConfigError, match="capacity_random"):
        resolve(unit_members=MEMBERS, router="least_load")


def test_the_capacity_of_a_leader_is_that_of_all_engines_of_its_unit():
    assert read_attesting(resolve(unit_members=MEMBERS, replicas=2).server.config).capacity == 6
    assert read_attesting(resolve(unit_members=MEMBERS, node_capacity=5).server.config).capacity == 5
    assert read_attesting(resolve(unit_port=9100, replicas=2).server.config).capacity == 2
