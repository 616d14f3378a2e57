"""Medusa's and blockwise heads: what they draft, of whom they keep what, and which files they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cloister.executor.drafters import DRAFTERS, NOTHING, Draft, Drafter, DrafterContext, DraftRequest, VerifyFeedback
from cloister.executor.drafters.base import FloatArray
from cloister.executor.drafters.head_runner import NumpyHeadRunner
from cloister.executor.drafters.heads import CARD, TENSORS, HeadsCard, heads_directory, write_heads
from cloister.executor.state import SequenceState
from cloister.types.errors import CloisterError, ConfigError, ModelError
from tests.executor.drafters.answering import Sequences, context_for, parents_of

HIDDEN, VOCAB, HEADS = 8, 300, 3
SHAPE = [-1, 0, -1, 1, 0, 2]
KINDS = ("medusa", "blockwise")
HEAD = np.random.default_rng(5).normal(size=(HIDDEN, VOCAB)).astype(np.float32)


def project(hidden: FloatArray) -> FloatArray:
    """The model's own head."""
    return hidden @ HEAD


def make_tensors(kind: str, seed: int = 0, scale: float = 0.7) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> Any:
        return (rng.normal(size=shape) * scale).astype(ml_dtypes.bfloat16)

    if kind == "medusa":
        return {
            f"blocks.{block}.{name}": draw(HEADS, *shape)
            for block in range(2)
            for name, shape in (("up.weight", (10, HIDDEN)), ("up.bias", (10,)), ("down.weight", (HIDDEN, 10)))
        }
    return {
        "up.weight": draw(12, HIDDEN),
        "up.bias": draw(12),
        "down.weight": draw(HEADS, HIDDEN, 12),
        "down.bias": draw(HEADS, HIDDEN),
    }


def make_card(kind: str, **fields: Any) -> HeadsCard:
    given: dict[str, Any] = {
        "kind": kind, "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_heads": HEADS, "fingerprint": "ab" * 32,
        "parents": SHAPE if kind == "medusa" else [],
    }  # fmt: skip
    return HeadsCard(**{**given, **fields})


