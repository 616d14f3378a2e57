"""Tests and measures the GPU path: `python -m benchmarks.gpu`, in under nine minutes, on a machine with a CUDA device.

Stages run one after another, each in a process of its own with a limit; what one leaves of its time, the others may use. Every
figure is written to gpu.jsonl when it is measured, and gpu.md and gpu.json whenever there are new ones, so that a run that is
cut short keeps what it had. Limits of the device are measured on it (a copy for bytes, its library for operations), not taken
from a data sheet.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from benchmarks.gpu.page import write_page
from benchmarks.gpu.records import Records, read_records

ROOT: Final = Path(__file__).parents[2]
SHAPES: Final = ("q05", "l1b", "l8bl8")
_TICK_S: Final = 0.5
_GRACE_S: Final = 5.0
_CUT_SHORT: Final = "cut short"


@dataclass(frozen=True, slots=True)
class Stage:
    """One process of the run.

    Attributes:
        module: what Python runs, with `arguments`.
        limit_s: it is ended after this time.
        takes_interpreter: it must be told where there is no device.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    limit_s: float
    takes_interpreter: bool = True


def list_stages(models: Path) -> Sequence[Stage]:
    """Returns the stages, the most telling first."""
    answers = {
        shape: Stage(f"answers-{shape}", "benchmarks.gpu.answers", (shape, "--models", str(models)), 100.0) for shape in SHAPES
    }
    return (
        Stage("limits", "benchmarks.gpu.work", ("limits",), 60.0),
        Stage("tests", "benchmarks.gpu.testing", (), 150.0, takes_interpreter=False),
        answers["q05"],
        Stage("kernels", "benchmarks.gpu.work", ("kernels",), 100.0),
        Stage("hybrids", "benchmarks.gpu.work", ("hybrids",), 60.0),
        Stage("answers-q05-peers", "benchmarks.gpu.answers", ("q05", "--models", str(models), "--peers"), 90.0),
        answers["l1b"],
        answers["l8bl8"],
    )


class Run:
    """A run of stages against a deadline.

    Args:
        output: folder of gpu.md, gpu.json and gpu.jsonl.
        deadline_s: of `time.monotonic`.
        again: stages whose earlier figures go; those of others stay.
    """

    def __init__(self, output: Path, deadline_s: float, *, is_real: bool, again: Sequence[str]) -> None:
        self.path = output / "gpu.jsonl"
        self._output, self._deadline_s, self._is_real = output, deadline_s, is_real
        self._num_written = 0
        kept = [
            record for record in read_records(self.path) if record["stage"] not in again and record.get("name") not in again
        ]
        self.path.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")

    def do(self, stage: Stage) -> None:
        """Runs a stage until it ends, or ends it at its limit or at the deadline."""
        left_s = self._deadline_s - time.monotonic()
        started_s = time.monotonic()
        if left_s < 2 * _TICK_S:
            self._note(stage, "left out: no time", 0.0)
            return
        process = self._start(stage)
        try:
            end_s = started_s + min(stage.limit_s, left_s)
            while process.poll() is None and time.monotonic() < end_s:
                time.sleep(_TICK_S)
                self.write()
        finally:
            self._note(stage, end_group(process), time.monotonic() - started_s)

    def write(self) -> None:
        """Writes page and JSON again if anything is new."""
        records = read_records(self.path)
        if len(records) == self._num_written:
            return
        self._num_written = len(records)
        (self._output / "gpu.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
        (self._output / "gpu.md").write_text(write_page(records, is_real=self._is_real), encoding="utf-8")

    def _start(self, stage: Stage) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", stage.module, *stage.arguments, "--records", str(self.path)]
        if not self._is_real and stage.takes_interpreter:
            command.append("--interpreter")
        return subprocess.Popen(command, cwd=ROOT, start_new_session=True)

    def _note(self, stage: Stage, ended: str, seconds: float) -> None:
        Records(self.path, "run").add("stage", name=stage.name, ended=ended, seconds=seconds)
        self.write()


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when the page was written, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks", help="folder of gpu.md, gpu.json and gpu.jsonl")
    parser.add_argument("--minutes", type=float, default=8.5, help="what all of it may take")
    parser.add_argument("--stages", help="only these, commas between")
    parser.add_argument(
        "--interpreter", action="store_true", help="small problems in Triton's interpreter: tries the run where there is no GPU"
    )
    options = parser.parse_args(arguments)
    missing = find_missing(wants_interpreter=options.interpreter)
    if missing is not None:
        print(f"nothing was measured: {missing}", file=sys.stderr)
        return 2
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            run_stages(_choose(list_stages(Path(folder)), options.stages), Path(folder), options)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(f"written: {options.output / 'gpu.md'}")
    return 0


def run_stages(stages: Sequence[Stage], folder: Path, options: argparse.Namespace) -> None:
    """Runs stages one after another, with checkpoints being written in `folder` if any of them answers."""
    options.output.mkdir(parents=True, exist_ok=True)
    deadline_s = time.monotonic() + 60 * options.minutes
    run = Run(options.output, deadline_s, is_real=not options.interpreter, again=[stage.name for stage in stages])
    writer = _start_writer(folder, options.interpreter) if any("answers" in stage.name for stage in stages) else None
    try:
        for stage in stages:
            run.do(stage)
    finally:
        if writer is not None:
            end_group(writer)


def find_missing(*, wants_interpreter: bool = False) -> str | None:
    """Returns what a measurement lacks here, or None."""
    if find_spec("torch") is None or find_spec("triton") is None:
        return "torch and triton are needed (pip install 'cloister[gpu]')"
    import torch

    if wants_interpreter:
        return "there is a CUDA device; leave --interpreter out" if torch.cuda.is_available() else None
    return None if torch.cuda.is_available() else "torch finds no CUDA device (--interpreter tries the run without one)"


def _choose(stages: Sequence[Stage], names: str | None) -> Sequence[Stage]:
    if names is None:
        return stages
    known = {stage.name: stage for stage in stages}
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        raise SystemExit(f"there is no stage {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in names.split(",")]


def _start_writer(folder: Path, is_interpreter: bool) -> subprocess.Popen[bytes]:
    """Writes checkpoints on the host while the first stages keep the device busy."""
    command = [sys.executable, "-m", "benchmarks.gpu.models", str(folder), *SHAPES]
    return subprocess.Popen([*command, "--tiny"] if is_interpreter else command, cwd=ROOT, start_new_session=True)


def end_group(process: subprocess.Popen[bytes]) -> str:
    """Ends a process and all that it started, gently first, and says how it ended.

    Args:
        process: the first of its session.
    """
    ended = _CUT_SHORT
    if process.poll() is None:
        _signal_group(process.pid, signal.SIGTERM)
        _await(process)
    else:
        ended = "whole" if process.returncode == 0 else f"failed with status {process.returncode}"
    _signal_group(process.pid, signal.SIGKILL)
    _await(process)
    return ended


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _await(process: subprocess.Popen[bytes]) -> None:
    """Waits a little; one that a driver holds does not hear SIGKILL either."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)


if __name__ == "__main__":
    sys.exit(main())
