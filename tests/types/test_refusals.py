"""A user learns everything that is wrong with the settings at once."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from cloister.cli import main
from cloister.launch.settings import resolve_settings
from cloister.types.errors import ConfigError, PolicyError
from cloister.types.refusals import RefusedSettings


def refusals_of(config_file: Path | None = None, *, listens: bool = True, **flags: object) -> list[tuple[type, str | None]]:
    """Returns class and setting of each refusal."""
    with pytest.raises(RefusedSettings) as refused:
        resolve_settings(flags, config_file, listens=listens)
    return [(type(refusal), refusal.param) for refusal in refused.value.refusals]


def test_wrong_values_conflicts_and_what_the_profile_refuses_come_together() -> None:
    assert refusals_of(port=70000, slow_replicas="avoid", profile="paranoid", prefix_cache=True, log_requests=True) == [
        (ConfigError, "port"),
        (ConfigError, "slow_replicas"),
        (PolicyError, "prefix_cache"),
        (PolicyError, "log_requests"),
    ]


def test_a_file_with_several_mistakes_names_them_all(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('blok_size = 8\nsealed = "yes"\n[network]\nprot = 1\nquant = "int8"\n')
    assert refusals_of(file, release="r") == [
        (ConfigError, "prot"),
        (ConfigError, "quant"),
        (ConfigError, "blok_size"),
        (ConfigError, "sealed"),
    ]


def test_what_several_models_share_is_refused_once(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('port = 99999\n[models.a]\nmodel = "x"\nquant = "int7"\n[models.b]\nreplicas = 3\n')
    assert [param for _, param in refusals_of(file)] == ["replicas", "model", "port", "quant"]


def test_an_engine_without_a_server_has_all_of_its_refusals() -> None:
    assert refusals_of(listens=False, quant="int7", scheduler="x", kv_tier_codec="fine", profile="private", lora=1) == [
        (ConfigError, "lora"),
        (ConfigError, "scheduler"),
        (ConfigError, "quant"),
        (ConfigError, "kv_tier_codec"),
    ]


def test_what_may_follow_from_a_value_that_cannot_be_read_is_not_said() -> None:
    with pytest.raises(ConfigError, match="replicas must be at least 1") as refused:  # not "kv_transfer is between replicas"
        resolve_settings({"replicas": 0, "kv_transfer": "shm", "router": "least_load"})
    assert not isinstance(refused.value, RefusedSettings)
    with pytest.raises(ConfigError, match="profile must be one of"):  # not what the default profile would refuse
        resolve_settings({"profile": "privat", "host": "0.0.0.0", "cache_scopes": 0})


def test_each_setting_has_one_refusal_and_a_profile_is_not_contradicted() -> None:
    """Roles need `kv_transfer`, but this profile refuses both."""
    with pytest.raises(PolicyError, match="disaggregation"):
        resolve_settings({"replicas": 2, "prefill": 1, "decode": 1, "profile": "private"})


def test_what_nobody_set_is_not_refused() -> None:
    """Without replicas that must stay, idle engines end by themselves; where they cannot, that is the only mistake."""
    with pytest.raises(ConfigError, match="do not end while idle") as refused:
        resolve_settings({"min_replicas": 0, "max_replicas": 2, "standby": 1})
    assert not isinstance(refused.value, RefusedSettings)


@pytest.mark.parametrize("verb", [["serve"], ["cluster", "up"]])
def test_a_command_lists_them_and_exits_as_with_one(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([*verb, "--no-fork-server", "--port", "70000", "--release", "r", "--kv-tier-codec", "fine", "--explain", "--json"])
    said = capsys.readouterr()
    assert (left.value.code, said.out) == (1, "")
    head, *lines = said.err.splitlines()
    assert head == "error: 3 settings are wrong or refused:"
    assert [line.split()[1] for line in lines] == ["port", "`release`", "kv_tier_codec"]


def test_bench_lists_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", "profile", "--quant", "int7", "--kv-tier-codec", "fine"])
    assert left.value.code == 1
    assert capsys.readouterr().err.startswith("error: 2 settings are wrong or refused:\n- unknown number format")


def test_refusals_pass_from_one_process_to_another() -> None:
    with pytest.raises(RefusedSettings) as refused:
        resolve_settings({"quant": "int7", "kv_tier_codec": "fine"})
    copy = pickle.loads(pickle.dumps(refused.value))
    assert (str(copy), len(copy.refusals)) == (str(refused.value), 2)


def test_an_engine_that_does_not_listen_reads_the_config_of_a_sealed_node(tmp_path: Path) -> None:
    """`serve --sealed --config` starts the node; `LLM` and `bench` may read the same file."""
    path = tmp_path / "node.toml"
    path.write_text('release = "r"\n')
    assert resolve_settings(config_file=path, listens=False).server.config.release == "r"
    with pytest.raises(ConfigError, match="start one with --sealed"):
        resolve_settings(config_file=path)


def messages_of(config_file: Path | None = None, **flags: object) -> list[str]:
    with pytest.raises(RefusedSettings) as refused:
        resolve_settings(flags, config_file)
    return [refusal.message for refusal in refused.value.refusals]


def test_of_several_models_each_refusal_names_its_own(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    a, b = '[models.a]\nmodel = "x"\nquant = "int7"\n', '[models.b]\nmodel = "y"\nquant = "int5"\nlora = 3\n'
    file.write_text(f'port = 99999\nscheduler = "x"\n{a}{b}')
    said = messages_of(file)
    assert [message.split(" ")[0] for message in said] == ["port", "unknown", "[models.a]:", "[models.b]:", "[models.b]:"]
    assert ["int7" in said[2], "lora" in said[3], "int5" in said[4]] == [True, True, True]


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ('profile = "open"', "put it above the tables"),
        ("port = 9000", "put it above the tables"),
        ("replicas = 2", r"leave it out, or \[models\.NAME\]"),
    ],
)
def test_what_all_models_share_is_told_its_place_and_not_called_unknown(tmp_path: Path, line: str, remedy: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f'[models.a]\nmodel = "x"\n{line}\n')
    with pytest.raises(ConfigError, match=rf"^{line.split()[0]} stands in \[models\.a\] of .* whole server; {remedy}$"):
        resolve_settings(config_file=file)


def test_a_file_that_is_not_toml_says_what_a_line_is(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("model = cloister-5m\n")
    with pytest.raises(ConfigError, match=r"is not TOML: .*line 1.*; a line is NAME = VALUE, and text has quotes"):
        resolve_settings(config_file=file)


def test_an_everyday_word_in_a_message_is_not_a_setting() -> None:
    """`on` cannot be read; the other message has `switch fork_server on`."""
    assert [message.split(" ")[0] for message in messages_of(on="mars", idle_keeps="weights", fork_server=False)] == [
        "on",
        "idle_keeps",
    ]
    said = messages_of(port=99999, kv_transfer="tls://127.0.0.1:5000", replicas=2)  # "listens on a port of its own"
    assert [message.split(" ")[0] for message in said] == ["port", "each"]


@pytest.mark.parametrize(
    ("unread", "other", "why"),
    [
        ({"replicas": 0}, {"standby": 1}, "set replicas to 2 or more"),
        ({"sealed": "yes"}, {"gateway_secret": "x"}, "add --sealed"),
        ({"numerics": "x"}, {"kv_tier": "host:1G", "kv_tier_codec": "fine"}, "or set numerics fast"),
        ({"speculate": 1}, {"draft_tokens": 2, "profile": "private"}, "leave the setting `speculate` out"),
        ({"on": "mars"}, {"ray_address": "auto"}, "add --on ray"),
    ],
)
def test_what_may_follow_from_an_everyday_name_is_not_said(
    unread: dict[str, object], other: dict[str, object], why: str
) -> None:
    with pytest.raises(ConfigError) as alone:
        resolve_settings(unread | other)
    (name,) = unread
    assert alone.value.param == name
    with pytest.raises((ConfigError, PolicyError)) as refused:
        resolve_settings(other)
    assert why in str(refused.value)


def test_flags_of_a_wrong_type_come_with_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["serve", "--port", "abc", "--stall-timeout-s", "soon", "--kv-tier-codec", "fine"])
    assert left.value.code == 1
    head, *lines = capsys.readouterr().err.splitlines()
    assert head == "error: 3 settings are wrong or refused:"
    assert sorted(lines)[-2:] == ["- port must be a whole number, not text", "- stall_timeout_s must be a number, not text"]
