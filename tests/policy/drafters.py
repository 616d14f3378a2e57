"""Real engines with one drafter each, watched from inside: what it drafts for whom, and what it keeps."""

from __future__ import annotations

import gc
import shutil
import types
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from cloister.executor.drafters import DRAFTERS, Draft, Drafter, DraftRequest
from cloister.executor.drafters.heads import HeadsCard, heads_directory, write_heads
from cloister.executor.model_runner import ModelRunner
from cloister.models import load, locate
from cloister.train.learning import MAKERS
from cloister.types.events import Submit
from tests.attack_lab import MODEL, Lab
from tests.mtp_layers import add_layer

DRAFT_MODEL: Final = "cloister-draft"
SMALL: Final = ("draft_model", "spec_infer", "long_spec")
NUM_HEADS: Final = 3
RUN: Final = 3
"""So many tokens of a secret in a row are no accident."""


def make_home(folder: Path) -> Path:
    """Copies the embedded model, and puts heads beside it that guess at random."""
    home = folder / MODEL
    shutil.copytree(locate(MODEL), home)
    add_layer(home)
    model = load(home)
    hidden, random = model.spec.hidden_size, np.random.default_rng(0)
    for kind, make in MAKERS.items():
        untrained = make(NUM_HEADS, hidden, 1, torch.Generator().manual_seed(0)).tensors()
        tensors = {name: random.standard_normal(value.shape, np.float32) * 0.2 for name, value in untrained.items()}
        card = HeadsCard(
            kind=kind,
            hidden_size=hidden,
            vocab_size=model.spec.vocab_size,
            num_heads=NUM_HEADS,
            fingerprint=model.info.fingerprint,
            parents=[-1, 0, 1] if kind == "medusa" else [],
            accuracy=[[0.5, 0.2]] * NUM_HEADS,
        )
        write_heads(heads_directory(home, kind), card, tensors)
    return home


class Watched:
    """An engine whose drafter is watched.

    Args:
        home: of the model.
        name: of the drafter.
    """

    def __init__(self, home: Path, name: str) -> None:
        small = {"draft_model": DRAFT_MODEL} if name in SMALL else {}
        self.lab = Lab("team", model=str(home), speculate=name, draft_tokens=4, kv_memory_mb=32, **small)
        runner = self.lab.core._runner
        assert isinstance(runner, ModelRunner)
        self.runner = runner
        self.drafts: list[tuple[list[int], Draft]] = []
        """What a sequence knew, and what was drafted for it."""
        (drafter,) = runner._drafting._drafters.values()
        self.put(drafter)

    def put(self, drafter: Drafter) -> None:
        """Has this drafter draft from now on."""
        drafters = self.runner._drafting._drafters
        self.drafter = drafters[next(iter(drafters))] = drafter
        self._draft = drafter.draft
        drafter.draft = self._watch  # type: ignore[method-assign]

    def _watch(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = self._draft(requests)
        self.drafts += [(request.state.tokens.tolist(), draft) for request, draft in zip(requests, drafts, strict=True)]
        return drafts

    def start(self, who: str, token_ids: Sequence[int], max_tokens: int, num_steps: int) -> None:
        """Sends a request, and does some steps of it."""
        self.lab.core.input_queue.put(Submit(self.lab.request(who, token_ids, max_tokens=max_tokens)))
        for _ in range(num_steps):
            self.lab.core.step()

    def drafts_for(self, token_ids: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Returns (tokens known, tokens drafted) of each draft for the request with this prompt."""
        start = list(token_ids)
        return [(len(known), draft.token_ids) for known, draft in self.drafts if known[: len(start)] == start]


def kept_by(drafter: Drafter) -> list[Any]:
    """Returns everything that a drafter holds in which tokens or numbers can stand, however deep."""
    found, seen = list[Any](), set[int]()
    left: list[Any] = [vars(drafter)]
    skipped = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinMethodType, str, int, float)
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, skipped) or not _is_own(one):
            continue
        seen.add(id(one))
        if isinstance(one, (np.ndarray, array, bytearray, list, dict, tuple, set)):
            found.append(one)
        left += gc.get_referents(one)
    return found


def _is_own(one: object) -> bool:
    """Whether a drafter keeps it, and not the engine, or a program that serves every sequence."""
    home = type(one).__module__
    return not home.startswith("cloister") or home.startswith("cloister.executor.drafters")


def tells(one: Any, secret: Sequence[int]) -> bool:
    """Whether `RUN` tokens of a secret stand in a row in something that a drafter holds."""
    wanted = set(_runs(secret))
    if isinstance(one, dict):
        return any(tells(row, secret) for row in (list(one.keys()), list(one.values()), *one.keys()) if _is_row(row))
    numbers = (
        one if isinstance(one, (list, tuple)) else sorted(one) if isinstance(one, set) else np.asarray(one).reshape(-1).tolist()
    )
    return any(run in wanted for run in _runs(numbers))


def _is_row(one: object) -> bool:
    return isinstance(one, (list, tuple))


def _runs(numbers: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    if all(isinstance(number, (int, float)) for number in numbers):
        yield from zip(*(numbers[start:] for start in range(RUN)), strict=False)


def all_names() -> tuple[str, ...]:
    """Every drafter of this build."""
    return DRAFTERS.names()
