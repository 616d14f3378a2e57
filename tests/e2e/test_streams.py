"""The engine in this process with a small Gemma 3n whose every tensor is random: windows of groups, KV that layers share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloister import LLM, SamplingParams
from cloister.api.completions import Completion
from cloister.types.events import Event, Preempted, Scheduled, Stepped
from tests.arrivals import hold_steps_until
from tests.gguf_converter import convert
from tests.thinning import thin

SETTINGS: dict[str, Any] = {"num_threads": 1, "block_size": 8, "max_model_len": 256, "dtype": "float32"}
PROMPTS = ["the cat sat on the mat and " * 4, "what is that, and then what was this? " * 3, "the dog ran", "hat"]
PARAMS = [
    SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True, logprobs=2, seed=seed)
    for seed, temperature in enumerate((0.0, 0.8, 1.0, 0.9))
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file; the directory "tiny" beside it holds the same model."""
    return convert(tmp_path_factory.mktemp("gemma3n") / "tiny", "gemma3n_text")


@pytest.fixture(scope="module", params=["torch", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def open_llm(file: Path, **settings: Any) -> LLM:
    return LLM(str(file.parent / "tiny"), **{**SETTINGS, **settings})


def fingerprint(completion: Completion) -> tuple[Any, ...]:
    """Tokens, and log-probabilities to the last bit."""
    output = completion.outputs[0]
    assert output.logprobs is not None
    return output.token_ids, [(entry.logprob, entry.top) for entry in output.logprobs]


@pytest.fixture(scope="module")
def alone(file: Path, backend: str) -> Iterator[list[tuple[Any, ...]]]:
    """Each prompt's answer when nobody else is there and nothing is cached or drafted."""
    with open_llm(file, backend=backend, prefix_cache=False, speculate="none") as llm:
        yield [fingerprint(llm.generate([prompt], params)[0]) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def test_answers_are_the_same_to_the_last_bit_in_company_and_from_the_prefix_cache(
    file: Path, backend: str, alone: list[Any]
) -> None:
    with open_llm(file, backend=backend, speculate="none", max_batched_tokens=24) as llm:
        for _ in range(2):
            found = llm.generate(PROMPTS, PARAMS)
            assert [fingerprint(completion) for completion in found] == alone
        assert found[0].num_cached_tokens > 0


def test_answers_are_the_same_to_the_last_bit_after_preemption(
    file: Path, backend: str, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_steps_until(monkeypatch, len(PROMPTS) * 3)
    with open_llm(file, backend=backend, prefix_cache=False, speculate="none", kv_memory_mb=0.6) as llm:
        events: list[Event] = []
        llm.subscribe(events.append)
        found = llm.generate(PROMPTS * 3, PARAMS * 3)
        assert [fingerprint(completion) for completion in found] == alone * 3
    assert any(isinstance(event, Preempted) for event in events)
    assert any(isinstance(event, Scheduled) and event.resumed for event in events)


def test_drafts_change_how_many_tokens_a_step_brings_and_never_which(file: Path, backend: str, alone: list[Any]) -> None:
    with open_llm(file, backend=backend, speculate="ngram", draft_tokens=4) as llm:
        events: list[Event] = []
        llm.subscribe(events.append)
        found = llm.generate(PROMPTS, PARAMS)
        assert [fingerprint(completion) for completion in found] == alone
    stepped = [event for event in events if isinstance(event, Stepped)]
    assert sum(sum(each.drafted) for event in stepped for each in event.drafting) > 0


@pytest.mark.parametrize("quant", thin([None, "int8", "int4"], ["int4"]))
def test_a_gguf_file_answers_as_the_directory_that_it_was_made_of(file: Path, backend: str, quant: str | None) -> None:
    settings = {**SETTINGS, "backend": backend, "quant": quant, "dtype": "bfloat16" if quant else "float32"}
    answers = []
    for path in (file, file.parent / "tiny"):
        with LLM(str(path), **settings) as llm:
            answers.append([completion.outputs[0].token_ids for completion in llm.generate(PROMPTS, GREEDY)])
    assert answers[0] == answers[1]
