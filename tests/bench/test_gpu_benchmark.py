"""`python -m benchmarks.gpu`: where there is nothing to measure, where time runs out, and in Triton's interpreter."""

from __future__ import annotations

import configparser
import json
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.gpu import answers
from benchmarks.gpu.__main__ import Run, Stage, end_group, main
from benchmarks.gpu.models import FORMS, write_model
from benchmarks.gpu.pack import THERE, is_there, list_files, list_requirements, pytest_settings
from benchmarks.gpu.page import write_page
from benchmarks.gpu.records import Records, read_records
from benchmarks.peers import work
from cloister.backends.tensors import activations_of
from cloister.models import load
from tests.device import HAS_GPU, needs_triton

ROOT = Path(__file__).parents[2]
STALLED = "tests.bench.stalled_stage"


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU here, which the benchmark would measure")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output", str(tmp_path)]) == 2
    assert "nothing was measured" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_stage_that_hangs_is_ended_at_its_limit_and_its_figures_are_on_the_page(tmp_path: Path) -> None:
    run = Run(tmp_path, time.monotonic() + 300, is_real=True, again=[])
    run.do(Stage("stalled", STALLED, (), limit_s=5.0))  # it would stall for ten minutes
    page = (tmp_path / "gpu.md").read_text()
    assert "2,000 GB/s, 300.0 T/s in bfloat16" in page
    assert "| stalled | cut short |" in page
    assert [record["kind"] for record in json.loads((tmp_path / "gpu.json").read_text())] == ["peaks", "stage"]


def test_stages_after_the_deadline_are_left_out_and_named(tmp_path: Path) -> None:
    run = Run(tmp_path, time.monotonic(), is_real=True, again=[])
    run.do(Stage("late", STALLED, (), limit_s=5.0))
    assert "| late | left out: no time |" in (tmp_path / "gpu.md").read_text()


def test_figures_of_a_file_whose_last_line_was_cut_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    Records(path, "tests").add("test", name="one", outcome="passed", reason="")
    with path.open("a") as file:
        file.write('{"stage": "tests", "kind": "te')
    assert [record["name"] for record in read_records(path)] == ["one"]


@pytest.mark.parametrize("form", FORMS)
def test_checkpoints_of_every_format_are_read_as_that_format(form: str, tmp_path: Path) -> None:
    write_model("l8bl8", form, tmp_path / "model", tiny=True)  # type: ignore[arg-type]
    weights = load(tmp_path / "model").weights
    found = weights.form("layers.0.down.weight")
    named = None if found is None else (type(found).__name__, getattr(found, "bits", 4), activations_of(found))
    assert (
        named
        == {
            "bf16": None,
            "W4A16": ("GroupedTensor", 4, "bfloat16"),
            "W4A8": ("ProgressiveTensor", 4, "int8"),
            "W8A8": ("GroupedTensor", 8, "int8"),
        }[form]
    )


def test_the_pack_takes_every_run_time_dependency_but_what_is_there_or_only_draws_plots() -> None:
    names = [requirement.split(">")[0] for requirement in list_requirements()]
    assert {"msgspec", "starlette", "pytest", "transformers"} <= set(names)
    assert "matplotlib" not in names
    assert is_there(Path("torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64.whl"))
    assert is_there(Path("nvidia_cublas-1-py3-none-any.whl"))
    assert not is_there(Path("msgspec-0.22.0-cp312-cp312-manylinux2014_x86_64.whl"))
    assert set(THERE) & set(names) == {"numpy"}  # pip weighs it, the pack drops it


def test_the_pack_brings_the_tests_and_the_benchmark() -> None:
    paths = {path.relative_to(ROOT).as_posix() for path in list_files()}
    assert {"benchmarks/gpu/__main__.py", "tests/device.py", "tests/gpu/test_program.py", "LICENSE"} <= paths


def test_the_packs_settings_know_every_marker_of_the_repository() -> None:
    """Else strict markers end the collection there, as happened on the first GPU."""
    settings = configparser.ConfigParser()
    settings.read_string(pytest_settings())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    known = [line.split(":")[0] for line in settings["pytest"]["markers"].strip().splitlines()]
    assert known == [marker.split(":")[0] for marker in project["tool"]["pytest"]["ini_options"]["markers"]]
    assert {"gpu", "slow"} <= set(known)


