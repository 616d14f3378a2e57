"""Tests and measures the GPU path: `python -m benchmarks.gpu`, in under nine minutes, on a machine with a CUDA device.

Stages run one after another, each in a process of its own with a limit; what one leaves of its time, the others may use. Every
figure is written to gpu.jsonl when it is measured, and gpu.md and gpu.json whenever there are new ones, so that a run that is
cut short keeps what it had. Limits of the device are measured on it (a copy for bytes, its library for operations), not taken
from a data sheet.
"""

from __future__ import annotations

import argparse
import json
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

HERE: Final = Path(__file__).parents[1]
SHAPES: Final = ("q05", "l1b", "l8bl8")
_TICK_S: Final = 0.5
_GRACE_S: Final = 5.0


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
        answers["l1b"],
        answers["l8bl8"],
    )


class Run:
    """A run of stages against a deadline.

    Args:
        output: folder of gpu.md, gpu.json and gpu.jsonl.
        deadline_s: of `time.monotonic`.
    """

    def __init__(self, output: Path, deadline_s: float, *, is_real: bool) -> None:
        self.path = output / "gpu.jsonl"
        self._output, self._deadline_s, self._is_real = output, deadline_s, is_real
        self._num_written = 0
        self.path.unlink(missing_ok=True)

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
            ended = _end(process)
            self._note(stage, ended, time.monotonic() - started_s)

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
        return subprocess.Popen(command, cwd=HERE.parent)

    def _note(self, stage: Stage, ended: str, seconds: float) -> None:
        Records(self.path, "run").add("stage", name=stage.name, ended=ended, seconds=seconds)
        self.write()


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when the page was written, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE, help="folder of gpu.md, gpu.json and gpu.jsonl")
    parser.add_argument("--minutes", type=float, default=8.5, help="what all of it may take")
    parser.add_argument("--stages", help="only these, commas between")
    parser.add_argument(
        "--interpreter", action="store_true", help="small problems in Triton's interpreter: tries the run where there is no GPU"
    )
    options = parser.parse_args(arguments)
    missing = find_missing(needs_gpu=not options.interpreter)
    if missing is not None:
        print(f"nothing was measured: {missing}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    options.output.mkdir(parents=True, exist_ok=True)
    run = Run(options.output, time.monotonic() + 60 * options.minutes, is_real=not options.interpreter)
    with tempfile.TemporaryDirectory() as folder:
        stages = list_stages(Path(folder))
        chosen = _choose(stages, options.stages)
        writer = _start_writer(Path(folder), options.interpreter) if any("answers" in stage.name for stage in chosen) else None
        try:
            for stage in chosen:
                run.do(stage)
        finally:
            if writer is not None:
                _end(writer)
    print(f"written: {options.output / 'gpu.md'}")
    return 0


def find_missing(*, needs_gpu: bool = True) -> str | None:
    """Returns what a measurement lacks here, or None."""
    if find_spec("torch") is None or find_spec("triton") is None:
        return "torch and triton are needed (pip install 'cloister[gpu]')"
    import torch

    if needs_gpu and not torch.cuda.is_available():
        return "torch finds no CUDA device (--interpreter tries the run without one)"
    return None


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
    return subprocess.Popen([*command, "--tiny"] if is_interpreter else command, cwd=HERE.parent)


def _end(process: subprocess.Popen[bytes]) -> str:
    """Ends a process, gently first, and says how it ended."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return "cut short at its limit"
    return "whole" if process.returncode == 0 else f"failed with status {process.returncode}"


if __name__ == "__main__":
    sys.exit(main())
