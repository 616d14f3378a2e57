"""What is learned from: which passages are cut, which are held out, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloister.train.passages import (
    FEWEST_TOKENS,
    HELD_OUT_ONE_IN,
    Passage,
    check_size,
    cut_beginnings,
    cut_passages,
    read_files,
)
from cloister.types.errors import ConfigError


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def texts(count: int) -> list[str]:
    return [f"{number} " * 40 for number in range(count)]


def test_passages_are_whole_texts_cut_and_no_more_than_asked_for() -> None:
    passages = cut_passages(texts(9), encode, 50, 10_000, 0)
    assert sorted(token for p in passages for token in p.token_ids) == sorted(encode("".join(texts(9))))
    assert max(len(p.token_ids) for p in passages) == 50
    assert sum(len(p.token_ids) for p in cut_passages(texts(9), encode, 50, 333, 0)) == 333


def test_the_seed_decides_which_texts_are_used() -> None:
    assert cut_passages(texts(50), encode, 50, 300, 1) == cut_passages(texts(50), encode, 50, 300, 1)
    assert cut_passages(texts(50), encode, 50, 300, 1) != cut_passages(texts(50), encode, 50, 300, 2)


def test_what_is_held_out_depends_on_the_passage_alone() -> None:
    passages = cut_passages(texts(3000), encode, 64, 1 << 30, 0)
    held_out = {p.token_ids.tobytes() for p in passages if p.is_held_out}
    assert len(held_out) / len(passages) == pytest.approx(1 / HELD_OUT_ONE_IN, rel=0.2)
    again = cut_passages(texts(3000), encode, 64, 1 << 30, 7)
    assert {p.token_ids.tobytes() for p in again if p.is_held_out} == held_out


def test_answers_to_one_prompt_are_held_out_together() -> None:
    for prompt in range(64):
        one, other = (Passage.own(2, [prompt, 5, 6, *answer]) for answer in ([1, 2], [3]))
        assert one.is_held_out is other.is_held_out


def test_beginnings_leave_more_than_half_of_a_passage() -> None:
    passages = cut_passages(texts(40), encode, 64, 1 << 30, 0)
    beginnings = cut_beginnings(passages, 30, 0)
    assert len(beginnings) == 30
    assert {len(beginning) for beginning in beginnings} <= set(range(2, 33))
    assert len({len(beginning) for beginning in beginnings}) > 5


def test_too_little_text_is_refused() -> None:
    for some in ([], texts(1), texts(12)):
        with pytest.raises(ConfigError, match=str(FEWEST_TOKENS)):
            check_size(cut_passages(some, encode, 50, 1 << 30, 0))
    check_size(cut_passages(texts(400), encode, 50, 1 << 30, 0))
    with pytest.raises(ConfigError, match="held out"):
        check_size([p for p in cut_passages(texts(400), encode, 50, 1 << 30, 0) if not p.is_held_out])


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xe9\xff")
    (tmp_path / "folder").mkdir()
    for name, words in (("missing", "No such file"), ("latin", "UTF-8"), ("folder", "no .txt")):
        with pytest.raises(ConfigError, match=words):
            read_files([tmp_path / name])
    (tmp_path / "folder" / "b.md").write_text("b")
    (tmp_path / "folder" / "deep").mkdir()
    (tmp_path / "folder" / "deep" / "a.txt").write_text("a")
    assert read_files([tmp_path / "folder", tmp_path / "folder" / "b.md"]) == ["b", "a", "b"]
