"""The benchmark of families beside llama.cpp: models, samples that add up, and rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.family_speed import describe, list_models, merge, rename_layers


def test_an_unknown_family_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(SystemExit, match="no such families: qwen9; there are q30bl4, gemma3_text"):
        list(list_models(["qwen9", "gpt_oss"]))


def test_the_mixture_keeps_its_full_width_and_the_families_get_one_vocabulary() -> None:
    found = {family: config for family, _, config in list_models(["q30bl4", "gpt_oss"])}
    assert (found["q30bl4"]["num_experts"], found["q30bl4"]["hidden_size"], found["q30bl4"]["vocab_size"]) == (
        128,
        2048,
        151936,
    )
    assert (found["gpt_oss"]["num_hidden_layers"], found["gpt_oss"]["vocab_size"]) == (8, 32000)


def test_samples_of_runs_add_up_figure_by_figure() -> None:
    first = {"decode": {"cloister": [20.0], "llama": [10.0], "others": [0.0]}}
    second = {
        "prefill512": {"cloister": [9.0], "llama": [3.0], "others": [0.1]},
        "decode": {"cloister": [30.0], "llama": [15.0], "others": [0.5]},
    }
    assert merge(first, second) == {
        "prefill512": second["prefill512"],
        "decode": {"cloister": [20.0, 30.0], "llama": [10.0, 15.0], "others": [0.0, 0.5]},
    }


def test_a_row_has_medians_ranges_their_ratio_and_the_worst_disturbance() -> None:
    samples = {"decode": {"cloister": [30.0, 20.0, 25.0], "llama": [10.0, 12.0], "others": [0.0, 0.5]}}
    assert list(describe(samples)) == [("decode", ["decode", 25.0, "20 to 30", 11.0, "10 to 12", 25 / 11, 0.5], 25 / 11)]


def test_an_engine_that_refuses_a_file_has_no_ratio() -> None:
    samples = {"decode": {"cloister": [30.0], "llama": [], "others": [0.0]}}
    assert list(describe(samples)) == [("decode", ["decode", 30.0, "30 to 30", "refused", "", "", 0.0], None)]


def test_layers_get_the_names_that_the_converter_reads(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"layer_types": ["linear_attention", "full_attention"], "vocab_size": 7}))
    rename_layers(file)
    assert json.loads(file.read_text()) == {"layer_types": ["mamba", "attention"], "vocab_size": 7}
