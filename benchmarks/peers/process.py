"""Starts workers, one at a time, and sees that nothing of them stays behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.engines import Launch
from benchmarks.peers.meter import NO_SESSION, Usage, list_session
from benchmarks.peers.work import Figure
from benchmarks.peers.worker import Job

ROOT: Final = Path(__file__).parents[2]
_STOP_TIMEOUT_S: Final = 20.0
_FIGURE_TIMEOUT_S: Final = 900.0
_LAST: Final = ("done", "failed", "first_token")


class WorkerError(Exception):
    """An engine could not be measured; the text says why."""


def run_worker(
    python: str,
    launch: Launch,
    figures: Sequence[str],
    *,
    num_samples: int,
    seed: int,
    max_attempts: int,
    patience_s: float,
    timeout_s: float,
    environment: Mapping[str, str],
    log: Path,
) -> Iterator[dict[str, Any]]:
    """Yields the reports of one worker.

    Args:
        timeout_s: longest wait for the next report.
        environment: added to that of this process.
        log: file that takes what the engine prints.

    Raises:
        WorkerError: it failed, died or did not report in time.
    """
    read_fd, write_fd = os.pipe()
    job = Job(launch, figures, num_samples, seed, max_attempts, patience_s, write_fd)
    command = [python, "-m", "benchmarks.peers.worker", json.dumps(asdict(job))]
    threads = str(launch.num_threads)
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1", **environment}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    before = Usage.read(NO_SESSION)
    start_s = time.monotonic()
    with (
        log.open("ab") as output,
        os.fdopen(read_fd, "rb", buffering=0) as reports,
        _started(command, variables, write_fd, output) as process,
    ):
        for report in _read_reports(process, reports.fileno(), timeout_s, log):
            if report["kind"] == "failed":
                raise WorkerError(report["why"])
            if report["kind"] == "first_token":
                others = Usage(**report["usage"]).other_cores_since(before)
                samples = [report["at_s"] - start_s]
                report = {"kind": "figure", "name": "first_token", "samples": samples, "other_cores": round(others, 3)}
            yield report


@dataclass(slots=True)
class InWorker:
    """An engine of another interpreter as a subject: a worker for each figure, which loads the model anew and warms up.

    Attributes:
        log: file that takes what the engine prints.
    """

    python: str
    launch: Launch
    seed: int
    log: Path
    notes: dict[str, Any] = field(default_factory=dict)

    def warm_up(self) -> None:
        """Loads the model once, so that later loads find it in memory.

        Raises:
            WorkerError: the engine does not serve it.
        """
        self._run([], 0)

    def measure(self, figure: Figure, num_samples: int) -> list[float]:
        """Returns samples.

        Raises:
            WorkerError: as of `run_worker`.
        """
        return [sample for report in self._run([figure.name], num_samples) for sample in report.get("samples", [])]

    def close(self) -> None:
        """Every worker has ended."""

    def _run(self, figures: Sequence[str], num_samples: int) -> list[dict[str, Any]]:
        return list(
            run_worker(
                self.python,
                self.launch,
                figures,
                num_samples=num_samples,
                seed=self.seed,
                max_attempts=1,
                patience_s=0.0,
                timeout_s=_FIGURE_TIMEOUT_S,
                environment={},
                log=self.log,
            )
        )


@contextmanager
def _started(
    command: Sequence[str], variables: Mapping[str, str], write_fd: int, output: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, which ends with everything that it started."""
    try:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(write_fd,),
            start_new_session=True,
        )
    finally:
        os.close(write_fd)
    patience_s = 0.0
    try:
        yield process
        patience_s = _STOP_TIMEOUT_S
    finally:
        end_session(process, patience_s)


def end_session(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """Waits for a worker to leave, then kills what is left of its session."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    for sign in (signal.SIGTERM, signal.SIGKILL):
        end_s = time.monotonic() + _STOP_TIMEOUT_S / 4
        for member in list_session(process.pid):
            with suppress(ProcessLookupError):
                os.kill(member.pid, sign)
        while list_session(process.pid) and time.monotonic() < end_s:
            process.poll()
            time.sleep(0.05)
    process.wait(_STOP_TIMEOUT_S)


def _read_reports(process: subprocess.Popen[bytes], fd: int, timeout_s: float, log: Path) -> Iterator[dict[str, Any]]:
    pending = b""
    end_s = time.monotonic() + timeout_s
    while True:
        has_ended = process.poll() is not None  # asked before the pipe is read, which has all that it wrote by then
        ready, _, _ = select.select([fd], [], [], 0.0 if has_ended else 1.0)
        piece = os.read(fd, 1 << 16) if ready else b""
        if not piece and has_ended:
            raise WorkerError(f"it ended with status {process.returncode} and no report; see {log}")
        if not piece and time.monotonic() > end_s:
            raise WorkerError(f"it did not report within {timeout_s:g} s; see {log}")
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            end_s = time.monotonic() + timeout_s
            report = json.loads(line)
            yield report
            if report["kind"] in _LAST:
                return
