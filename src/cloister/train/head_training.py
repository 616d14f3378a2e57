"""`cloister train medusa` and `cloister train blockwise`: trains draft heads from passages."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from cloister.executor.drafters.heads import CARD, TENSORS, HeadsCard, heads_directory, write_heads
from cloister.train.hidden_states import Teacher
from cloister.train.learning import MAKERS, Lesson, learn
from cloister.train.measuring import NUM_RANKS, Accuracy, accuracy_by_rank, count_kept, grow_tree, measure_ranks, summarise
from cloister.train.passages import check_size
from cloister.train.session import Material, Reporter, check_place, open_session

MOST_NODES: Final = 64
"""Number of nodes in the tree stored with the heads; the scheduler uses as many of the first ones as increase speed."""
SHOWN_BUDGETS: Final = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """Shape and training of heads.

    Attributes:
        width: residual blocks of each Medusa head; rows of the inner layer that blockwise heads share (0: twice the
            hidden size).
        out: directory to write to; None takes `drafters/KIND` in the model's.
        replaces: overwrite an earlier result.
    """

    kind: str
    num_heads: int
    width: int
    steps: int
    rows: int
    rate: float
    out: Path | None = None
    replaces: bool = False


@dataclass(frozen=True, slots=True)
class HeadReport:
    """The result of training.

    Attributes:
        kept: drafts in a step -> average number of accepted ones, at held-out positions.
        trained_on: number of training tokens, and how many of them the model generated.
    """

    directory: str
    num_bytes: int
    accuracy: list[Accuracy]
    kept: dict[int, float]
    num_tokens: int
    num_own_tokens: int
    elapsed_s: float


def train_heads(material: Material, settings: HeadSettings, reporter: Reporter) -> HeadReport:
    """Trains heads for a model and writes them, with a tree chosen from their accuracy at held-out positions.

    Raises:
        ConfigError: the text cannot be used or is too short, or the result cannot be written.
        ModelError: the model cannot be used.
    """
    started = time.perf_counter()
    with open_session(material, reporter) as session:
        torch.set_num_threads(session.config.num_threads or 1)
        model = session.model
        directory = settings.out or heads_directory(model.path, settings.kind)
        check_place(directory, CARD, replaces=settings.replaces)
        passages = session.read_passages()
        check_size(passages)
        places = session.read_places(passages)
        teacher = Teacher(model)
        choices = session.choose(teacher, places, passages)
        generator = torch.Generator().manual_seed(material.seed)
        width = settings.width or 2 * model.spec.hidden_size
        heads = MAKERS[settings.kind](settings.num_heads, model.spec.hidden_size, width, generator)
        lesson = Lesson(settings.steps, settings.rows, settings.rate, material.seed)
        what = repr((session.name(passages), settings.kind, settings.num_heads, width, lesson))
        checkpoint = session.work / f"{settings.kind}-{hashlib.sha256(what.encode()).hexdigest()[:16]}.pt"
        task = reporter.begin("Learning", settings.steps)

        def show(steps: int, loss: float) -> None:
            task.advance(steps)
            task.say(f"loss {loss:.3f}")

        learn(heads, settings.num_heads, teacher, places, choices, lesson, checkpoint, show)
        ranks, is_own = measure_ranks(
            heads, settings.num_heads, teacher, places, choices, reporter.begin("Measuring", 0).advance
        )
    drafted_for = ranks[is_own] if is_own.any() else ranks
    accuracy = accuracy_by_rank(drafted_for, NUM_RANKS)
    is_tree = settings.kind == "medusa"
    parents = (
        grow_tree(drafted_for, min(NUM_RANKS, model.spec.vocab_size), MOST_NODES).parents
        if is_tree
        else list(range(-1, settings.num_heads - 1))
    )
    num_learned = places.having(1, held_out=False)
    card = HeadsCard(
        kind=settings.kind,
        hidden_size=model.spec.hidden_size,
        vocab_size=model.spec.vocab_size,
        num_heads=settings.num_heads,
        fingerprint=model.info.fingerprint,
        parents=parents if is_tree else [],
        accuracy=[[round(share, 5) for share in head] for head in accuracy],
        trained={
            "steps": settings.steps,
            "rows": settings.rows,
            "rate": settings.rate,
            "seed": material.seed,
            "tokens": len(num_learned),
            "own_tokens": int(places.is_own[num_learned].sum()),
        },
    )
    write_heads(directory, card, heads.tensors())
    return HeadReport(
        directory=str(directory),
        num_bytes=sum((directory / name).stat().st_size for name in (CARD, TENSORS)),
        accuracy=summarise(ranks, is_own),
        kept={size: round(count_kept(drafted_for, parents[:size]), 3) for size in SHOWN_BUDGETS if size <= len(parents)},
        num_tokens=len(num_learned),
        num_own_tokens=int(places.is_own[num_learned].sum()),
        elapsed_s=round(time.perf_counter() - started, 1),
    )
