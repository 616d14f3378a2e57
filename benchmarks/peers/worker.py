"""One engine in a process of its own: `PYTHON -m benchmarks.peers.worker JOB`, where JOB is JSON (`GenerationJob`).

Reports go to the file descriptor that the job names, one JSON object a line; what the engine prints goes where it likes.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from benchmarks.peers.engines import ENGINES, Launch
from benchmarks.peers.limits import Limits
from benchmarks.peers.llama import LlamaPrograms
from benchmarks.peers.meter import IDLE_CORES, PeakMemory, Usage, await_idle
from benchmarks.peers.server import HttpServer
from benchmarks.peers.work import FIGURES, LIMITS, Engine, Figure, Tokens, measure, warm_up


@dataclass(frozen=True, slots=True)
class Job:
    """What one worker does.

    Attributes:
        figures: names out of `FIGURES` or `LIMITS`, in order.
        num_samples: of each figure.
        seed: of the prompts.
        max_attempts: at a figure while others disturb it.
        patience_s: how long to wait for an idle machine before each attempt.
        report_fd: where reports go.
    """

    launch: Launch
    figures: Sequence[str]
    num_samples: int
    seed: int
    max_attempts: int
    patience_s: float
    report_fd: int

    @classmethod
    def read(cls, text: str) -> Job:
        content = json.loads(text)
        return cls(**{**content, "launch": Launch(**content["launch"])})


class Subject(Protocol):
    """Whatever figures can be taken of."""

    notes: dict[str, Any]

    def warm_up(self) -> None: ...
    def measure(self, figure: Figure, num_samples: int) -> list[float]: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class InProcess:
    """An engine of this process as a subject."""

    engine: Engine
    tokens: Tokens
    notes: dict[str, Any] = field(default_factory=dict)

    def warm_up(self) -> None:
        warm_up(self.engine, self.tokens)

    def measure(self, figure: Figure, num_samples: int) -> list[float]:
        return measure(figure, self.engine, self.tokens, num_samples)

    def close(self) -> None:
        self.engine.close()


def open_subject(launch: Launch, tokens: Tokens) -> Subject:
    """Loads the model into the engine that the launch names."""
    if launch.engine == "llama":
        return LlamaPrograms(launch)
    if launch.engine == "limits":
        return Limits(launch)
    if launch.engine == "cloister-http":
        return HttpServer(launch, tokens)
    engine = ENGINES[launch.engine](launch)
    return InProcess(engine, tokens, getattr(engine, "notes", {}))


def main() -> None:
    job = Job.read(sys.argv[1])
    os.set_inheritable(job.report_fd, False)
    with os.fdopen(job.report_fd, "w", buffering=1) as reports:
        try:
            for report in run(job):
                print(json.dumps(report), file=reports, flush=True)
        except Exception as error:
            traceback.print_exc()
            print(json.dumps({"kind": "failed", "why": f"{type(error).__name__}: {error}"[:500]}), file=reports, flush=True)
            raise SystemExit(1) from None


def run(job: Job) -> Iterator[dict[str, Any]]:
    """Yields reports: ready, each figure, at last done."""
    tokens = Tokens(job.launch.vocab_size, job.seed)
    if list(job.figures) == ["first_token"]:
        yield from _first_token(job, tokens)
        return
    session = os.getsid(0)
    with PeakMemory(session) as memory:
        subject = open_subject(job.launch, tokens)
        try:
            subject.warm_up()
            yield {"kind": "ready"}
            for name in job.figures:
                if name != "memory":
                    yield measure_undisturbed(subject, (FIGURES | LIMITS)[name], job, session)
            if "memory" in job.figures:
                yield {"kind": "figure", "name": "memory", "samples": [memory.peak_bytes / 2**30], "other_cores": 0.0}
            yield {"kind": "done", "notes": dict(subject.notes)}
        finally:
            subject.close()


def measure_undisturbed(subject: Subject, figure: Figure, job: Job, session: int) -> dict[str, Any]:
    """Measures until nobody else was at work, a few times at most; returns the report of the least disturbed attempt."""
    best: dict[str, Any] = {}
    for _ in range(job.max_attempts):
        await_idle(session, job.patience_s)
        before = Usage.read(session)
        samples = subject.measure(figure, job.num_samples)
        others = Usage.read(session).other_cores_since(before)
        if not best or others < best["other_cores"]:
            best = {"kind": "figure", "name": figure.name, "samples": samples, "other_cores": round(others, 3)}
        if others <= IDLE_CORES:
            break
    return best


def _first_token(job: Job, tokens: Tokens) -> Iterator[dict[str, Any]]:
    """Loads, makes one token, and says when, on the clock that all processes of a machine share."""
    engine = ENGINES[job.launch.engine](job.launch)
    engine.generate([tokens.draw(FIGURES["first_token"].size)], 1)
    at_s = time.monotonic()
    yield {"kind": "first_token", "at_s": at_s, "usage": asdict(Usage.read(os.getsid(0)))}
    engine.close()


if __name__ == "__main__":
    main()