class Compiling:
    """An engine that takes ten seconds for its first call and one for every other, by a clock that it moves."""

    def __init__(self) -> None:
        self.now_s, self.num_calls = 0.0, 0

    def generate(self, prompts: Sequence[Sequence[int]], num_new: int) -> None:
        self.now_s += 10.0 if self.num_calls == 0 else 1.0
        self.num_calls += 1

    def close(self) -> None:
        """Nothing is open."""


def test_what_is_compiled_when_a_shape_first_comes_is_in_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Compiling()
    monkeypatch.setattr(work.time, "perf_counter", lambda: engine.now_s)
    assert answers.measure(answers.FIGURES[0], engine, work.Tokens(100, 0)) == 2048.0


def test_other_engines_stand_in_the_table_of_ours_and_notes_above_all(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    Records(path, "run").add("note", text="measured twice")
    for stage, engine in (("answers-q05", "cloister"), ("answers-l1b", "cloister"), ("answers-q05-peers", "transformers")):
        Records(path, stage).add("answers", engine=engine, form="bf16", figure="16 at once", rate=100.0, limit=None)
    page = write_page(read_records(path), is_real=True)
    table = page.split("## Whole answers: q05")[1].split("## ")[0]
    assert "| cloister bf16 | 100 |" in table
    assert "| transformers bf16 | 100 |" in table
    assert page.count("## Whole answers") == 2
    assert "**Note.** measured twice" in page


def test_the_published_page_is_what_its_figures_give() -> None:
    folder = ROOT / "benchmarks"
    assert (folder / "gpu.md").read_text(encoding="utf-8") == write_page(read_records(folder / "gpu.jsonl"), is_real=True)


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(HAS_GPU, reason="the interpreter stands for a device only where there is none")
def test_the_stages_run_in_the_interpreter_and_say_that_they_measure_nothing(tmp_path: Path) -> None:
    assert main(["--interpreter", "--stages", "limits,hybrids", "--output", str(tmp_path)]) == 0
    page = (tmp_path / "gpu.md").read_text()
    assert "no figure here means anything" in page
    assert "| hybrids | whole |" in page
    assert "By multiprocessor, over the two in sequence" in page


@pytest.mark.slow  # that figures are kept when a stage is ended, a stalled one shows above
@needs_triton
@pytest.mark.skipif(HAS_GPU, reason="the interpreter stands for a device only where there is none")
def test_a_run_that_is_told_to_end_writes_what_it_had(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--interpreter", "--stages", "limits,kernels", "--output", str(tmp_path)]
    page, deadline_s = tmp_path / "gpu.md", time.monotonic() + 300
    with subprocess.Popen(command, cwd=ROOT) as run:
        try:
            while not (page.exists() and "| decode | " in page.read_text()) and time.monotonic() < deadline_s:
                time.sleep(0.1)
            run.send_signal(signal.SIGTERM)
            assert run.wait(300) == 128 + signal.SIGTERM
        finally:
            run.kill()
    assert "| kernels | cut short |" in page.read_text()


def test_ending_a_stage_ends_what_it_started() -> None:
    """The writer of checkpoints has a pool of processes, and an engine may have workers."""
    code = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert end_group(process) == "cut short"
    deadline_s = time.monotonic() + 300
    while (
        Path(f"/proc/{child}/cmdline").exists()
        and Path(f"/proc/{child}/cmdline").read_bytes()
        and time.monotonic() < deadline_s
    ):
        time.sleep(0.05)
    assert not Path(f"/proc/{child}/cmdline").exists() or not Path(f"/proc/{child}/cmdline").read_bytes()


def test_some_stages_again_keep_the_figures_of_the_others(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    for stage in ("limits", "tests"):
        Records(path, stage).add("figure")
        Records(path, "run").add("stage", name=stage, ended="whole", seconds=1.0)
    Run(tmp_path, time.monotonic(), is_real=True, again=["tests"])
    assert [(record["stage"], record.get("name")) for record in read_records(path)] == [("limits", None), ("run", "limits")]
