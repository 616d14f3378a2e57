"""What a profile denies cannot be switched on, by whatever way somebody tries."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.policy import Entry, Policy, Profile, Use, Verdict, default_profile, is_loopback, settings
from cloister.policy.features import FEATURES
from cloister.policy.matrix import row_of
from cloister.scheduler.policies import POLICIES
from cloister.types.config import EngineConfig, Resolved, resolve
from cloister.types.errors import ConfigError, PolicyError
from cloister.types.refusals import Refusals
from cloister.types.registry import Registry


def apply_profile(engine: Resolved[EngineConfig], **surroundings: Any) -> tuple[Policy, Resolved[EngineConfig]]:
    with Refusals() as refusals:
        return settings.apply_profile(engine, refusals=refusals, **surroundings)


def engine_settings(*layers: tuple[str, dict[str, object]]) -> Resolved[EngineConfig]:
    return resolve(EngineConfig, layers)


@pytest.mark.parametrize("source", ["flag", "config file"])
def test_paranoid_refuses_the_prefix_cache_from(source: str) -> None:
    engine = engine_settings((source, {"prefix_cache": True}), ("flag", {"profile": "paranoid"}))
    with pytest.raises(PolicyError) as refusal:
        apply_profile(engine, loopback=True, has_api_keys=False)
    assert refusal.value.status == 403
    assert refusal.value.param == "prefix_cache"
    for part in ("T6.prefix-cache.paranoid", source, "switch it off", "open, team, private"):
        assert part in refusal.value.message


def test_a_flag_cannot_talk_over_a_profile_of_the_config_file() -> None:
    engine = engine_settings(("config file", {"profile": "paranoid"}), ("flag", {"prefix_cache": True}))
    with pytest.raises(PolicyError, match=r"T6\.prefix-cache\.paranoid"):
        apply_profile(engine, loopback=True, has_api_keys=True)


@pytest.mark.parametrize(("profile", "is_on"), [("open", True), ("team", True), ("private", True), ("paranoid", False)])
def test_an_unset_prefix_cache_is_as_the_profile_has_it(profile: str, is_on: bool) -> None:
    policy, engine = apply_profile(engine_settings(("flag", {"profile": profile})), loopback=True, has_api_keys=False)
    assert policy.profile == profile
    assert engine.config.prefix_cache is is_on
    why = next(reason.why for reason in engine.reasons if reason.name == "prefix_cache")
    assert why.startswith(f"T6.prefix-cache.{profile}: ")


@pytest.mark.parametrize("profile", Profile)
def test_anything_may_be_switched_off(profile: Profile) -> None:
    engine = engine_settings(("flag", {"profile": profile.value, "prefix_cache": False}))
    _, resolved = apply_profile(engine, loopback=True, has_api_keys=False)
    assert resolved.config.prefix_cache is False


def test_private_takes_a_prefix_cache_that_was_asked_for() -> None:
    engine = engine_settings(("flag", {"profile": "private", "prefix_cache": True}))
    _, resolved = apply_profile(engine, loopback=True, has_api_keys=False)
    assert resolved.config.prefix_cache is True


FOLLOW_THE_CACHE = ("lpm", "prefill_only")
"""Schedulers whose order depends on cache hits."""


@pytest.mark.parametrize(
    ("loopback", "has_api_keys", "profile"),
    [(True, False, "open"), (True, True, "team"), (False, False, "team"), (False, True, "team")],
)
def test_the_default_profile_is_open_only_where_nobody_else_can_come(loopback: bool, has_api_keys: bool, profile: str) -> None:
    chosen, why = default_profile(loopback=loopback, has_api_keys=has_api_keys)
    assert chosen == profile
    _, engine = apply_profile(engine_settings(), loopback=loopback, has_api_keys=has_api_keys)
    assert engine.config.profile == profile
    assert next(reason.why for reason in engine.reasons if reason.name == "profile") == why


@pytest.mark.parametrize("name", [name for name in POLICIES.names() if name not in FOLLOW_THE_CACHE])
@pytest.mark.parametrize("profile", Profile)
def test_every_scheduler_is_let_in_by_every_profile(profile: Profile, name: str) -> None:
    entry = ("scheduler", Entry.of(POLICIES, name))
    apply_profile(engine_settings(("flag", {"profile": profile.value})), loopback=True, has_api_keys=True, entries=[entry])


@pytest.mark.parametrize(("row", "strictest"), [("offload", "team"), ("duplication", "open"), ("pulling", "team")])
def test_an_implementation_of_a_refused_row_cannot_start(row: str, strictest: str) -> None:
    tiers: Registry[type] = Registry("tier")
    tiers.register("far", row_of(row).threat)(dict)
    entries = [("kv_tier", Entry.of(tiers, "far"))]
    apply_profile(engine_settings(("flag", {"profile": strictest})), loopback=True, has_api_keys=True, entries=entries)
    with pytest.raises(PolicyError, match=rf"T6\.{row}\.paranoid.*tier 'far'.*allows it: .*{strictest}\."):
        apply_profile(engine_settings(("flag", {"profile": "paranoid"})), loopback=True, has_api_keys=True, entries=entries)


def test_an_unknown_profile_is_answered_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="open, team, private, paranoid"):
        Policy("secret")


@given(
    profile=st.sampled_from(Profile),
    wishes=st.dictionaries(st.sampled_from(sorted(FEATURES)), st.sampled_from([True, False, None])),
)
def test_a_check_fails_exactly_when_something_wanted_is_refused(profile: Profile, wishes: dict[str, bool | None]) -> None:
    policy = Policy(profile)
    refused = {name for name in wishes if wishes[name] and policy.ruling(name).verdict is Verdict.REFUSED}
    uses = {name: Use(wanted, "a test") for name, wanted in wishes.items()}
    if not refused:
        policy.check(uses)
        return
    with pytest.raises(PolicyError) as refusal:
        policy.check(uses)
    assert any(policy.ruling(name).rule in refusal.value.message for name in refused)


@given(profile=st.sampled_from(Profile), name=st.sampled_from(sorted(FEATURES)))
def test_no_default_is_on_where_it_is_refused(profile: Profile, name: str) -> None:
    policy = Policy(profile)
    assert not (policy.is_default(name) and not policy.allows(name))


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("localhost", True),
        ("LOCALHOST", True),
        ("::1", True),
        ("[::1]", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("10.0.0.7", False),
        ("::ffff:10.0.0.7", False),
        ("localhost.example.org", False),
        ("127.0.0.1.example.org", False),
    ],
)
def test_only_an_address_of_this_machine_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("flags", "surroundings", "expected"),
    [
        ({}, {"loopback": True, "has_api_keys": False}, 0),
        ({}, {"loopback": False, "has_api_keys": False}, 16),
        ({}, {"loopback": True, "has_api_keys": True, "num_tenants": 3}, 3),
        ({"profile": "private"}, {"loopback": True, "has_api_keys": False}, 16),
        ({"profile": "paranoid"}, {"loopback": True, "has_api_keys": False}, 0),
        ({"prefix_cache": False}, {"loopback": False, "has_api_keys": True, "num_tenants": 3}, 0),
        ({"cache_scopes": 5}, {"loopback": False, "has_api_keys": True, "num_tenants": 3}, 5),
    ],
)
def test_shares_of_the_prefix_cache_are_chosen_from_who_can_share(
    flags: dict[str, object], surroundings: dict[str, Any], expected: int
) -> None:
    _, resolved = apply_profile(engine_settings(("flag", flags)), **surroundings)
    assert resolved.config.cache_scopes == expected


def test_one_cache_for_all_is_refused_where_somebody_could_feel_it() -> None:
    for profile in ("team", "private"):
        with pytest.raises(PolicyError, match="cache_scopes"):
            apply_profile(engine_settings(("flag", {"profile": profile, "cache_scopes": 0})), loopback=True, has_api_keys=True)
    apply_profile(engine_settings(("flag", {"profile": "open", "cache_scopes": 0})), loopback=True, has_api_keys=True)


@pytest.mark.parametrize("name", FOLLOW_THE_CACHE)
def test_an_order_that_follows_the_cache_is_refused_where_others_could_feel_it(name: str) -> None:
    for profile in ("team", "private", "paranoid"):
        with pytest.raises(PolicyError, match="scheduler"):
            apply_profile(engine_settings(("flag", {"profile": profile, "scheduler": name})), loopback=True, has_api_keys=True)
    apply_profile(engine_settings(("flag", {"profile": "open", "scheduler": name})), loopback=True, has_api_keys=True)
