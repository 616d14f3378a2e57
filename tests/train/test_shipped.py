"""The heads beside the embedded model: small, for that very model, right often enough, and without effect on answers."""

from __future__ import annotations

import pytest

from cloister.api import LLM
from cloister.executor.drafters.heads import CARD, TENSORS, heads_directory, read_card
from cloister.models import load, locate
from cloister.types.events import Drafting, Event, Stepped
from cloister.types.request import SamplingParams

KINDS = ("medusa", "blockwise")
QUESTIONS = (
    "What is the Python module json?",
    "Describe the built-in function len.",
    "Can you explain what LBYL in Python is?",
    "What does the PostgreSQL command VACUUM do?",
    "What does PRAGMA foreign_keys do?",
    "What can you tell me about the SQLite function sqrt?",
    "Explain the Python exception FileNotFoundError.",
    "What is the title of the SQLite page wal.html?",
)


@pytest.mark.parametrize("kind", KINDS)
def test_they_were_trained_for_the_model_beside_them(kind: str) -> None:
    model = load(locate("cloister-5m"))
    card = read_card(heads_directory(model.path, kind))
    assert card.fingerprint == model.info.fingerprint
    assert (card.hidden_size, card.vocab_size) == (model.spec.hidden_size, model.spec.vocab_size)
    assert [head[0] for head in card.accuracy] == sorted((head[0] for head in card.accuracy), reverse=True)


def test_together_they_are_small() -> None:
    root = locate("cloister-5m")
    assert sum((heads_directory(root, kind) / name).stat().st_size for kind in KINDS for name in (CARD, TENSORS)) < 2_500_000


def answer(speculate: str) -> tuple[list[list[int]], list[Drafting]]:
    """Returns greedy answers to all questions, and what drafting did in every step."""
    done: list[Drafting] = []

    def listen(event: Event) -> None:
        if isinstance(event, Stepped):
            done.extend(event.drafting)

    drafts = {} if speculate == "none" else {"draft_tokens": 4}
    with LLM("cloister-5m", speculate=speculate, num_threads=1, **drafts) as llm:
        llm.subscribe(listen)
        prompts = [llm.render([{"role": "user", "content": question}]) for question in QUESTIONS]
        completions = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=40))
    return [completion.outputs[0].token_ids for completion in completions], done


def test_answers_are_the_same_and_come_in_fewer_steps() -> None:
    plain, none = answer("none")
    assert none == []
    for kind in KINDS:
        drafted, done = answer(kind)
        assert drafted == plain
        assert {one.drafter for one in done} == {kind}
        num_accepted, num_drafts = sum(sum(one.accepted) for one in done), sum(one.num_drafts for one in done)
        assert num_accepted / num_drafts > 0.4  # tokens a step for each sequence, beside the model's own
