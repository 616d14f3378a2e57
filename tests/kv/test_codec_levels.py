"""Which level of the codec a tier uses."""

from __future__ import annotations

import pytest

from cloister.kv.codec_levels import CODEC_NAMES, LEVELS, LevelCost, choose_level, is_lossy, list_levels
from cloister.types.config import EngineConfig

COSTS = [LevelCost(level, (int(1e6 / share),), decode_s) for level, share, decode_s in zip(
    LEVELS, (1, 1.5, 3.6, 4.8, 6.5), (0.0, 2e-3, 2e-3, 2e-3, 2e-3), strict=True
)]  # fmt: skip


@pytest.mark.parametrize(
    ("mb_s", "level"), [(5000, "raw"), (400, "raw"), (200, "fine"), (100, "medium"), (10, "coarse"), (0.1, "coarse")]
)
def test_a_slower_tier_gets_a_level_that_loses_more(mb_s: float, level: str) -> None:
    assert choose_level(COSTS, 1e-6 / mb_s).level.name == level


@pytest.mark.parametrize(("mb_s", "level"), [(5000, "raw"), (10, "lossless")])
def test_of_exact_levels_a_slow_tier_gets_the_smaller_one(mb_s: float, level: str) -> None:
    assert choose_level(COSTS[:2], 1e-6 / mb_s).level.name == level


def test_a_level_that_is_hardly_faster_is_not_worth_its_loss() -> None:
    raw, lossless = COSTS[0], LevelCost(LEVELS[1], (810_000,), 0.0)
    assert choose_level([raw, lossless], 1e-6) is raw


def test_the_automatic_setting_allows_no_loss_unless_it_says_so() -> None:
    assert [level.name for level in list_levels("auto")] == ["raw", "lossless"]
    assert list_levels("auto-lossy") == LEVELS
    assert [name for name in CODEC_NAMES if is_lossy(name)] == ["fine", "medium", "coarse", "auto-lossy"]
    assert not is_lossy(None)


def test_each_level_is_one_that_the_setting_knows() -> None:
    for name in CODEC_NAMES:
        EngineConfig(model="model", kv_tier_codec=name)
        assert list_levels(name)
