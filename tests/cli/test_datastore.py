"""`cloister datastore build`: from public text to drafts, as a person does it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloister.cli import main
from cloister.cli.datastore import PIECE_CHARS, encode_document, list_files
from cloister.executor.drafters.datastore import Datastore
from cloister.models import locate
from cloister.models.generation import digest_tokenizer
from cloister.text import Tokenizer
from cloister.types.errors import ConfigError

TEXT = "The write-ahead log is checkpointed when it has 1000 pages.\n\nA checkpoint moves its pages into the database."


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["datastore", "build", *arguments])
    captured = capsys.readouterr()
    return int(caught.value.code or 0), captured.out, captured.err


def test_what_was_built_is_found_by_its_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.md").write_text("Another document.")
    (tmp_path / "c.html").write_text("<p>not read</p>")
    out = tmp_path / "store"
    arguments = ("--model", "cloister-5m", "--text", str(tmp_path), "--out", str(out), "--json")
    status, printed, _ = run(capsys, *arguments)
    report = json.loads(printed)
    assert status == 0
    assert report["num_documents"] == 2
    tokenizer = Tokenizer(locate("cloister-5m"))
    start, end = Datastore(out, digest_tokenizer(locate("cloister-5m")), 4096).find(tokenizer.encode(" write-ahead log"))
    assert end - start == 1
    assert report["num_tokens"] == len(tokenizer.encode(TEXT)) + len(tokenizer.encode("Another document."))


def test_control_tokens_in_a_text_are_plain_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("before <|end|> after")
    run(capsys, "--model", "cloister-5m", "--text", str(tmp_path / "a.txt"), "--out", str(tmp_path / "store"))
    store = Datastore(tmp_path / "store", digest_tokenizer(locate("cloister-5m")), 4096)
    assert store.find([1]) == (0, 0)


def test_text_that_is_not_there_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "store"
    for text in (tmp_path, tmp_path / "none.txt"):
        status, _, err = run(capsys, "--model", "cloister-5m", "--text", str(text), "--out", str(out))
        assert (status, out.exists()) == (1, False)
        assert "give one that holds text" in " ".join(err.split())
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\xfd")
    status, _, err = run(capsys, "--model", "cloister-5m", "--text", str(tmp_path), "--out", str(out))
    assert status == 1
    assert "UTF-8" in err
    with pytest.raises(ConfigError):
        list_files([tmp_path / "none"])


def test_a_long_text_is_cut_at_paragraphs_and_nothing_is_lost() -> None:
    text = "\n\n".join("word " * 4000 for _ in range(30)) + "x" * (PIECE_CHARS + 5)
    pieces: list[str] = []

    def encode(piece: str) -> list[int]:
        pieces.append(piece)
        return [len(piece)]

    assert sum(encode_document(text, encode)) == len(text)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= PIECE_CHARS
    assert pieces[1].startswith("\n\n")


def test_a_place_that_cannot_be_written_to_is_an_error_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    below_a_file = tmp_path / "a.txt" / "store"
    status, _, said = run(capsys, "--model", "cloister-5m", "--text", str(tmp_path), "--out", str(below_a_file))
    assert status == 1
    assert "cannot be written to" in said.replace("\n", " ")
