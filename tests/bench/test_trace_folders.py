"""A benchmark that reads traces says at once that they are not there, not after it has measured for minutes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from benchmarks.harness import AZURE, make_parser


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("orca", []), ("policies", []), ("prefix", []), ("cluster_traces", []), ("kv_tiers", ["--trace", "mooncake"])],
)
def test_a_folder_without_the_traces_is_refused_before_anything_is_measured(
    name: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [name, "--traces", str(tmp_path), *arguments])
    monkeypatch.setattr(benchmark, "Bench", None)  # whatever begins a run fails
    with pytest.raises(SystemExit) as caught:
        benchmark.main()
    assert caught.value.code == 2
    assert f"no trace file at {tmp_path}" in capsys.readouterr().err


def test_the_default_folder_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.harness.ROOT", tmp_path / "checkout")
    with pytest.raises(SystemExit):
        make_parser("about", traces=(AZURE,)).parse_args([])
    (tmp_path / "shared" / "traces").mkdir(parents=True)
    (tmp_path / "shared" / "traces" / AZURE).touch()
    assert make_parser("about", traces=(AZURE,)).parse_args([]).traces == tmp_path / "shared" / "traces"