def make_context(path: Path, **fields: Any) -> DrafterContext:
    return replace(
        context_for(path), **{"head_runner": lambda heads: NumpyHeadRunner(heads, project), "fingerprint": "ab" * 32, **fields}
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for kind in KINDS:
        write_heads(heads_directory(tmp_path, kind), make_card(kind), make_tensors(kind))
    return tmp_path


@pytest.fixture
def make(model: Path) -> Callable[[str], Drafter]:
    return lambda kind: DRAFTERS.get(kind)(make_context(model))


def show(drafter: Drafter, state: SequenceState, hidden: FloatArray) -> None:
    """A step chose the last token of a sequence from that hidden state."""
    drafter.observe([VerifyFeedback(state, len(state.tokens) - 1, NOTHING, (), np.zeros(1, np.int32), hidden[None])])


def hidden_states(count: int) -> FloatArray:
    return np.random.default_rng(9).normal(size=(count, HIDDEN)).astype(np.float32)


def expect(kind: str, hidden: FloatArray) -> FloatArray:
    """Returns the logits [num_heads, vocab] of each head, computed by the formulas alone."""
    tensors = {name: tensor.astype(np.float64) for name, tensor in make_tensors(kind).items()}
    states = []
    for head in range(HEADS):
        state = hidden.astype(np.float64)
        if kind == "medusa":
            for block in range(2):
                up, bias, down = (tensors[f"blocks.{block}.{name}"][head] for name in ("up.weight", "up.bias", "down.weight"))
                inner = up @ state + bias
                state = state + down @ (inner / (1 + np.exp(-inner)))
        else:
            inner = np.maximum(tensors["up.weight"] @ state + tensors["up.bias"], 0)
            state = state + tensors["down.weight"][head] @ inner + tensors["down.bias"][head]
        states.append(state)
    return project(np.array(states, np.float32))


def test_a_tree_has_each_heads_best_guesses_in_order_of_rank(make: Callable[[str], Drafter]) -> None:
    drafter, state, (hidden,) = make("medusa"), Sequences().arrive([5, 6]), hidden_states(1)
    show(drafter, state, hidden)
    ranked = (-expect("medusa", hidden)).argsort(1)
    (draft,) = drafter.draft([DraftRequest(state, 6)])
    assert draft.parents == SHAPE
    depth_and_rank = [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (1, 0)]
    assert draft.token_ids == [ranked[depth, rank] for depth, rank in depth_and_rank]
    assert drafter.shape == tuple(SHAPE)


def test_a_chain_has_each_heads_best_guess(make: Callable[[str], Drafter]) -> None:
    drafter, state, (hidden,) = make("blockwise"), Sequences().arrive([5, 6]), hidden_states(1)
    show(drafter, state, hidden)
    assert drafter.draft([DraftRequest(state, 9)]) == [Draft(expect("blockwise", hidden).argmax(1).tolist())]
    assert drafter.draft([DraftRequest(state, 2)])[0].token_ids == expect("blockwise", hidden).argmax(1).tolist()[:2]


@pytest.mark.parametrize("parents", [(-1,), (-1, 0), (-1, -1, -1), (-1, 0, 1), (-1, 0, 1, 2, 3)])
def test_any_other_tree_is_filled_as_deep_as_there_are_heads(make: Callable[[str], Drafter], parents: tuple[int, ...]) -> None:
    drafter, state, (hidden,) = make("medusa"), Sequences().arrive([5, 6]), hidden_states(1)
    show(drafter, state, hidden)
    (draft,) = drafter.draft([DraftRequest(state, len(parents), parents)])
    assert tuple(parents_of(draft)) == parents[: len(draft.token_ids)]
    assert len(draft.token_ids) == min(len(parents), HEADS)
    assert draft.token_ids[0] == expect("medusa", hidden)[0].argmax()


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_drafts_the_same_alone_and_among_others(make: Callable[[str], Drafter], kind: str) -> None:
    drafter, sequences, hidden = make(kind), Sequences(), hidden_states(9)
    states = [sequences.arrive([5, 6 + number], number) for number in range(9)]
    for state, row in zip(states, hidden, strict=True):
        show(drafter, state, row)
    requests = [DraftRequest(state, 1 + number % 5) for number, state in enumerate(states)]
    together = drafter.draft(requests)
    assert together == [drafter.draft([request])[0] for request in requests]
    assert len({tuple(draft.token_ids) for draft in together}) > 5


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_state_of_the_last_token_is_drafted_from(make: Callable[[str], Drafter], kind: str) -> None:
    drafter, sequences, hidden = make(kind), Sequences(), hidden_states(2)
    state, other = sequences.arrive([5, 6]), sequences.arrive([5, 6], 1)
    assert drafter.draft([DraftRequest(state, 3)]) == [NOTHING]
    show(drafter, state, hidden[0])
    first = drafter.draft([DraftRequest(state, 3)])
    state.append(7)  # by a step that nobody showed
    assert drafter.draft([DraftRequest(state, 3), DraftRequest(other, 3)]) == [NOTHING, NOTHING]
    path_row = np.stack([hidden[1], hidden[0], hidden[1]])
    drafter.observe([VerifyFeedback(state, 1, Draft([7, 8]), (0,), np.zeros(3, np.int32), path_row)])
    assert drafter.draft([DraftRequest(state, 3)]) == first


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_of_a_sequence_is_overwritten_when_it_leaves(make: Callable[[str], Drafter], kind: str) -> None:
    drafter, sequences = make(kind), Sequences()
    state, child = sequences.arrive([5, 6]), sequences.arrive([5, 6], 1)
    show(drafter, state, hidden_states(1)[0])
    drafter.fork(0, 1)
    row = drafter._last._kept[0][1]  # type: ignore[attr-defined]
    assert row.any()
    drafts = drafter.draft([DraftRequest(state, 3), DraftRequest(child, 3)])
    assert drafts[0] == drafts[1] != NOTHING
    drafter.forget(0)
    drafter.forget(0)
    assert not row.any()
    assert drafter.draft([DraftRequest(state, 3), DraftRequest(child, 3)]) == [NOTHING, drafts[1]]


def test_a_chain_ends_where_the_answer_would(model: Path) -> None:
    sequences, (hidden,) = Sequences(), hidden_states(1)
    chain = expect("blockwise", hidden).argmax(1).tolist()
    drafter = DRAFTERS.get("blockwise")(make_context(model, eos_token_ids=(chain[1],)))
    state = sequences.arrive([5, 6])
    show(drafter, state, hidden)
    assert drafter.draft([DraftRequest(state, 3)])[0].token_ids == chain[:2]


def refusal(kind: str, context: DrafterContext) -> CloisterError:
    with pytest.raises(CloisterError) as caught:
        DRAFTERS.get(kind)(context)
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_another_model_are_refused(model: Path, kind: str) -> None:
    for fields, words in (
        ({"hidden_size": 16}, "hidden size"),
        ({"vocab_size": 299}, "299"),
        ({"fingerprint": "cd" * 32}, "another model"),
        ({"head_runner": None}, "lends no head"),
    ):
        error = refusal(kind, make_context(model, **fields))
        assert isinstance(error, ConfigError)
        assert words in error.message
    named = str(heads_directory(model, kind))
    assert DRAFTERS.get(kind)(make_context(model, fingerprint="cd" * 32, files=named)).max_drafts  # who names them knows
    assert "hidden size" in refusal(kind, make_context(model, hidden_size=16, files=named)).message


@pytest.mark.parametrize("kind", KINDS)
def test_without_heads_the_error_says_how_to_train_them(tmp_path: Path, kind: str) -> None:
    assert f"cloister train {kind}" in refusal(kind, make_context(tmp_path)).message


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_heads_are_refused(model: Path, kind: str) -> None:
    directory = heads_directory(model, kind)
    card, tensors = make_card(kind), make_tensors(kind)
    cases: Sequence[tuple[HeadsCard, dict[str, Any]]] = [
        (make_card(kind, version=2), tensors),
        (make_card(kind, num_heads=4), tensors),
        (card, {name: tensor for name, tensor in tensors.items() if "down.weight" not in name}),
        (card, {}),
    ]
    if kind == "medusa":
        cases = [*cases, *((make_card(kind, parents=tree), tensors) for tree in ([], [0], [-1, 5], [-1, 0, 1, 2]))]
    for wrong_card, wrong_tensors in cases:
        write_heads(directory, wrong_card, wrong_tensors)
        assert isinstance(refusal(kind, make_context(model)), ModelError)
    write_heads(directory, card, tensors)
    DRAFTERS.get(kind)(make_context(model))
    whole = (directory / TENSORS).read_bytes()
    (directory / TENSORS).write_bytes(whole[:-10])
    assert "cut short" in refusal(kind, make_context(model)).message
    (directory / CARD).write_text("{}")
    assert "damaged" in refusal(kind, make_context(model)).message


def test_heads_of_one_kind_are_not_taken_for_the_other(model: Path) -> None:
    files = str(heads_directory(model, "medusa"))
    assert "medusa heads" in refusal("blockwise", make_context(model, files=files)).message


def test_a_gguf_files_heads_lie_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert heads_directory(file, "medusa") == tmp_path / "drafters" / "medusa"


def test_heads_that_cannot_be_written_say_why(tmp_path: Path) -> None:
    (tmp_path / "drafters").touch()
    with pytest.raises(ModelError, match="cannot be written"):
        write_heads(heads_directory(tmp_path, "medusa"), make_card("medusa"), make_tensors("medusa"))
