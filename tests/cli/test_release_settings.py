"""`cloister release make` takes what nodes are started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloister.cli.release import _resolve
from cloister.policy.verdict import Profile
from cloister.trust.attestation.configuration import describe_settings
from cloister.types.errors import ConfigError

MODEL = Path("a-model")


def describe(*arguments: str) -> dict[str, str]:
    settings = _resolve(list(arguments), MODEL, Profile.PRIVATE)
    return describe_settings(settings.engine.config, settings.server.config)


def test_settings_of_nodes_are_in_the_release_as_they_come_into_force(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('quant = "int8"\nmax_num_seqs = 4\n')
    found = describe("--config", str(file), "--max-num-seqs", "5", "--port", "9000", "--gateway-secret", "secret")
    assert found["setting quant"] == '"int8"'
    assert found["setting max_num_seqs"] == "5"
    assert found["setting profile"] == '"private"'
    assert found["setting prefix_cache"] == "true"  # what the profile decided
    assert not any("9000" in value or "secret" in value for value in found.values())


def test_places_and_secrets_make_no_other_release() -> None:
    assert describe("--port", "9000", "--host", "0.0.0.0", "--num-threads", "3") == describe()


def test_nodes_of_another_model_or_profile_are_no_nodes_of_the_release() -> None:
    for arguments in (["--model", "another"], ["another"], ["--profile", "open"]):
        with pytest.raises(ConfigError, match="in the release"):
            describe(*arguments)
