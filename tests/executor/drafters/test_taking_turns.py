"""Drafters from text that take turns in the steps of one engine: answers are those without drafts, and drafts are accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from cloister.engine import EngineCore
from cloister.executor.drafters import DRAFTERS
from cloister.launch import build_engine, resolve_settings
from cloister.models import locate
from cloister.scheduler.sequence import SequenceRecord
from cloister.scheduler.speculation import DraftDecision
from cloister.scheduler.step_cost import StepCost, StepSize
from cloister.text import Tokenizer
from cloister.types.request import Request, SamplingParams
from cloister.types.step import Sample
from tests.equality import Report, ask, differing
from tests.executor.drafters.answering import context_for

MODEL = "cloister-5m"
NAMES = ("ngram", "lookahead", "recycling", "rest")
PROMPTS = (
    "<|user|>Repeat after me: red lamp 42 Ann table red lamp 42 Bob table<|end|><|assistant|>",
    "<|user|>What is the Python module json?<|end|><|assistant|>",
    "The write-ahead log is a file. The write-ahead log is",
    "SELECT a, b FROM t; SELECT a, c FROM t; SELECT a,",
)
WISHES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.95, "n": 2},
    {"temperature": 0.8, "repetition_penalty": 1.1, "logprobs": 2},
)


class Turns:
    """Another drafter in every step, and another number of drafts (protocol `Speculation`)."""

    def __init__(self, names: Sequence[str], most: int) -> None:
        self._limits = {name: DRAFTERS.get(name)(context_for(locate(MODEL))) for name in names}
        self._names, self._most, self._num_steps = names, most, 0

    def choose(self, sequences: Sequence[SequenceRecord], cost: StepCost, size: StepSize, num_left: int) -> list[DraftDecision]:
        self._num_steps += 1
        choices = []
        for number, sequence in enumerate(sequences):
            name = self._names[(self._num_steps + number) % len(self._names)]
            shape = self._limits[name].shape
            count = min(1 + 5 * self._num_steps % self._most, sequence.max_drafts, num_left)
            num_left -= count
            choices.append(
                DraftDecision(name, count, None if shape is None else shape[:count], is_watched=self._num_steps % 5 > 0)
            )
        return [choice if choice.num_drafts > 0 else DraftDecision() for choice in choices]

    def learn(self, sequence: SequenceRecord, choice: DraftDecision, sample: Sample) -> None: ...

    def learn_cost(self, num_drafted: Mapping[str, tuple[int, int]], draft_s: Mapping[str, float]) -> None: ...

    def learn_step(self, size: StepSize, num_drafted: int, elapsed_s: float) -> None: ...


def open_engine(speculate: str, **settings: Any) -> EngineCore:
    flags = {"model": MODEL, "num_threads": 1, "block_size": 8, "max_model_len": 160, "speculate": speculate, **settings}
    return build_engine(resolve_settings(flags, listens=False).engine.config)


def make_requests(num_rounds: int = 1) -> list[Request]:
    tokenizer = Tokenizer(locate(MODEL))
    wishes = [wish for wish in WISHES for _ in PROMPTS] * num_rounds
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS] * len(WISHES) * num_rounds
    return [
        Request(
            request_id=f"r{number}",
            token_ids=prompt,
            sampling=SamplingParams(max_tokens=40, seed=number, ignore_eos=True, **wish),
        )
        for number, (prompt, wish) in enumerate(zip(prompts, wishes, strict=True))
    ]


@pytest.fixture(scope="module")
def plain() -> Report:
    return ask(open_engine("none", kv_memory_mb=64), make_requests())


def test_any_turn_of_drafters_leaves_answers_as_they_are(plain: Report) -> None:
    core = open_engine(",".join(NAMES), kv_memory_mb=64)
    core._scheduler._draft_allocator._speculation = Turns(NAMES, 24)
    found = ask(core, make_requests())
    assert differing(found, plain) == []
    assert found.num_accepted > 100
    assert found.num_steps < plain.num_steps


def test_preempted_sequences_draft_as_if_nothing_had_been(plain: Report) -> None:
    core = open_engine(",".join(NAMES), kv_memory_mb=0.8, prefix_cache=False)
    core._scheduler._draft_allocator._speculation = Turns(NAMES, 8)
    found = ask(core, make_requests())
    assert found.num_preempted > 0
    assert differing(found, plain) == []


@pytest.mark.parametrize("name", NAMES)
def test_each_of_them_saves_steps(name: str, plain: Report) -> None:
    core = open_engine(name, kv_memory_mb=64)
    core._scheduler._draft_allocator._speculation = Turns([name], 16)
    found = ask(core, make_requests())
    assert differing(found, plain) == []
    assert found.num_accepted > 30
