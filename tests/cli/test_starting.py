"""What an operator reads at start: what drafts tokens, and how much."""

from __future__ import annotations

import pytest

from cloister.app import build_engine, resolve_settings
from cloister.app.starting import describe_start
from cloister.types.request import ModelInfo


def read_drafts(drafters: tuple[str, ...], **flags: object) -> str:
    model = ModelInfo(name="m", path="", max_model_len=64, vocab_size=8, eos_token_ids=(), drafters=drafters)
    (line,) = (line for line in describe_start(resolve_settings(flags), model, [], [], None) if line.startswith("drafts: "))
    return line.removeprefix("drafts: ")


def test_the_start_says_what_was_found_to_draft() -> None:
    assert read_drafts(("medusa", "rest", "ngram")) == "medusa, rest, ngram (auto)"
    assert read_drafts(("ngram",), speculate="ngram") == "ngram"
    assert read_drafts((), speculate="none") == "none"


def test_the_start_says_how_much_is_drafted_where_that_is_fixed() -> None:
    assert read_drafts(("medusa",), draft_tokens=8) == "medusa (auto, 8 tokens a step)"
    assert read_drafts(("ngram",), speculate="ngram", draft_tokens=1) == "ngram (1 token a step)"


@pytest.mark.parametrize(
    ("flags", "drafters"),
    [
        ({}, ("medusa", "rest", "ngram")),
        ({"speculate": "none"}, ()),
        ({"speculate": "recycling,ngram"}, ("recycling", "ngram")),
        ({"speculate": "recycling,ngram", "draft_tokens": 4}, ("recycling",)),
    ],
)
def test_an_engine_says_which_drafters_it_asks(flags: dict[str, object], drafters: tuple[str, ...]) -> None:
    settings = resolve_settings({"kv_memory_mb": 64, "max_model_len": 256, "num_threads": 1, **flags})
    assert build_engine(settings.engine.config).model.drafters == drafters
