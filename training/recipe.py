"""The stages in order. Each leaves its result in the work folder and is skipped, or resumed, when run again."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from tokenizers import Tokenizer
from torch import nn

from cloister.train.decoder import Decoder, Shape
from cloister.train.optimizer import Checkpoints
from training.averaging import average
from training.card import draft_card, model_card
from training.corpus import Document, MissingCorpusError, Source, read_documents
from training.distil import distil
from training.drafting import write_questions, write_text
from training.evaluate import evaluate
from training.export import export_model, load_exported
from training.facts import Knowledge, draw_knowledge
from training.lessons import Lessons
from training.notices import notices
from training.pretrain import pretrain
from training.scale import Scale
from training.tokenizer import encode_documents, load_tokenizer, train_tokenizer
from training.tune import tune

MODEL_NAME = "cloister-5m"
DRAFT_NAME = "cloister-draft"
M = TypeVar("M", bound=nn.Module)


def load_weights(model: M, checkpoint: Path) -> M:
    """Put the weights of a checkpoint into a model."""
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
    return model


class StageMissingError(RuntimeError):
    """A stage needs the result of an earlier one."""


@dataclass(frozen=True)
class Recipe:
    """One run: sources and figures, where it works, where the models go.

    With ``start``, a folder of exported models, it goes on from these: their tokenizer is kept, `retune` begins with the
    model's weights and `distil` with the draft's.
    """

    sources: tuple[Source, ...]
    scale: Scale
    work: Path
    out: Path
    seed: int = 0
    start: Path | None = None

    def run(self, stages: tuple[str, ...]) -> None:
        """Run the stages named, in the order of the recipe.

        Raises:
            StageMissingError: if an earlier stage has not been run.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        for name, stage in STAGES.items():
            if name in stages and not (self.start and name in BEFORE_START):
                Console().rule(name)
                stage(self)

    # The stages

    def read_corpus(self) -> None:
        """Sources to ``documents.jsonl``."""
        if not self._documents.exists():
            lines = [json.dumps(asdict(document), ensure_ascii=False) for document in read_documents(self.sources)]
            self._documents.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def make_tokens(self) -> None:
        """Documents to a tokenizer and to two rows of tokens, ``train.npy`` and ``held_out.npy``."""
        if all((self.work / name).exists() for name in ("tokenizer.json", "train.npy", "held_out.npy")):
            return
        documents = self._read_documents()
        training = [d for d in documents if not d.held_out]
        if len(training) in (0, len(documents)):
            raise MissingCorpusError(f"{len(documents)} documents are too few to hold one out: give more, or other names")
        if self.start is None:
            tokenizer = train_tokenizer((d.text for d in training), self.scale.model.vocab)
        else:
            tokenizer = load_tokenizer(self._need(self.start / MODEL_NAME / "tokenizer.json"))
        tokenizer.save(str(self.work / "tokenizer.json"))
        np.save(self.work / "train.npy", encode_documents(tokenizer, training))
        np.save(self.work / "held_out.npy", encode_documents(tokenizer, [d for d in documents if d.held_out]))

    def pretrain(self) -> None:
        """Tokens to ``pretrain.pt``."""
        model = self._new(self.scale.model)
        pretrain(model, self._row("train"), self.scale.pretrain, self.scale.pretrain_rate, self.seed, self._saves("pretrain"))

    def tune(self) -> None:
        """Facts and skills on top of ``pretrain.pt`` to ``tune.pt``."""
        model = load_weights(self._new(self.scale.model), self._need(self.work / "pretrain.pt"))
        tune(model, self._row("train"), self._first_lessons, self.scale.tune, self.seed, self._saves("tune"))

    def retune(self) -> None:
        """Freely worded questions on top of ``tune.pt``, or of an exported model, to ``retune.pt``."""
        model = self._before_retuning("tune")
        tune(
            model, self._row("train"), self._lessons, self.scale.retune, self.seed + 3, self._saves("retune"), name="retune"
        )  # fmt: skip

    def distil(self) -> None:
        """The retuned model to ``distil.pt``."""
        draft, distilling = self._new(self.scale.draft), self.scale.distil
        if self.start is not None:
            draft, distilling = self._started(DRAFT_NAME, self.scale.draft), self.scale.redistil
        distil(
            draft, self._retuned(), self._row("train"), self._lessons, distilling, self.seed, self._saves("distil")
        )  # fmt: skip

    def export(self) -> None:
        """Checkpoints to two Hugging Face directories and the notices beside them."""
        export_model(self._retuned(), self._tokenizer, self.out / MODEL_NAME)
        export_model(self._trained("distil", self.scale.draft), self._tokenizer, self.out / DRAFT_NAME)
        (self.out / "NOTICES.txt").write_text(notices(self.sources), encoding="utf-8")

    def ask(self) -> None:
        """Pages and questions to ``text/`` and ``questions.txt``, for ``cloister train`` to learn heads from."""
        write_text(self._read_documents(), self.work / "text")
        write_questions(self._lessons, self.scale.num_asked, self.seed, self.work / "questions.txt")

    def evaluate(self) -> None:
        """Measure, write ``report.json`` and the model cards."""
        model, draft = self._retuned(), self._trained("distil", self.scale.draft)
        before = self._before_retuning("pretrain")
        measured = evaluate(
            model, draft, self._lessons, self._row("held_out"), self.scale.num_questions, self.scale.draft_rows,
            before=("before retuning" if self.start else "before tuning", before),
        )  # fmt: skip
        report = {**measured.as_json(), "num_facts": len(self._knowledge.facts), "num_tokens": len(self._row("train"))}
        (self.work / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False), encoding="utf-8")
        self.write_cards(report)

    def write_cards(self, report: Mapping[str, Any]) -> None:
        """Model cards from a report."""
        model, draft = self._new(self.scale.model), self._new(self.scale.draft)
        cards = {
            MODEL_NAME: model_card(model.shape, _count(model), report["num_tokens"], self._command, self.sources, report),
            DRAFT_NAME: draft_card(draft.shape, _count(draft), self._command, self.sources, report),
        }
        for name, card in cards.items():
            (self.out / name).mkdir(parents=True, exist_ok=True)
            (self.out / name / "README.md").write_text(card, encoding="utf-8")

    # What the stages share

    @property
    def _command(self) -> str:
        started = " --start FOLDER" if self.start else ""
        return f"python -m training{started} --seed {self.seed}"

    @property
    def _documents(self) -> Path:
        return self.work / "documents.jsonl"

    def _read_documents(self) -> list[Document]:
        lines = self._need(self._documents).read_text(encoding="utf-8").rstrip("\n").split("\n")
        return [Document(**json.loads(line)) for line in lines]

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self._need(self.work / "tokenizer.json"))

    @cached_property
    def _knowledge(self) -> Knowledge:
        return draw_knowledge(self.sources)

    @cached_property
    def _first_lessons(self) -> Lessons:
        return Lessons(self._knowledge, self._tokenizer)

    @cached_property
    def _lessons(self) -> Lessons:
        return Lessons(self._knowledge, self._tokenizer, free=True)

    def _row(self, name: str) -> NDArray[np.uint16]:
        row: NDArray[np.uint16] = np.load(self._need(self.work / f"{name}.npy"))
        return row

    def _new(self, shape: Shape) -> Decoder:
        model = Decoder(shape, torch.Generator().manual_seed(self.seed))
        if self.scale.compiled:
            for layer in model.layers:
                layer.compile(dynamic=False)
        return model

    def _trained(self, stage: str, shape: Shape) -> Decoder:
        return load_weights(self._new(shape), self._need(self.work / f"{stage}.pt"))

    def _retuned(self) -> Decoder:
        """The retuned weights averaged with those that retuning began with."""
        return average(self._before_retuning("tune"), self._trained("retune", self.scale.model), self.scale.retuned_share)

    def _started(self, name: str, shape: Shape) -> Decoder:
        assert self.start is not None
        self._need(self.start / name / "model.safetensors")
        return load_exported(self._new(shape), self.start / name)

    def _before_retuning(self, stage: str) -> Decoder:
        """The model of an earlier stage, or the one that this run goes on from."""
        return self._trained(stage, self.scale.model) if self.start is None else self._started(MODEL_NAME, self.scale.model)

    def _saves(self, stage: str) -> Checkpoints:
        return Checkpoints(self.work / f"{stage}.pt", self.scale.checkpoint_every)

    def _need(self, path: Path) -> Path:
        if not path.exists():
            raise StageMissingError(f"{path} is missing: run the earlier stages first, or all of them without --stage")
        return path


def _count(model: Decoder) -> int:
    return sum(p.numel() for p in model.parameters())


STAGES: dict[str, Callable[[Recipe], None]] = {
    "corpus": Recipe.read_corpus,
    "tokenizer": Recipe.make_tokens,
    "pretrain": Recipe.pretrain,
    "tune": Recipe.tune,
    "retune": Recipe.retune,
    "distil": Recipe.distil,
    "export": Recipe.export,
    "ask": Recipe.ask,
    "evaluate": Recipe.evaluate,
}
BEFORE_START = ("pretrain", "tune")
"""Stages that a run from exported models does without."""
