"""Notes to learn from, and what is asked about them: invented names, numbers and words, in several wordings (`notes.toml`).

None of their kinds, names and sentences is in `benchmarks/prompt_modules.py`, which measures what was learned.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any


@dataclass(frozen=True)
class Lesson:
    """A prompt of notes, and how its answer goes on behind the question."""

    prefix: str
    notes: Sequence[str]
    question: str
    answer: str


@dataclass(frozen=True)
class Kind:
    """One sort of notes.

    Attributes:
        prefixes: what precedes the notes.
        names: what they are about.
        values: what is asked about them; empty for numbers.
        wordings: sentences that say it, with {name} and {value}.
        heads: beginnings of notes, with {name}.
        fillers: other sentences of a note.
        questions: (question, how its answer begins), with {name}.
    """

    prefixes: Sequence[str]
    names: Sequence[str]
    values: Sequence[str]
    wordings: Sequence[str]
    heads: Sequence[str]
    fillers: Sequence[str]
    questions: Sequence[tuple[str, str]]


_FILE: dict[str, Any] = tomllib.loads((Path(__file__).parent / "notes.toml").read_text(encoding="utf-8"))
KINDS = [Kind(**kind) for kind in _FILE["kinds"]]


def draw_lesson(rng: Random, num_notes: int) -> Lesson:
    """Returns notes of one kind, each with a value that no other has, and a question about one of them."""
    kind = rng.choice(KINDS)
    names = rng.sample(kind.names, num_notes)
    numbers = [str(number) for number in rng.sample(range(1000, 10_000), num_notes)]
    values = rng.sample(kind.values, num_notes) if kind.values else numbers
    head, wording = rng.choice(kind.heads), rng.choice(kind.wordings)
    notes = []
    for name, value in zip(names, values, strict=True):
        sentences = [rng.choice(kind.fillers) for _ in range(rng.randrange(5))]
        sentences.insert(rng.randrange(len(sentences) + 1), wording.format(name=name, value=value))
        notes.append(head.format(name=name) + " ".join(sentences) + "\n")
    asked = rng.randrange(num_notes)
    question, start = (text.format(name=names[asked]) for text in rng.choice(kind.questions))
    return Lesson(rng.choice(kind.prefixes), notes, f"\nQuestion: {question}\nAnswer: {start}", f" {values[asked]}.")
