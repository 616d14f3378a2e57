"""Expressions of a `tokenizer.json` that are slow on some texts: refused when they are loaded, or texts are bounded."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from cloister.models.location import embedded_names, locate
from cloister.text import Tokenizer, expressions
from cloister.text.spelling import EMBEDDED, SPLITS
from cloister.types.errors import InvalidRequestError, ModelError
from tests.text import models


def write_tokenizer(path: Path, expression: str, at: str = "pre_tokenizer") -> Path:
    models.byte_level(path)
    content = json.loads((path / "tokenizer.json").read_text())
    if at == "pre_tokenizer":
        step = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        content[at] = {"type": "Sequence", "pretokenizers": [step, content[at]]}
    else:
        content[at] = {"type": "Replace", "pattern": {"Regex": expression}, "content": " "}
    (path / "tokenizer.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("at", ["pre_tokenizer", "normalizer"])
@pytest.mark.parametrize("expression", [r"(\s+)+$", r"(x+x+)+y", r"(a|aa)+!", r"(\p{L}*)*\d"])
def test_an_expression_that_takes_too_many_steps_on_a_short_text_is_refused(expression: str, at: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"would stop the server; use another copy"):
        Tokenizer(write_tokenizer(tmp_path, expression, at))


@pytest.mark.parametrize("expression", [r"\s*$", r"\s+\z", r"[^\S\n]+\n"])
def test_texts_are_bounded_where_an_expression_takes_their_square(expression: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, expression))
    with pytest.raises(InvalidRequestError, match=r"one may have [0-9,]+ characters; send a shorter one"):
        tokenizer.encode("a" + " " * 4_000_000 + "b")
    assert tokenizer._most_chars is not None
    began_s = time.process_time()
    tokenizer.encode("a" + " " * (tokenizer._most_chars - 2) + "b", parse_special=False)
    assert time.process_time() - began_s < 10 * expressions.MOST_S


@pytest.mark.parametrize("pattern", sorted({EMBEDDED, *(pattern for split in SPLITS.values() for pattern in split.patterns)}))
def test_published_expressions_are_bounded_by_nothing(pattern: str) -> None:
    assert expressions._bound(pattern) is None


def test_a_text_on_which_the_library_gives_up_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloister.text.tokenizer.bound_text", lambda *_: None)
    tokenizer = Tokenizer(write_tokenizer(tmp_path, r"(\s+)+$"))
    for text in ("a" + " " * 40 + "b", "a" + " " * 40 + "b" * 5000):
        with pytest.raises(InvalidRequestError, match="gives up on this text") as refused:
            tokenizer.encode(text)
        assert refused.value.status == 400


@pytest.mark.parametrize("name", embedded_names())
def test_expressions_of_the_models_in_the_package_are_not_tried(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "_bound", None)
    Tokenizer(locate(name))


def test_a_machine_that_is_disturbed_for_a_while_refuses_no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    num_calls, lost_s = 0, 0.0

    def thread_time() -> float:
        """Processor time of which a tenth of a second is gone in every second trial."""
        nonlocal num_calls, lost_s
        num_calls += 1
        lost_s += 0.1 if num_calls % 4 == 2 else 0.0
        return time.process_time() + lost_s

    monkeypatch.setattr("cloister.text.expressions.time.thread_time", thread_time)
    assert expressions._bound(EMBEDDED) is None
