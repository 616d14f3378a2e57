import re
from typing import Annotated

import pytest
import typer

from cloister.cli.options import GivenSettings, list_flags, with_settings
from cloister.cluster.routers import ROUTERS
from cloister.executor.drafters import DRAFTERS
from cloister.scheduler import POLICIES
from cloister.types.config import EngineConfig, ServerConfig
from cloister.types.errors import ConfigError


def parse(*arguments, classes=(EngineConfig, ServerConfig)):
    caught = []
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    @with_settings(*classes)
    def verb(settings: GivenSettings, loud: Annotated[bool, typer.Option("--loud")] = False) -> None:
        caught.append((settings, loud))

    app(list(arguments), standalone_mode=False)
    return caught[0]


def test_flags_that_were_not_given_are_left_out():
    settings, loud = parse()
    assert settings == GivenSettings({}, None)
    assert loud is False


def test_every_field_has_a_flag_that_sets_it():
    values = {int: "7", float: "1.5", str: "word"}
    for cls in (EngineConfig, ServerConfig):
        for flag in list_flags(cls):
            names = flag.declaration.split("/")
            if flag.kind is bool:
                assert parse(names[0])[0].flags == {flag.name: True}
                assert parse(names[1])[0].flags == {flag.name: False}
            else:
                given = parse(names[0], values[flag.kind])[0].flags
                assert given == {flag.name: flag.kind(values[flag.kind])}


def test_a_verbs_own_options_stay_its_own():
    settings, loud = parse("--loud", "--port", "9000")
    assert loud is True
    assert settings.flags == {"port": 9000}


def test_the_config_file_is_passed_on(tmp_path):
    assert parse("--config", str(tmp_path / "c.toml"))[0].config_file == tmp_path / "c.toml"


def test_settings_are_told_apart_by_class():
    settings, _ = parse("--port", "1", "--block-size", "8")
    assert settings.of(EngineConfig) == {"block_size": 8}
    assert settings.of(ServerConfig) == {"port": 1}


def test_values_outside_their_range_are_refused():
    settings, _ = parse("--block-size", "300")
    with pytest.raises(ConfigError, match="at most 256"):
        settings.resolve(EngineConfig)


@pytest.mark.parametrize(("setting", "registry"), [("scheduler", POLICIES), ("speculate", DRAFTERS), ("router", ROUTERS)])
def test_the_help_of_a_setting_that_takes_names_has_all_of_them(setting, registry):
    flag = next(flag for cls in (EngineConfig, ServerConfig) for flag in list_flags(cls) if flag.name == setting)
    assert set(registry.names()) <= set(re.findall(r"\w+", flag.help))


def test_no_help_has_two_blanks_in_a_row():
    assert [flag.name for cls in (EngineConfig, ServerConfig) for flag in list_flags(cls) if "  " in flag.help] == []
