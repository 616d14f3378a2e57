"""`--kv-layout virtual` changes no answer; what it cannot do is refused with what to do (decisions/0042)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cloister import LLM, SamplingParams
from cloister.backends.base import KVGroup
from cloister.launch.kv_ranges import OTHER_MAPPINGS, plan_ranges, read_most_mappings
from cloister.types.config import EngineConfig
from cloister.types.errors import ConfigError

SETTINGS: dict[str, Any] = {"model": "cloister-5m", "max_num_seqs": 6, "num_threads": 1, "max_model_len": 1024}
PROMPTS = ["VACUUM reclaims storage. " * 40 + tail for tail in ("", "It", "An index", "Then")] + ["import"]


def answer(**settings: Any) -> list[list[int]]:
    sampling = SamplingParams(n=2, temperature=0.7, seed=5, max_tokens=24)
    with LLM(**SETTINGS, **settings) as llm:
        return [each.token_ids for completion in llm.generate(PROMPTS, sampling) for each in completion.outputs]


def test_answers_are_those_of_the_paged_layout() -> None:
    assert answer(kv_layout="virtual") == answer()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_dtype": "kivi2", "block_size": 32}, "no --kv-dtype kivi2"),
        ({"max_prefill_only_len": 2048}, "--kv-layout paged"),
        ({"kv_layout": "contiguous"}, "paged"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**{**SETTINGS, "kv_layout": "virtual", **settings}).close()


def plan(config: EngineConfig, max_model_len: int, groups: tuple[KVGroup, ...] = (KVGroup(9),)) -> Any:
    return plan_ranges(config, groups, max_model_len=max_model_len, most_drafts=7, most_mappings=65530)


def test_ranges_hold_the_longest_sequence_and_its_drafts() -> None:
    layout = plan(EngineConfig(max_num_seqs=16, block_size=16), 4096)
    assert (layout.num_ranges, layout.num_entries) == (16, 257)


def test_more_mappings_than_the_system_has_are_refused_with_what_fits() -> None:
    config = EngineConfig(max_num_seqs=64, block_size=16)
    with pytest.raises(
        ConfigError, match=r"65530; set --block-size 64 or more, or --max-num-seqs 27 or less, or .*"
    ) as refused:
        plan(config, 32768)
    assert f"max_map_count to {64 * 2050 + 2 + OTHER_MAPPINGS}" in str(refused.value)
    assert plan(EngineConfig(max_num_seqs=64, block_size=64), 32768).num_ranges == 64
    assert plan(EngineConfig(max_num_seqs=27, block_size=16), 32768).num_ranges == 27


def test_windows_are_refused() -> None:
    layers = frozenset({0})
    groups = (KVGroup(9, layers), KVGroup(9, frozenset({1}), 512))
    for given in (groups, groups[1:]):
        with pytest.raises(ConfigError, match="no windows"):
            plan(EngineConfig(), 1024, given)


def test_a_system_without_the_figure_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs Linux"):
        read_most_mappings(tmp_path)
