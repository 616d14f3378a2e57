"""The engine in this process with a small DeepSeek-V3 whose every tensor is random, on the torch back end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloister import LLM, CloisterError, SamplingParams
from cloister.api.completions import Completion
from cloister.types.events import Event, Preempted, Scheduled, Stepped
from tests.arrivals import hold_steps_until
from tests.model_factory import make_model

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.0,
    "mscale_all_dim": 1.0,
}  # fmt: skip
SETTINGS: dict[str, Any] = {"backend": "torch", "num_threads": 1, "block_size": 8, "max_model_len": 256}
PROMPTS = ["the cat sat on the mat and " * 4, "what is that, and then what was this? " * 3, "the dog ran", "hat"]
PARAMS = [
    SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True, logprobs=2, seed=seed)
    for seed, temperature in enumerate((0.0, 0.8, 1.0, 0.9))
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("deepseek"), "deepseek_v3", rope_parameters=YARN)


def open_llm(path: Path, **settings: Any) -> LLM:
    return LLM(str(path), **{**SETTINGS, **settings})


def fingerprint(completion: Completion) -> tuple[Any, ...]:
    """Tokens, and log-probabilities to the last bit."""
    output = completion.outputs[0]
    assert output.logprobs is not None
    return output.token_ids, [(entry.logprob, entry.top) for entry in output.logprobs]


@pytest.fixture(scope="module")
def alone(path: Path) -> Iterator[list[tuple[Any, ...]]]:
    """Each prompt's answer when nobody else is there and nothing is cached or drafted."""
    with open_llm(path, prefix_cache=False, speculate="none") as llm:
        yield [fingerprint(llm.generate([prompt], params)[0]) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def test_answers_are_the_same_to_the_last_bit_in_company_and_from_the_prefix_cache(path: Path, alone: list[Any]) -> None:
    with open_llm(path, speculate="none", max_batched_tokens=24) as llm:
        for _ in range(2):
            found = llm.generate(PROMPTS, PARAMS)
            assert [fingerprint(completion) for completion in found] == alone
        assert found[0].num_cached_tokens > 0


def test_answers_are_the_same_to_the_last_bit_after_preemption(
    path: Path, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_steps_until(monkeypatch, len(PROMPTS) * 3)
    block_bytes = 8 * 3 * (20 + 8) * 4
    with open_llm(path, prefix_cache=False, speculate="none", kv_memory_mb=33 * block_bytes / (1 << 20)) as llm:
        events: list[Event] = []
        llm.subscribe(events.append)
        found = llm.generate(PROMPTS * 3, PARAMS * 3)
        assert [fingerprint(completion) for completion in found] == alone * 3
    assert any(isinstance(event, Preempted) for event in events)
    assert any(isinstance(event, Scheduled) and event.resumed for event in events)


def test_drafts_change_how_many_tokens_a_step_brings_and_never_which(path: Path, alone: list[Any]) -> None:
    with open_llm(path, speculate="ngram", draft_tokens=4) as llm:
        events: list[Event] = []
        llm.subscribe(events.append)
        found = llm.generate(PROMPTS, PARAMS)
        assert [fingerprint(completion) for completion in found] == alone
    stepped = [event for event in events if isinstance(event, Stepped)]
    assert sum(sum(each.drafted) for event in stepped for each in event.drafting) > 0


def test_kv_memory_is_what_latents_take(path: Path) -> None:
    block_bytes = 8 * 3 * (20 + 8) * 4  # positions, layers, latent and rotated key, float32
    with open_llm(path, speculate="none", kv_memory_mb=1.0) as llm:
        kv = next(num_bytes for name, num_bytes in llm.memory if name.startswith("KV"))
    assert kv == (1 << 20) // block_bytes * block_bytes


def test_the_native_back_end_says_what_to_choose(path: Path) -> None:
    with pytest.raises(CloisterError, match=r"latents.*leave out --kv-dtype"):
        LLM(str(path), backend="native", kv_dtype="int8")
