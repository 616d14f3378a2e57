"""Perplexity of a fixed text under a public model, and how far log-probabilities lie from the truth.

The truth is `transformers` in float32 on the weights that the published file's codes stand for (`benchmarks.models`).
The text is README.md of commit 2a57bca, then docs/security.md of the same. Every 500 tokens of it a window begins, a sequence
of its own: the BOS token first if the model wants one (Gemma does, SmolLM2 does not), then the text as far as 500 positions
reach. There are four, so 1,996 tokens are judged.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from math import prod
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.harness import ROOT, make_progress
from benchmarks.models import dequantize, find_model
from cloister.models import LoadedModel, load
from cloister.text import Tokenizer

FloatArray: TypeAlias = npt.NDArray[np.float32]
IntArray: TypeAlias = npt.NDArray[np.int32]
COMMIT: Final = "2a57bca"
PAGES: Final = ("README.md", "docs/security.md")
NUM_WINDOWS, WINDOW = 4, 500
_CHUNK_ROWS: Final = 64  # of logits at once: a vocabulary is wide


@dataclass(frozen=True, slots=True)
class Row:
    """Something to measure.

    Attributes:
        open: returns bits per weight, and the logits [WINDOW, vocab] of one window after another.
    """

    label: str
    open: Callable[[], tuple[float, Iterator[FloatArray]]]


@dataclass(frozen=True, slots=True)
class Score:
    """What was made of the text, against the truth.

    Attributes:
        loss: perplexity over that of the truth, in %.
        error: standard error of the loss: tokens of the text are taken for independent.
        rms: of differences between log-probabilities of the tokens that came next.
        divergence: Kullback-Leibler, from the truth, mean over the tokens, in nats.
        agreement: how often the likeliest token is the same, in %.
    """

    perplexity: float
    loss: float
    error: float
    rms: float
    divergence: float
    agreement: float


@dataclass(frozen=True)
class Case:
    """One model: its file, the same in float32, the text in its tokens, and the truth.

    Attributes:
        windows: [NUM_WINDOWS, WINDOW].
    """

    name: str
    file: Path
    directory: Path
    windows: IntArray

    @classmethod
    def open(cls, name: str, folder: Path) -> Case:
        file = find_model(name, folder)
        return cls(name, file, dequantize(file, file.parent / "float32"), cut_windows(Tokenizer(file), read_text()))

    @cached_property
    def stored(self) -> LoadedModel:
        return load(self.file)

    @cached_property
    def model(self) -> LoadedModel:
        return load(self.directory)

    @cached_property
    def num_weights(self) -> int:
        return sum(prod(self.model.weights.shape(name)) for name in self.model.weights.names())

    @cached_property
    def truth(self) -> FloatArray:
        """Log-probabilities [NUM_WINDOWS, WINDOW - 1, vocab], kept in a file."""
        path = self.file.parent / f"truth-{hashlib.sha256(self.windows.tobytes()).hexdigest()[:12]}.npy"
        if not path.exists():
            self._write_truth(path)
        kept: FloatArray = np.load(path, mmap_mode="r")
        return kept

    def _write_truth(self, path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        with redirect_stderr(StringIO()):  # its progress bar would break ours
            model: Any = AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32)
        model.eval()
        found = path.with_suffix(".partial")
        shape = (NUM_WINDOWS, WINDOW - 1, self.model.spec.vocab_size)
        with found.open("wb") as file, make_progress() as progress, torch.inference_mode():
            np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
            for window in progress.track(self.windows, description=f"{self.name}: the truth"):
                logits = model(torch.from_numpy(window[None].astype(np.int64))).logits[0, :-1]
                log_softmax(logits.numpy()).tofile(file)
        found.replace(path)

    def score(self, logits: Iterator[FloatArray], advance: Callable[[], object]) -> Score:
        """Judges logits [WINDOW, vocab] of one window after another; calls `advance` after each."""
        own, true, divergences, num_same = [], [], [], 0
        for window, rows, truth in zip(self.windows, logits, self.truth, strict=True):
            targets = window[1:]
            for start in range(0, len(targets), _CHUNK_ROWS):
                part = slice(start, min(start + _CHUNK_ROWS, len(targets)))
                found, right = log_softmax(rows[part]), np.asarray(truth[part])
                places = np.arange(len(found)), targets[part]
                own.append(found[places])
                true.append(right[places])
                divergences.append((np.exp(right) * (right - found)).sum(1, dtype=np.float64))
                num_same += int((found.argmax(1) == right.argmax(1)).sum())
            advance()
        return summarise(np.concatenate(own), np.concatenate(true), np.concatenate(divergences), num_same)


def summarise(own: FloatArray, true: FloatArray, divergences: npt.NDArray[np.float64], num_same: int) -> Score:
    """Returns the score of log-probabilities [num_tokens] of what came next."""
    lost = true.astype(np.float64) - own
    ratio = float(np.exp(lost.mean()))
    return Score(
        perplexity=float(np.exp(-own.mean(dtype=np.float64))),
        loss=100 * (ratio - 1),
        error=100 * ratio * float(lost.std()) / len(lost) ** 0.5,
        rms=float(np.sqrt(np.square(lost).mean())),
        divergence=float(divergences.mean()),
        agreement=100 * num_same / len(lost),
    )


def log_softmax(rows: FloatArray) -> FloatArray:
    """Returns log-probabilities of logits [num_rows, vocab]; a sum over a wide vocabulary in float32 would be 1e-5 off."""
    shifted: FloatArray = rows - rows.max(1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return shifted


def read_text() -> str:
    """Returns the text, as it was at its commit."""
    pages = [subprocess.run(["git", "show", f"{COMMIT}:{page}"], cwd=ROOT, capture_output=True, check=True) for page in PAGES]
    return "".join(page.stdout.decode() for page in pages)


def cut_windows(tokenizer: Tokenizer, text: str) -> IntArray:
    """Returns the windows [NUM_WINDOWS, WINDOW] of a text: every 500 tokens one begins."""
    plain = tokenizer.encode(text)
    framed = tokenizer.encode(text, add_special_tokens=True)
    front = framed[: len(framed) - len(plain)]
    return np.array(
        [[*front, *plain[top : top + WINDOW - len(front)]] for top in range(0, NUM_WINDOWS * WINDOW, WINDOW)], np.int32
    )
