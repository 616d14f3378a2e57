"""The setting `release_prefixes`, from file to KV."""

from __future__ import annotations

import json

import pytest

from cloister import LLM, SamplingParams
from cloister.types.errors import ConfigError, PolicyError

PROMPT = "You are a careful assistant. " * 6


def ask(llm: LLM, question: str) -> int:
    messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": question}]
    return llm.chat(messages, SamplingParams(max_tokens=2)).num_cached_tokens


def test_strangers_share_the_prompt_of_the_release_and_nothing_else(tmp_path):
    path = tmp_path / "prefixes.json"
    path.write_text(json.dumps([PROMPT]), encoding="utf-8")
    settings = {"model": "cloister-5m", "profile": "private", "kv_memory_mb": 32, "num_threads": 1}
    with LLM(**settings) as llm:
        assert [ask(llm, "What is a view?"), ask(llm, "What is a view?")] == [0, 0]
    with LLM(**settings, release_prefixes=str(path)) as llm:
        first, again, other = ask(llm, "What is a view?"), ask(llm, "What is a view?"), ask(llm, "How big is a page?")
    assert first == 0
    assert again == other > 30


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"profile": "paranoid"}, PolicyError),
        ({"prefix_cache": False}, ConfigError),
        ({"kv_memory_mb": 1, "max_model_len": 600}, ConfigError),
    ],
    ids=str,
)
def test_where_it_could_have_no_effect_it_is_refused(tmp_path, settings, error):
    path = tmp_path / "prefixes.json"
    path.write_text(json.dumps([PROMPT * 14]), encoding="utf-8")
    given = {"model": "cloister-5m", "profile": "private", "kv_memory_mb": 32, "release_prefixes": str(path)} | settings
    with pytest.raises(error, match="release_prefixes"):
        LLM(**given).close()
