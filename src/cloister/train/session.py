"""Shared by all training: the served model, its inputs and outputs, and its hidden states."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import msgspec
import numpy as np

from cloister.api import LLM
from cloister.backends.base import IntArray
from cloister.launch import build_program, resolve_settings
from cloister.models import LoadedModel, load, locate
from cloister.text import Tokenizer
from cloister.train.hidden_states import HiddenStates, Teacher, read_places
from cloister.train.passages import Passage, answer, cut_beginnings, cut_passages, read_files, render_questions
from cloister.types.config import EngineConfig
from cloister.types.errors import ConfigError

_STEP_TOKENS: Final = 1024


class Task(Protocol):
    """One long-running task with progress output."""

    def advance(self, count: int) -> object:
        """Adds to the progress."""
        ...

    def say(self, note: str) -> object:
        """Shows a message."""
        ...


class Reporter(Protocol):
    """Progress output for users."""

    def begin(self, what: str, total: int) -> Task:
        """Adds one task."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Training data.

    Attributes:
        model: as in `serve --model`.
        text: text files, or folders of them.
        questions: files with one question per line, which the model answers.
        num_tokens: maximum number of tokens of text.
        window: maximum number of tokens of a passage.
        num_answers: maximum number of questions, and of beginnings of passages, for the model.
        answer_tokens: maximum length of each answer.
        continues: the model also continues beginnings of the text.
        temperature: temperature of its answers; 0 is greedy.
        work: directory for hidden states, answers and checkpoints, from which an interrupted run resumes; None keeps nothing.
        num_threads: number of threads; None uses all CPUs.
    """

    model: str
    text: Sequence[Path]
    questions: Sequence[Path] = ()
    num_tokens: int = 500_000
    window: int = 512
    num_answers: int = 4000
    answer_tokens: int = 64
    continues: bool = False
    temperature: float = 0.0
    work: Path | None = None
    seed: int = 0
    num_threads: int | None = None


class TrainingSession:
    """A model to train for, with its training data.

    Attributes:
        model: the opened model, with its weights on disk.
        work: a directory for files of this session.
    """

    def __init__(self, material: Material, work: Path, reporter: Reporter) -> None:
        self.material, self.work, self.reporter = material, work, reporter
        self.config: EngineConfig = resolve_settings(
            {"model": material.model, "num_threads": material.num_threads}, listens=False
        ).engine.config
        self.model: LoadedModel = load(locate(material.model, progress=True))

    def read_passages(self) -> list[Passage]:
        """Returns passages of text, followed by the model's own answers.

        Raises:
            ConfigError: a file cannot be read, or all are empty.
            CloisterError: the model cannot answer.
        """
        material, tokenizer = self.material, Tokenizer(self.model.path)
        texts = read_files(material.text)
        task = self.reporter.begin("Reading", len(texts))

        def encode(text: str) -> list[int]:
            task.advance(1)
            return tokenizer.encode(text, parse_special=False)

        length = min(material.window, self.model.spec.max_positions)
        passages = cut_passages(texts, encode, length, material.num_tokens, material.seed)
        questions = [line for text in read_files(material.questions) for line in text.splitlines() if line.strip()]
        if material.questions and not questions:
            raise ConfigError("the files of questions have no line; give a question a line", param="questions")
        if questions or material.continues:
            passages += self._answer(questions[: material.num_answers], passages)
        return passages

    def _answer(self, questions: Sequence[str], passages: Sequence[Passage]) -> list[Passage]:
        """Returns the model's answers to questions and beginnings of passages, or those stored by an identical earlier run."""
        material = self.material
        beginnings = cut_beginnings(passages, material.num_answers, material.seed) if material.continues else []
        asked = repr((self.model.info.fingerprint, questions, beginnings, material.answer_tokens, material.temperature))
        file = self.work / f"answers-{hashlib.sha256(asked.encode()).hexdigest()[:16]}.json"
        if file.exists():
            kept = msgspec.json.decode(file.read_bytes(), type=list[tuple[int, list[int]]])
            return [Passage.own(start, ids) for start, ids in kept]
        task = self.reporter.begin("Answering", len(questions) + len(beginnings))
        with LLM(material.model, num_threads=material.num_threads) as llm:
            prompts = [*render_questions(llm, questions), *beginnings]
            found = answer(llm, prompts, material.answer_tokens, material.temperature, material.seed, task.advance)
        file.write_bytes(msgspec.json.encode([(passage.start, list(passage.token_ids)) for passage in found]))
        return found

    def name(self, passages: Sequence[Passage]) -> str:
        """Returns an identifier of these passages under this model: 16 hex digits."""
        digest = hashlib.sha256(self.model.info.fingerprint.encode())
        for passage in passages:
            digest.update(len(passage.token_ids).to_bytes(4, "little") + passage.token_ids.tobytes())
        return digest.hexdigest()[:16]

    def choose(self, teacher: Teacher, places: HiddenStates, passages: Sequence[Passage]) -> IntArray:
        """Returns the model's next token after each position, computed once (`Teacher.choose`)."""
        file = self.work / f"choices-{self.name(passages)}.npy"
        if file.exists():
            kept: IntArray = np.load(file)
            return kept
        choices = teacher.choose(places, self.reporter.begin("Choices", int(places.is_learned.sum())).advance)
        partial = file.with_suffix(".partial.npy")
        np.save(partial, choices)
        partial.replace(file)
        return choices

    def read_places(self, passages: Sequence[Passage]) -> HiddenStates:
        """Returns every position of passages with its hidden state. Raises as `train.hidden_states`."""
        block_size = self.config.block_size
        longest = max(len(passage.token_ids) for passage in passages)
        num_blocks = -(-max(_STEP_TOKENS, longest) // block_size)
        program = build_program(self.config, num_blocks)
        file = self.work / f"hidden-{self.name(passages)}.bin"
        task = self.reporter.begin("Hidden states", sum(len(passage.token_ids) for passage in passages))
        return read_places(program, passages, self.model.spec.hidden_size, block_size, num_blocks, file, task.advance)


def check_place(directory: Path, card: str, *, replaces: bool) -> None:
    """Checks before training that the result can be written to a directory.

    Args:
        card: the file that marks a directory with a training result.

    Raises:
        ConfigError: it cannot be written, or it has an earlier result that may not be replaced.
    """
    if (directory / card).exists() and not replaces:
        raise ConfigError(
            f"{directory} holds what was trained before; name another directory with --out, or write over it with --replace",
            param="out",
        )
    place = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not (place.is_dir() and os.access(place, os.W_OK)):
        why = "it cannot be written to" if place.is_dir() else f"{place} is a file"
        raise ConfigError(f"nothing can be written to {directory}: {why}; name another directory with --out", param="out")


@contextmanager
def open_session(material: Material, reporter: Reporter) -> Iterator[TrainingSession]:
    """Opens a model to train for; without a `work` directory, temporary files are deleted at the end.

    Raises:
        CloisterError: the model cannot be used; the message says why.
    """
    if material.work is not None:
        try:
            material.work.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{material.work} cannot be written to: {error.strerror}", param="work") from None
        yield TrainingSession(material, material.work, reporter)
        return
    with tempfile.TemporaryDirectory(prefix="cloister-train-") as folder:
        yield TrainingSession(material, Path(folder), reporter)
