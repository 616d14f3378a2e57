import pytest

from cloister.types.config import EngineConfig, ServerConfig, setting_names
from cloister.types.errors import ConfigError
from cloister.types.refusals import Refusals
from cloister.types.setting_groups import COMMON, GROUPS, flatten_groups, list_groups


def test_every_setting_is_in_one_group():
    listed = [name for names in list_groups().values() for name in names]
    assert sorted(listed) == sorted(setting_names(EngineConfig, ServerConfig))


def test_groups_and_common_settings_name_settings_that_exist():
    known = set(setting_names(EngineConfig, ServerConfig))
    assert known >= {name for names in GROUPS.values() for name in names} | COMMON


def test_tables_by_group_and_plain_keys_say_the_same():
    grouped = {
        "model": {"model": "m", "quant": "int8"},
        "network": {"port": 1},
        "scheduler": "fair",
        "sealed": {"sealed": True},
    }
    plain = {"model": "m", "quant": "int8", "port": 1, "scheduler": "fair", "sealed": True}
    with Refusals() as refusals:
        assert flatten_groups(grouped, "f", refusals) == plain
        assert flatten_groups(plain, "f", refusals) == plain


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": {"port": 1}}, r"port belongs into \[network\] of f, not into \[model\]"),
        ({"network": {"prot": 1}}, r"unknown setting 'prot' in \[network\] of f; did you mean 'port'"),
        ({"network": {"xyzzy": 1}}, r"unknown setting 'xyzzy' in \[network\] of f; it has host, port"),
        ({"port": 1, "network": {"port": 2}}, "port stands twice in f"),
    ],
)
def test_a_setting_in_the_wrong_place_is_refused(given, said):
    with pytest.raises(ConfigError, match=said), Refusals() as refusals:
        flatten_groups(given, "f", refusals)
