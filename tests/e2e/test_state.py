"""The engine in this process with small models whose layers have states, every tensor random."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloister import LLM, CloisterError, SamplingParams
from cloister.api.completions import Completion
from cloister.types.events import Event, Stepped
from tests.model_factory import make_model
from tests.thinning import thin

FAMILIES = ("qwen3_next", "granitemoehybrid", "lfm2", "mamba2", "falcon_h1", "nemotron_h")
SETTINGS: dict[str, Any] = {"num_threads": 1, "block_size": 8, "max_model_len": 256, "max_num_seqs": 8}
PROMPTS = ["the cat sat on the mat and " * 4, "what is that, and then what was this? " * 3, "the dog ran", "hat"]
PARAMS = [
    SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True, logprobs=2, seed=seed)
    for seed, temperature in enumerate((0.0, 0.8, 1.0, 0.9))
]


@pytest.fixture(scope="module", params=thin(FAMILIES, 3))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module", params=["torch", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def open_llm(path: Path, **settings: Any) -> LLM:
    return LLM(str(path), **{**SETTINGS, "backend": "torch", **settings})


def fingerprint(completion: Completion) -> tuple[Any, ...]:
    """Tokens, and log-probabilities to the last bit."""
    output = completion.outputs[0]
    assert output.logprobs is not None
    return output.token_ids, [(entry.logprob, entry.top) for entry in output.logprobs]


@pytest.fixture(scope="module")
def alone(path: Path, backend: str) -> Iterator[list[tuple[Any, ...]]]:
    """Each prompt's answer when nobody else is there and nothing is cached or drafted."""
    with open_llm(path, backend=backend, prefix_cache=False, speculate="none") as llm:
        yield [fingerprint(llm.generate([prompt], params)[0]) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def test_answers_are_the_same_to_the_last_bit_in_company_and_from_the_prefix_cache(
    path: Path, backend: str, alone: list[Any]
) -> None:
    with open_llm(path, backend=backend, speculate="none", max_batched_tokens=24) as llm:
        for _ in range(2):
            found = llm.generate(PROMPTS, PARAMS)
            assert [fingerprint(completion) for completion in found] == alone
        assert found[0].num_cached_tokens > 0


def test_answers_are_the_same_to_the_last_bit_with_drafts(path: Path, backend: str, alone: list[Any]) -> None:
    with open_llm(path, backend=backend, speculate="ngram", draft_tokens=4) as llm:
        events: list[Event] = []
        llm.subscribe(events.append)
        found = llm.generate(PROMPTS, PARAMS)
        assert [fingerprint(completion) for completion in found] == alone
    stepped = [event for event in events if isinstance(event, Stepped)]
    assert sum(sum(each.drafted) for event in stepped for each in event.drafting) > 0


def test_states_are_an_item_of_the_memory(path: Path) -> None:
    with open_llm(path, speculate="none") as llm:
        items = dict(llm.memory)
    assert items["states"] % (4 * SETTINGS["max_num_seqs"]) == 0 < items["states"]
    assert (items["KV cache"] == 0) == (path.name.startswith("mamba2"))


def test_a_model_with_states_does_not_draft_for_others(path: Path) -> None:
    with pytest.raises(CloisterError, match="cannot draft"):
        open_llm(path, speculate="draft_model", draft_model=str(path))
