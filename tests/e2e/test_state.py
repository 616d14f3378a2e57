"""The engine in this process with small models whose layers have states, every tensor random, on both back ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cloister import LLM, CloisterError, SamplingParams
from cloister.api.completions import Completion
from cloister.types.events import Event, Stepped
from tests.model_factory import make_model

SERVED = (
    ("qwen3_next", "torch"), ("granitemoehybrid", "torch"), ("lfm2", "torch"), ("mamba2", "torch"), ("mamba2", "native"),
    ("falcon_h1", "native"), ("nemotron_h", "native"),
)  # fmt: skip
"""Families and the back ends that compute them here."""
SETTINGS: dict[str, Any] = {"num_threads": 1, "block_size": 8, "max_model_len": 256, "max_num_seqs": 8}
PROMPTS = ["the cat sat on the mat and " * 4, "what is that, and then what was this? " * 3, "the dog ran", "hat"]
PARAMS = [
    SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True, logprobs=2, seed=seed)
    for seed, temperature in enumerate((0.0, 0.8, 1.0, 0.9))
]


class Served(NamedTuple):
    path: Path
    backend: str


@pytest.fixture(scope="module", params=SERVED, ids=" on ".join)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    family, backend = request.param
    return Served(make_model(tmp_path_factory.mktemp(family), family), backend)


def open_llm(served: Served, **settings: Any) -> LLM:
    return LLM(str(served.path), **{**SETTINGS, "backend": served.backend, **settings})


def fingerprint(completion: Completion) -> tuple[Any, ...]:
    """Tokens, and log-probabilities to the last bit."""
    output = completion.outputs[0]
    assert output.logprobs is not None
    return output.token_ids, [(entry.logprob, entry.top) for entry in output.logprobs]


@pytest.fixture(scope="module")
def alone(served: Served) -> Iterator[list[tuple[Any, ...]]]:
    """Each prompt's answer when nobody else is there and nothing is cached or drafted."""
    with open_llm(served, prefix_cache=False, speculate="none") as llm:
        yield [fingerprint(llm.generate([prompt], params)[0]) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def test_answers_are_the_same_to_the_last_bit_in_company_and_from_the_prefix_cache(served: Served, alone: list[Any]) -> None:
    with open_llm(served, speculate="none", max_batched_tokens=24) as llm:
        for _ in range(2):
            found = llm.generate(PROMPTS, PARAMS)
            assert [fingerprint(completion) for completion in found] == alone
        assert found[0].num_cached_tokens > 0


def test_answers_are_the_same_to_the_last_bit_with_drafts(served: Served, alone: list[Any]) -> None:
    with open_llm(served, speculate="ngram", draft_tokens=4) as llm:
        events: list[Event] = []
        llm.subscribe(events.append)
        found = llm.generate(PROMPTS, PARAMS)
        assert [fingerprint(completion) for completion in found] == alone
    stepped = [event for event in events if isinstance(event, Stepped)]
    assert sum(sum(each.drafted) for event in stepped for each in event.drafting) > 0


def test_states_are_an_item_of_the_memory(served: Served) -> None:
    with open_llm(served, speculate="none") as llm:
        items = dict(llm.memory)
    assert items["states"] % (4 * SETTINGS["max_num_seqs"]) == 0 < items["states"]
    assert (items["KV cache"] == 0) == (served.path.name.startswith("mamba2"))


def test_the_native_back_end_says_what_to_choose(served: Served) -> None:
    if not served.path.name.startswith("qwen3_next"):
        open_llm(served, backend="native").close()
        return
    with pytest.raises(CloisterError, match="--backend torch"):
        open_llm(served, backend="native")


def test_a_model_with_states_does_not_draft_for_others(served: Served) -> None:
    with pytest.raises(CloisterError, match="cannot draft"):
        open_llm(served, speculate="draft_model", draft_model=str(served.path))
