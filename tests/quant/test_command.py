"""`cloister quantize` on a small model: what it writes, what it reports, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloister.cli import main
from cloister.models import load
from tests.model_factory import make_model

TEXT = "the cat sat on the mat and the dog ran to the hat. " * 200


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", "llama", intermediate_size=128)


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(("name", "rows"), [("int4", ["bfloat16"]), ("qoq", ["bfloat16", "int4"])])
def test_a_model_is_written_and_what_it_costs_is_said(
    name: str, rows: list[str], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    out = tmp_path / "out"
    options = ("--format", name, "--text", tmp_path / "text.txt", "--tokens", 1024, "--measure", 1024, "--json")
    assert run("quantize", model, out, *options) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["format"], report["method"]) == (name, "gptq")
    assert report["size_bytes"] == (out / "model.safetensors").stat().st_size < report["size_before_bytes"] / 2
    assert [row["kv"] for row in report["after"]] == rows
    assert report["measured_tokens"] == 1024
    for row in report["after"]:
        assert row["perplexity"] == pytest.approx(report["perplexity_before"] + row["difference"], abs=1e-3)
        assert 0.2 < row["greedy_agreement"] < 1
    assert load(out).weights.form("layers.0.q.weight") is not None


def test_people_get_a_table(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("quantize", model, tmp_path / "out", "--format", "int8", "--method", "rtn", "--measure", 1024) == 0
    shown = capsys.readouterr().out
    assert "perplexity" in shown
    assert "after, KV in bfloat16" in shown


def test_nothing_is_measured_when_nobody_asks(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("quantize", model, tmp_path / "out", "--method", "rtn", "--measure", 0, "--json") == 0
    assert "perplexity_before" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "int3"], "unknown number format 'int3'; choose one of: int8, int4, nvfp4, qoq"),
        (["--method", "magic"], "unknown calibration method 'magic'; choose one of: "),
        (["--group-size", "48"], "32, 64, 128"),
        (["--activations", "int3"], "int8 or bfloat16"),
        (["--text", "nothing.txt"], "cannot read nothing.txt: No such file"),
    ],
)
def test_a_choice_that_does_not_exist_is_named(
    options: list[str], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("quantize", model, tmp_path / "out", *options) == 1
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_a_directory_with_something_in_it_is_left_alone(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("quantize", model, model) == 1
    assert "exists already" in capsys.readouterr().err


def test_a_text_too_short_for_a_window_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text("one two three")
    assert run("quantize", model, tmp_path / "out", "--text", tmp_path / "short.txt") == 1
    assert "give one of at least 512" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("options", "method"),
    [([], "cloister"), (["--no-rotate"], "compressed-tensors"), (["--method", "awq"], "compressed-tensors")],
)
def test_only_a_rotated_model_needs_this_reader(options: list[str], method: str, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("quantize", model, out, "--format", "int8", "--tokens", 512, "--measure", 0, *options) == 0
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == method
    form = load(out).weights.form("layers.0.q.weight")
    assert form is not None
    assert (form.rotation > 0) == (method == "cloister")
