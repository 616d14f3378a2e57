import pytest

from cloister.types.config import EngineConfig, ServerConfig, refuse_unknown, resolve, setting_names
from cloister.types.errors import ConfigError
from cloister.types.refusals import Refusals


def test_later_layers_win_and_say_where_a_value_comes_from():
    resolved = resolve(ServerConfig, [("file a.toml", {"port": 1, "host": "::1"}), ("flag", {"port": 2})])
    reasons = {reason.name: reason for reason in resolved.reasons}
    assert (resolved.config.port, reasons["port"].why) == (2, "flag")
    assert (resolved.config.host, reasons["host"].why) == ("::1", "file a.toml")
    assert reasons["max_n"].why == "default"


def test_none_does_not_count():
    assert resolve(ServerConfig, [("file", {"port": 9}), ("flag", {"port": None})]).config.port == 9


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"port": "8000"}, "a whole number, not text"),
        ({"port": 70000}, "at most 65535"),
        ({"port": True}, "a whole number, not true or false"),
        ({"drain_timeout_s": -1}, "at least 0"),
        ({"drain_timeout_s": float("nan")}, "finite"),
        ({"drain_timeout_s": float("inf")}, "finite"),
    ],
)
def test_a_wrong_value_is_refused_with_what_would_do(settings, words):
    with pytest.raises(ConfigError, match=words):
        resolve(ServerConfig, [("flag", settings)])


def test_a_wrong_choice_lists_the_right_ones():
    with pytest.raises(ConfigError, match="open, team, private, paranoid"):
        resolve(EngineConfig, [("flag", {"profile": "secret"})])


def test_a_whole_number_will_do_for_a_fraction():
    assert resolve(EngineConfig, [("flag", {"max_stall": 2})]).config.max_stall == 2.0


def test_a_misspelt_setting_is_met_with_the_nearest_one():
    with pytest.raises(ConfigError, match="did you mean 'block_size'"), Refusals() as refusals:
        refuse_unknown(["blok_size"], setting_names(EngineConfig), "x.toml", refusals)


def test_an_explained_value_carries_its_reason():
    resolved = resolve(EngineConfig, []).explain(num_threads=(2, "there are two"))
    reason = next(r for r in resolved.reasons if r.name == "num_threads")
    assert (resolved.config.num_threads, reason.value, reason.why) == (2, 2, "there are two")
