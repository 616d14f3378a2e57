"""Who may verify drafts: asked of the profile before anything is switched on."""

from __future__ import annotations

from typing import Any

import pytest

from cloister.policy import Profile, apply_profile
from cloister.types.config import EngineConfig, Resolved, resolve
from cloister.types.errors import ConfigError, PolicyError
from cloister.types.refusals import Refusals


def resolve_with(profile: str, *, sealed: bool = False, **flags: object) -> Resolved[EngineConfig]:
    engine = resolve(EngineConfig, [("flag", {"profile": profile, **flags})])
    with Refusals() as refusals:
        return apply_profile(engine, loopback=True, has_api_keys=False, sealed=sealed, refusals=refusals)[1]


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("profile", Profile)
def test_where_nobody_asked_there_are_no_drafts(profile: str, sealed: bool) -> None:
    engine = resolve_with(profile, sealed=sealed)
    assert engine.config.speculate == "none"
    assert not engine.config.speculates


@pytest.mark.parametrize("flags", [{"draft_model": "cloister-5m"}, {"draft_tokens": 4}, {"datastore": "texts"}])
def test_a_setting_of_drafters_asks_for_them(flags: dict[str, Any]) -> None:
    engine = resolve_with("open", **flags)
    assert engine.config.speculate == "auto"
    assert next(reason.why for reason in engine.reasons if reason.name == "speculate") == f"{next(iter(flags))} is set"


@pytest.mark.parametrize("wanted", ["auto", "ngram", "medusa,ngram"])
@pytest.mark.parametrize("profile", ["private", "paranoid"])
def test_a_plain_server_that_hides_lengths_has_no_drafts(profile: str, wanted: str) -> None:
    with pytest.raises(PolicyError, match=rf"T6\.speculation\.plain-drafts\.{profile}.*sealed node.*open, team") as refusal:
        resolve_with(profile, speculate=wanted)
    assert refusal.value.param == "speculate"
    assert resolve_with(profile, speculate="none").config.speculate == "none"


@pytest.mark.parametrize("profile", Profile)
def test_a_sealed_node_has_the_drafts_that_are_asked_for(profile: Profile) -> None:
    assert resolve_with(profile.value, sealed=True, speculate="ngram, medusa").config.drafter_names == ("ngram", "medusa")


def test_a_datastore_is_refused_where_nothing_is_read_but_the_request() -> None:
    assert resolve_with("private", sealed=True, speculate="rest", datastore="texts").config.datastore == "texts"
    with pytest.raises(PolicyError, match=r"T6\.datastore-speculation\.datastore\.paranoid"):
        resolve_with("paranoid", sealed=True, speculate="rest", datastore="texts")
    with pytest.raises(PolicyError, match=r"T6\.datastore-speculation\.datastore\.paranoid"):
        resolve_with("paranoid", sealed=True, speculate="ngram,rest")  # the one that lies beside the model


@pytest.mark.parametrize("flags", [{"draft_model": "cloister-5m"}, {"draft_tokens": 4}, {"datastore": "texts"}])
def test_a_setting_of_drafters_is_refused_where_nothing_drafts(flags: dict[str, Any]) -> None:
    (name,) = flags
    resolve_with("team", **flags)
    for profile, wanted, kind in (("team", "none", ConfigError), ("private", None, PolicyError)):
        with pytest.raises(kind, match=name) as refusal:
            resolve_with(profile, speculate=wanted, **flags)
        assert refusal.value.param == (name if kind is ConfigError else "speculate")


def test_auto_and_none_name_no_drafter() -> None:
    assert not any(EngineConfig(speculate=value).drafter_names for value in (None, "none", "auto"))
    assert [EngineConfig(speculate=value).speculates for value in (None, "none", "auto", "ngram")] == [False, False, True, True]
