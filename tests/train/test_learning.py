"""Heads learn: from the model's own hidden states, by the right gradient, and go on where they were stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cloister.backends.base import LOGITS, IntArray, Program
from cloister.executor.drafters import blockwise, medusa
from cloister.executor.drafters.head_runner import guess_hidden
from cloister.launch import build_program, resolve_settings
from cloister.models import LoadedModel, load, locate
from cloister.quant.passages import HELD_OUT, read_passages
from cloister.text import Tokenizer
from cloister.train.hidden_states import HiddenStates, Teacher, batch_passages, find_targets, read_places, read_rows
from cloister.train.learning import MAKERS, HeadsModule, Lesson, learn
from cloister.train.measuring import measure_ranks, summarise
from cloister.train.passages import Passage, cut_passages
from cloister.types.errors import ConfigError

HEADS, HIDDEN, BLOCKS = 3, 256, 64
LESSON = Lesson(steps=30, rows=64, rate=1e-2, seed=1)
QUIET: Callable[..., object] = lambda *_: None  # noqa: E731


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    torch.set_num_threads(1)
    return load(locate("cloister-5m"))


@pytest.fixture(scope="module")
def passages(model: LoadedModel) -> list[Passage]:
    tokenizer = Tokenizer(model.path)
    text = cut_passages([read_passages(HELD_OUT)], lambda text: tokenizer.encode(text, parse_special=False), 128, 6000, 0)
    return [*text, *(Passage.own(20, list(passage.token_ids)) for passage in text if len(passage.token_ids) > 30)]


@pytest.fixture(scope="module")
def program() -> Program:
    return build_program(resolve_settings({"model": "cloister-5m", "num_threads": 1}, listens=False).engine.config, BLOCKS)


@pytest.fixture(scope="module")
def places(program: Program, passages: list[Passage], tmp_path_factory: pytest.TempPathFactory) -> HiddenStates:
    return read_places(program, passages, HIDDEN, 16, BLOCKS, tmp_path_factory.mktemp("places") / "hidden.bin", QUIET)


@pytest.fixture(scope="module")
def teacher(model: LoadedModel) -> Teacher:
    return Teacher(model)


@pytest.fixture(scope="module")
def choices(teacher: Teacher, places: HiddenStates) -> IntArray:
    return teacher.choose(places, QUIET)


def make_heads(kind: str, width: int) -> HeadsModule:
    return MAKERS[kind](HEADS, HIDDEN, width, torch.Generator().manual_seed(0))


def test_hidden_states_are_the_programs_own(
    program: Program, passages: list[Passage], places: HiddenStates, tmp_path: Path
) -> None:
    one = passages[3]
    alone = read_places(program, [one], HIDDEN, 16, BLOCKS, tmp_path / "one.bin", QUIET)
    start = sum(len(passage.token_ids) for passage in passages[:3])
    assert np.array_equal(places.hidden[start : start + len(one.token_ids)], alone.hidden)
    assert places.token_ids[start : start + 5].tolist() == list(one.token_ids[:5])
    assert (places.ends[start : start + len(one.token_ids)] == start + len(one.token_ids)).all()


def test_a_file_that_was_cut_off_is_gone_on_with(program: Program, passages: list[Passage], tmp_path: Path) -> None:
    file, some = tmp_path / "hidden.bin", passages[:6]
    read_places(program, some, HIDDEN, 16, 16, file, QUIET)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    seen: list[int] = []
    read_places(program, some, HIDDEN, 16, 16, file, seen.append)
    assert file.read_bytes() == whole
    assert len(whole) // 5 < seen[0] * HIDDEN * 2 <= len(whole) // 2


def test_a_place_without_room_is_refused_before_any_work(
    program: Program, passages: list[Passage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = (64 << 20) + 1000

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    with pytest.raises(ConfigError, match="--tokens"):
        read_places(program, passages, HIDDEN, 16, BLOCKS, tmp_path / "hidden.bin", QUIET)


def test_the_teachers_choices_are_the_models(
    program: Program, passages: list[Passage], places: HiddenStates, choices: IntArray
) -> None:

    best = program.step(batch_passages(passages[:2], 16), LOGITS).logits.argmax(1)
    agreement = (best == choices[: len(best)]).mean()
    assert agreement > 0.98  # hidden states are kept as bfloat16
    assert (choices[~places.is_learned] == -1).all()


def test_targets_end_with_the_passage(places: HiddenStates, choices: IntArray) -> None:
    last = int(places.ends[0]) - 1
    targets = find_targets(places, choices, np.array([0, last - 1, last]), 2)
    assert targets.T.tolist() == [[choices[1], choices[2]], [choices[last], -1], [-1, -1]]


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_gradient_in_closed_form_is_torchs(softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(3)
    teacher = Teacher.__new__(Teacher)
    fields: dict[str, Any] = {
        "weight": torch.randn(50, 16, generator=generator), "_bias": torch.randn(50, generator=generator), "_scale": 0.7,
        "_softcap": softcap,
    }  # fmt: skip
    for name, value in fields.items():
        setattr(teacher, name, value)
    guesses = torch.randn(300, 16, generator=generator, requires_grad=True)
    targets = torch.randint(-10, 50, (300,), generator=generator)
    loss, gradient = teacher.teach(guesses.detach(), targets)
    wanted = torch.nn.functional.cross_entropy(teacher.logits(guesses), targets.clamp(min=-1), ignore_index=-1)
    torch.autograd.backward(wanted)
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    assert guesses.grad is not None
    torch.testing.assert_close(gradient, guesses.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("kind", "width"), [("medusa", 1), ("blockwise", 128)])
def test_heads_learn_what_comes_later(
    teacher: Teacher, places: HiddenStates, choices: IntArray, tmp_path: Path, kind: str, width: int
) -> None:
    heads = make_heads(kind, width)
    before = summarise(*measure_ranks(heads, HEADS, teacher, places, choices, QUIET))
    losses: list[float] = []
    learn(heads, HEADS, teacher, places, choices, LESSON, tmp_path / "state.pt", lambda _, loss: losses.append(loss))
    after = summarise(*measure_ranks(heads, HEADS, teacher, places, choices, QUIET))
    assert np.mean(losses[-5:]) < np.mean(losses[1:6]) - 1
    assert {one.source for one in after} == {"answers", "text"}
    for old, new in zip(before, after, strict=True):
        assert new.top5 > old.top5
        assert new.top1 <= new.top5


@pytest.mark.parametrize("kind", ["medusa", "blockwise"])
def test_what_was_trained_is_what_is_served(kind: str, places: HiddenStates) -> None:
    heads = make_heads(kind, 2)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())) * 0.05)
    tensors = {name: np.asarray(tensor, np.float32) for name, tensor in heads.tensors().items()}
    served = (medusa if kind == "medusa" else blockwise).read_heads(tensors, HEADS, HIDDEN)
    hidden = read_rows(places, np.arange(20)).float()
    with torch.no_grad():
        wanted = heads(hidden).numpy()
    assert np.abs(guess_hidden(served, hidden.numpy(), HEADS) - wanted).max() < 0.02 * np.abs(wanted).max()  # bfloat16


def test_training_that_was_stopped_ends_with_the_same_heads(
    teacher: Teacher, places: HiddenStates, choices: IntArray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloister.train.learning.CHECKPOINT_EVERY", 4)
    lesson = Lesson(steps=10, rows=16, rate=1e-2, seed=1)

    def stop(steps: int, loss: float) -> None:
        done.append(steps)
        if sum(done) == 7:
            raise KeyboardInterrupt

    whole, stopped, resumed = (make_heads("medusa", 1) for _ in range(3))
    learn(whole, HEADS, teacher, places, choices, lesson, tmp_path / "whole.pt", QUIET)
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        learn(stopped, HEADS, teacher, places, choices, lesson, tmp_path / "state.pt", stop)
    seen: list[int] = []
    learn(resumed, HEADS, teacher, places, choices, lesson, tmp_path / "state.pt", lambda steps, _: seen.append(steps))
    assert seen == [4, *[1] * 6]
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
