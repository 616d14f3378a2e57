"""llama.cpp and its fork ik_llama.cpp through their own measuring programs, llama-bench and llama-batched-bench."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

from benchmarks.peers.engines import KV_TOKENS, Launch
from benchmarks.peers.work import LONG, NUM_NEW, SHORT, Figure

_TIMEOUT_S = 900.0


class LlamaPrograms:
    """Runs one program for each figure; each loads the model anew and warms up by itself.

    llama-batched-bench takes prompts of one length only, so requests at once have the mean of the mixed lengths.
    """

    def __init__(self, launch: Launch) -> None:
        self._model = launch.model
        self._bin = launch.settings["bin"]
        self._threads = str(launch.num_threads)
        self._is_fork = bool(launch.settings.get("is_fork"))
        self.notes: dict[str, Any] = {}

    def warm_up(self) -> None:
        """Reads the file once, so that later loads find it in memory."""
        self._run("llama-bench", "-p", "64", "-n", "0", "-r", "1", "-o", "json")

    def measure(self, figure: Figure, num_samples: int) -> list[float]:
        take: dict[str, Callable[[Figure, int], list[float]]] = {
            "prefill": self._prefill,
            "decode": self._decode,
            "together": self._together,
        }
        return take[figure.kind](figure, num_samples)

    def close(self) -> None:
        """Every program has ended."""

    def _prefill(self, figure: Figure, num_samples: int) -> list[float]:
        return self._bench("-p", str(figure.size), "-n", "0", "-r", str(num_samples))

    def _decode(self, figure: Figure, num_samples: int) -> list[float]:
        if self._is_fork:
            return self._bench("-p", "0", "-n", "0", "-gp", f"{figure.size},{NUM_NEW}", "-r", str(num_samples))
        return self._bench("-p", "0", "-n", str(NUM_NEW), "-d", str(figure.size), "-r", str(num_samples))

    def _bench(self, *flags: str) -> list[float]:
        repack = ("-rtr", "1") if self._is_fork else ()  # what it is fast with
        (result,) = json.loads(self._run("llama-bench", *repack, *flags, "-o", "json").stdout)
        return [float(sample) for sample in result["samples_ts"]]

    def _together(self, figure: Figure, num_samples: int) -> list[float]:
        mean = (SHORT + LONG) // 2
        flags = ("-c", str(KV_TOKENS), "-b", "2048", "-ub", "512", "-tb", self._threads)
        shape = ("-npp", str(mean), "-ntg", str(NUM_NEW), "-npl", str(figure.size))
        form = ("-rtr",) if self._is_fork else ("--output-format", "jsonl")
        samples = []
        for _ in range(num_samples):
            done = self._run("llama-batched-bench", *flags, *shape, *form)
            duration_s = _read_row(done.stderr) if self._is_fork else _read_json(done.stdout)
            samples.append(figure.size * NUM_NEW / duration_s)
        return samples

    def _run(self, program: str, *flags: str) -> subprocess.CompletedProcess[str]:
        command = [f"{self._bin}/{program}", "-m", self._model, "-t", self._threads, *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{program} ended with status {done.returncode}: {done.stderr[-400:]}")
        return done


def _read_json(printed: str) -> float:
    """Returns the seconds of a batch, prompts and answers."""
    result = next(json.loads(line) for line in printed.splitlines() if line.startswith("{"))
    return float(result["t_pp"] + result["t_tg"])


def _read_row(printed: str) -> float:
    """As `_read_json`, from the table that the fork prints."""
    table = [
        [cell.strip() for cell in line.strip().strip("|").split("|")] for line in printed.splitlines() if line.startswith("|")
    ]
    return float(table[-1][table[0].index("T s")])
