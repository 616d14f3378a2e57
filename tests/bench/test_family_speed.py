"""The benchmark of families beside other engines: models, files that follow their config, samples that add up, and rows."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import family_speed
from benchmarks.family_speed import describe, list_models, merge, name_shape, rename_layers, write_models
from benchmarks.peers.engines import Launch
from benchmarks.peers.process import InWorker, WorkerError
from benchmarks.peers.work import FIGURES
from tests.model_factory import make_model, small_fields

CONVERTER = """
import json, pathlib, sys
def main():
    source, flags = pathlib.Path(sys.argv[1]), sys.argv[2:]
    config = json.loads((source / "config.json").read_text())
    pathlib.Path(flags[flags.index("--outfile") + 1]).write_text(str(config["num_hidden_layers"]))
"""
"""Stands for llama.cpp's converter, which tests have not: it writes the number of layers that it finds."""
EXPORTER = """#!/bin/sh
echo "ValueError: no such family" >&2; exit 1
"""
"""Stands for an optimum-cli that lacks a family."""


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """Options with converters that tests can run; checkpoints are written in this process, another would import all anew."""
    monkeypatch.setattr(family_speed, "run_apart", lambda work, *arguments: work(*arguments))
    llama, programs = tmp_path / "llama", tmp_path / "bin"
    (llama / "conversion").mkdir(parents=True)
    programs.mkdir()
    (llama / "convert_hf_to_gguf.py").write_text(CONVERTER)
    (llama / "conversion" / "base.py").write_text("class TextModel: pass")
    (programs / "optimum-cli").write_text(EXPORTER)
    (programs / "optimum-cli").chmod(0o755)
    return Namespace(llama=llama, openvino=programs / "python", files=tmp_path / "files")


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


def test_a_name_tells_how_much_narrower_and_shallower_a_shape_is_than_the_model() -> None:
    assert [name for _, name, _ in list_models(["olmo3", "nemotron_h"])] == [
        "OLMo 3 7B, quarter width, 8 layers",
        "Nemotron 3 Nano, half width, 32 experts, 8 layers",
    ]
    assert name_shape("Gemma 3 1B, 6 layers, beyond the window", {"num_hidden_layers": 12}) == "Gemma 3 1B, 12 layers"


def test_a_file_is_written_again_only_if_the_config_has_changed(options: Namespace) -> None:
    file = options.files / "llama.gguf"
    config: dict[str, Any] = {**small_fields("llama"), "num_hidden_layers": 1, "vocab_size": 512}
    assert write_models("llama", config, {"gguf": file}, options) == {}
    assert file.read_text() == "1"
    file.write_text("kept")
    write_models("llama", config, {"gguf": file}, options)
    assert file.read_text() == "kept"
    write_models("llama", {**config, "num_hidden_layers": 2}, {"gguf": file}, options)
    assert file.read_text() == "2"


def test_a_converter_that_lacks_a_family_is_quoted_and_leaves_the_others_file(options: Namespace) -> None:
    models = {"openvino": options.files / "llama-openvino", "gguf": options.files / "llama.gguf"}
    config = {**small_fields("llama"), "vocab_size": 512}
    failures = write_models("llama", config, models, options)
    assert failures == {"openvino": "no openvino file: optimum-cli ended with status 1: ValueError: no such family"}
    assert [model.exists() for model in models.values()] == [False, True]


def test_an_engine_of_another_interpreter_is_measured_in_a_worker(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", vocab_size=512)
    settings = {"speculate": "none", "max_model_len": 1024}
    launch = Launch("cloister", str(model), 1, 1 << 12, 512, settings, 1024, 2048)
    worker = InWorker(sys.executable, launch, 0, tmp_path / "log")
    assert min(worker.measure(FIGURES["prefill512"], 1)) > 0


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    worker = InWorker(sys.executable, Launch("vllm", str(tmp_path), 1, 1, 512), 0, tmp_path / "log")
    with pytest.raises(WorkerError, match="vllm"):
        worker.warm_up()


def test_samples_of_runs_add_up_figure_by_figure() -> None:
    first = {"decode": {"cloister": [20.0], "llama": [10.0], "others": [0.0]}}
    second = {
        "prefill512": {"cloister": [9.0], "llama": [3.0], "others": [0.1]},
        "decode": {"cloister": [30.0], "llama": [15.0], "openvino": [25.0], "others": [0.5]},
    }
    assert merge(first, second) == {
        "prefill512": second["prefill512"],
        "decode": {"cloister": [20.0, 30.0], "llama": [10.0, 15.0], "openvino": [25.0], "others": [0.0, 0.5]},
    }


def test_a_row_has_medians_ranges_ratios_to_each_engine_and_the_worst_disturbance() -> None:
    samples = {"decode": {"cloister": [30.0, 20.0, 25.0], "llama": [10.0, 12.0], "openvino": [50.0], "others": [0.0, 0.5]}}
    ours, llama, openvino = [25.0, "20 to 30"], [11.0, "10 to 12", 25 / 11], [50.0, "50 to 50", 0.5]
    ratios = {"llama": 25 / 11, "openvino": 0.5}
    assert list(describe(samples)) == [("decode", ["decode", *ours, *llama, *openvino, 0.5], ratios)]


def test_an_engine_that_refuses_a_model_has_no_ratio_and_one_not_asked_an_empty_cell() -> None:
    samples = {"decode": {"cloister": [30.0], "llama": [], "others": [0.0]}}
    row = ["decode", 30.0, "30 to 30", "refused", "", "", "", "", "", 0.0]
    assert list(describe(samples)) == [("decode", row, {})]


def test_layers_get_the_names_that_the_converter_reads(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"layer_types": ["linear_attention", "full_attention"], "vocab_size": 7}))
    rename_layers(file)
    assert json.loads(file.read_text()) == {"layer_types": ["mamba", "attention"], "vocab_size": 7}
