"""Which small model drafts for a model: the one that is named, the one that was trained, the embedded one; else an error says
what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloister.executor.drafters import DRAFTERS
from cloister.executor.drafters.draft_files import draft_names, open_draft, open_drafts
from cloister.models import locate
from cloister.types.errors import ConfigError
from tests.executor.drafters.small_models import VOCAB, RandomModel, make_batch, make_context

MODEL = "cloister-5m"


def write_tokenizer(directory: Path, tokens: list[str]) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {token: id for id, token in enumerate(tokens)}}}))
    return directory


def test_the_embedded_model_has_the_embedded_draft() -> None:
    assert draft_names(make_context(make_batch(), model_path=locate(MODEL))) == ["cloister-draft"]


def test_a_trained_draft_comes_before_the_embedded_one_and_a_named_one_before_both(tmp_path: Path) -> None:
    trained = write_tokenizer(tmp_path / "drafters" / "draft_model", ["a"])
    assert draft_names(make_context(make_batch(), model_path=tmp_path)) == [str(trained)]
    assert draft_names(make_context(make_batch(), model_path=tmp_path, files="one, two")) == ["one", "two"]


@pytest.mark.parametrize("drafter", ["draft_model", "spec_infer"])
def test_without_a_draft_an_error_says_how_to_train_one(tmp_path: Path, drafter: str) -> None:
    with pytest.raises(ConfigError, match="cloister train draft"):
        DRAFTERS.get(drafter)(make_context(make_batch(), model_path=tmp_path))


@pytest.mark.parametrize("files", ["", "one,", " , "])
def test_an_empty_name_is_an_error(files: str) -> None:
    with pytest.raises(ConfigError, match="empty name"):
        draft_names(make_context(make_batch(), files=files))


def test_a_drafter_of_one_model_takes_no_two() -> None:
    with pytest.raises(ConfigError, match="spec_infer"):
        open_draft(make_context(make_batch(), files="one,two"))


def test_another_number_of_tokens_is_an_error() -> None:
    context = make_context(make_batch(), files="cloister-draft", open_model=lambda name: RandomModel(), vocab_size=VOCAB + 1)
    with pytest.raises(ConfigError, match=f"{VOCAB} tokens and the model {VOCAB + 1}"):
        open_drafts(context)


def test_other_tokens_under_the_same_ids_are_an_error(tmp_path: Path) -> None:
    model, same, other = (
        write_tokenizer(tmp_path / name, tokens) for name, tokens in (("m", ["a", "b"]), ("s", ["a", "b"]), ("o", ["b", "a"]))
    )
    context = make_context(make_batch(), model_path=model, files=str(same), open_model=lambda name: RandomModel())
    assert len(open_drafts(context)) == 1
    context = make_context(make_batch(), model_path=model, files=f"{same},{other}", open_model=lambda name: RandomModel())
    with pytest.raises(ConfigError, match="do not mean"):
        open_drafts(context)
