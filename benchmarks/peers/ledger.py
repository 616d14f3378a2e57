"""What was measured: samples by shape, entrant and figure, kept in a file as they come in."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.meter import IDLE_CORES


@dataclass(frozen=True, slots=True)
class Run:
    """Samples that one worker took of one figure.

    Attributes:
        other_cores: that other processes kept busy meanwhile.
    """

    shape: str
    entrant: str
    figure: str
    round: int
    samples: Sequence[float]
    other_cores: float

    @property
    def disturbed(self) -> bool:
        return self.other_cores > IDLE_CORES


@dataclass(frozen=True, slots=True)
class Result:
    """Median and spread of one figure.

    Attributes:
        disturbed: other processes ran beside every run that counts.
    """

    median: float
    low: float
    high: float
    num_samples: int
    disturbed: bool

    def __str__(self) -> str:
        return f"{show(self.median)} ({show(self.low)}-{show(self.high)}){'*' if self.disturbed else ''}"


def show(value: float) -> str:
    """Returns three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


@dataclass(slots=True)
class Ledger:
    """All runs of a session.

    Attributes:
        notes: what entrants said of themselves, by shape and entrant.
        failures: why an entrant has no figures, by shape and entrant.
    """

    path: Path
    runs: list[Run] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Ledger:
        content = json.loads(path.read_text(encoding="utf-8"))
        return cls(path, [Run(**run) for run in content["runs"]], content["notes"], content["failures"])

    def add(self, run: Run) -> None:
        """Keeps a run, on disk too."""
        self.runs.append(run)
        self.save()

    def save(self) -> None:
        content = {"runs": [asdict(run) for run in self.runs], "notes": self.notes, "failures": self.failures}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(content), encoding="utf-8")

    def num_undisturbed(self, shape: str, entrant: str, figure: str) -> int:
        """Returns how many runs count."""
        wanted = (shape, entrant, figure)
        return sum((run.shape, run.entrant, run.figure) == wanted and not run.disturbed for run in self.runs)

    def result(self, shape: str, entrant: str, figure: str) -> Result | None:
        """Returns what undisturbed runs say, or all of them where there is no such run."""
        runs = [run for run in self.runs if (run.shape, run.entrant, run.figure) == (shape, entrant, figure)]
        quiet = [run for run in runs if not run.disturbed]
        samples = [sample for run in quiet or runs for sample in run.samples]
        if not samples:
            return None
        return Result(statistics.median(samples), min(samples), max(samples), len(samples), not quiet)
