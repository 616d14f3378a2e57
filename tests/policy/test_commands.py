"""`cloister policy` and `cloister keys`, run as a person runs them."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cloister.cli import keys, policy
from cloister.policy import KeyQuota, read_credentials
from cloister.policy.document import all_features, to_markdown
from cloister.policy.features import ALWAYS_THERE, FEATURES
from cloister.policy.matrix import ROWS
from cloister.policy.verdict import Profile, Verdict
from cloister.types.errors import ConfigError

DOCUMENT = Path(__file__).parents[2] / "docs" / "threats.md"


def run(*arguments: str, width: int = 200) -> Result:
    app = keys.app if arguments[0] == "keys" else policy.app
    return CliRunner(env={"COLUMNS": str(width), "NO_COLOR": "1"}).invoke(app, arguments[1:])


def test_the_document_is_what_the_code_prints() -> None:
    printed = to_markdown(policy.list_entries())
    assert DOCUMENT.read_text() == printed, "print it anew: cloister policy show --markdown > docs/threats.md"
    assert run("policy", "show", "--markdown").output == printed


def test_every_row_is_shown() -> None:
    result = run("policy", "show", "--matrix")
    assert result.exit_code == 0
    assert all(row.name in result.output for row in ROWS)


@pytest.mark.parametrize("profile", ["open", "team", "private", "paranoid"])
def test_one_profile_is_shown_with_the_rules_that_hold(profile: str) -> None:
    result = run("policy", "show", "--matrix", "--profile", profile)
    assert result.exit_code == 0
    assert all(f"(T6.{row.slug}.{profile})" in result.output for row in ROWS)
    assert f"(T6.priority.client-field.{profile})" in result.output


@pytest.mark.parametrize("profile", list(Profile))
def test_an_operator_reads_what_a_profile_does_about_each_feature(profile: Profile, capsys: pytest.CaptureFixture[str]) -> None:
    policy.show(profile)
    text = " ".join(capsys.readouterr().out.split())
    for feature in (*FEATURES.values(), *ALWAYS_THERE):
        assert f"{feature.title}" in text
        assert f"endangers {feature.endangers} {profile} {feature.rulings[profile].text}" in text


def test_every_feature_has_words_of_its_own() -> None:
    features = (*FEATURES.values(), *ALWAYS_THERE)
    assert all(feature.does and feature.endangers for feature in features)
    assert len({feature.title for feature in features}) == len(features)


def test_without_a_profile_that_of_one_person_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    policy.show()
    assert capsys.readouterr().out.startswith("Profile open")


def test_json_has_every_row_and_only_the_profile_asked_for() -> None:
    data = json.loads(run("policy", "show", "--json", "--profile", "paranoid").output)
    rows = {row["feature"]: row for row in data["rows"]}
    assert rows["prefix cache"]["rulings"] == {
        "paranoid": {"rule": "T6.prefix-cache.paranoid", "verdict": "refused", "text": "nothing is reused at all"}
    }
    assert rows["prefix cache"]["in_build"] is True
    assert rows["instance flip"]["in_build"] is True
    assert rows["key held by the whole system"]["in_build"] is False
    assert len(rows) == len(ROWS)


def test_what_cannot_be_combined_is_said() -> None:
    result = run("policy", "show", "--markdown", "--json")
    assert result.exit_code == 2
    assert "by itself" in result.output


def test_a_comparison_has_only_what_differs_in_an_operators_words(capsys: pytest.CaptureFixture[str]) -> None:
    policy.compare(Profile.OPEN, Profile.PRIVATE)
    text = " ".join(capsys.readouterr().out.split())
    num_alike = 0
    for feature in all_features():
        ours, theirs = feature.rulings[Profile.OPEN], feature.rulings[Profile.PRIVATE]
        told = f"endangers {feature.endangers} open {ours.verdict}: {ours.text} private {theirs.verdict}: {theirs.text}"
        # Why something is allowed or refused may be said in other words; it is allowed or refused all the same.
        differs = ours.verdict is not theirs.verdict or (ours.verdict is Verdict.MITIGATED and ours.text != theirs.text)
        assert (told in text) == differs, feature.title
        num_alike += not differs
    assert num_alike
    assert f"{num_alike} other features are treated the same" in text


def test_a_program_reads_the_same_comparison() -> None:
    data = json.loads(run("policy", "compare", "team", "paranoid", "--json").output)
    cache = next(feature for feature in data["features"] if feature["feature"] == "Prefix cache")
    assert (cache["team"]["verdict"], cache["paranoid"]["verdict"]) == ("mitigated", "refused")
    assert data["profiles"] == ["team", "paranoid"]
    assert all(feature["team"] != feature["paranoid"] for feature in data["features"])
    assert len(data["features"]) < len(all_features())


def test_a_key_is_printed_once_and_works(tmp_path: Path) -> None:
    file = tmp_path / "new" / "keys.json"
    result = run("keys", "add", "ann", "--tenant", "lab", "--priority", "-2", "--file", str(file))
    assert result.exit_code == 0, result.output
    api_key = result.stdout.strip()
    credential = read_credentials(file).find(api_key)
    assert credential is not None
    assert (credential.name, credential.tenant, credential.priority) == ("ann", "lab", -2)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    listed = run("keys", "list", "--file", str(file))
    assert "ann" in listed.output
    assert "lab" in listed.output
    assert api_key not in listed.output
    assert json.loads(run("keys", "list", "--json", "--file", str(file)).output) == [
        {"name": "ann", "tenant": "lab", "priority": -2}
        | dict.fromkeys(("requests_per_minute", "concurrent_requests", "tokens_per_day"))
    ]


def test_a_removed_key_is_gone(tmp_path: Path) -> None:
    file = str(tmp_path / "keys.json")
    api_key = run("keys", "add", "ann", "--file", file).stdout.strip()
    assert run("keys", "remove", "ann", "--file", file).exit_code == 0
    assert read_credentials(Path(file)).find(api_key) is None


def test_limits_are_set_with_the_key_and_changed_later(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    made = run("keys", "add", "ann", "--rpm", "60", "--tokens-per-day", "100000", "--file", str(file))
    assert made.exit_code == 0, made.output
    assert read_credentials(file).keys[0].limits == KeyQuota(60, None, 100_000)
    assert "100,000" in run("keys", "list", "--file", str(file)).output
    changed = run("keys", "limit", "ann", "--rpm", "0", "--concurrent", "4", "--file", str(file))
    assert changed.exit_code == 0, changed.output
    assert read_credentials(file).keys[0].limits == KeyQuota(None, 4, 100_000)
    assert read_credentials(file).find(made.stdout.strip()) is not None
    unknown = run("keys", "limit", "bob", "--rpm", "1", "--file", str(file))
    assert "there is no key named 'bob'" in str(unknown.exception)


def test_a_key_file_from_before_there_were_limits_is_read(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    run("keys", "add", "ann", "--file", str(file))
    data = json.loads(file.read_bytes())
    del data["keys"][0]["limits"]
    file.write_text(json.dumps(data))
    assert read_credentials(file).keys[0].limits == KeyQuota()
    data["keys"][0]["limits"] = {"requests_per_minute": 0}
    file.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"is broken .*requests_per_minute must be at least 1"):
        read_credentials(file)
