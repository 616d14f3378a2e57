"""The comparison with transformers: the same directory, loaded by both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from tests.driving import Driver, build_from

PROMPT = np.random.default_rng(1).integers(0, 320, 250).tolist()
"""Of the small vocabulary of `tests.model_factory`; its answer passes position 256, from where keys lie in two ranges."""


@dataclass(frozen=True)
class Agreement:
    """How a model directory does against transformers.

    Attributes:
        difference: greatest difference of any logit of prompt and answer.
        largest: greatest size of any logit.
        num_tokens, num_equal: greedy tokens, and how many of them transformers chooses too after the same beginning; a
            different choice counts as equal where its two best logits are less than 1e-4 apart.
    """

    difference: float
    num_tokens: int
    num_equal: int
    largest: float = 0.0


def reference_logits(path: Path, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """Logits of transformers in float32, [num_tokens, vocab]."""
    files = tuple(sorted((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in path.iterdir()))
    return _compute_logits(path, files, tuple(tokens)).copy()


@lru_cache(maxsize=4)
def _compute_logits(path: Path, files: tuple[tuple[str, int, int], ...], tokens: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """`reference_logits` of a directory with these files: what is compared on every set of kernels is computed once."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits: npt.NDArray[np.float32] = model(torch.tensor([tokens])).logits[0].numpy()
    return logits


def greedy(driver: Driver, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], npt.NDArray[np.float32]]:
    """Returns prompt and answer, and the logits of all but the last token."""
    tokens, logits = list(prompt), [driver.run("greedy", prompt)]
    for _ in range(num_tokens):
        tokens.append(int(logits[-1][-1].argmax()))
        if len(tokens) < len(prompt) + num_tokens:
            logits.append(driver.step({"greedy": tokens[-1:]})["greedy"])
    return tokens, np.concatenate(logits)


def compare(path: Path, prompt: Sequence[int] = PROMPT, num_tokens: int = 10, **settings: Any) -> Agreement:
    """Compares prompt and greedy answer with transformers, which reads our answer: equal choices at every place are equal
    answers by induction. `settings` are those of `build`."""
    tokens, ours = greedy(build_from(path, **settings), prompt, num_tokens)
    theirs = reference_logits(path, tokens[:-1])
    answer = theirs[len(prompt) - 1 :]
    best = np.sort(answer, axis=1)[:, -2:]
    close = best[:, 1] - best[:, 0] < 1e-4
    equal = (answer.argmax(1) == np.array(tokens[len(prompt) :])) | close
    return Agreement(float(np.abs(ours - theirs).max()), num_tokens, int(equal.sum()), float(np.abs(theirs).max()))
