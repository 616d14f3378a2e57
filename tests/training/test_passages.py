"""The texts of `cloister quantize`: chosen by name alone, training pages and held-out pages apart."""

from pathlib import Path

from training.corpus import Document
from training.passages import FOLDER, choose_passages, cut_passage, write_passages

DOCUMENTS = [
    Document(source, f"page{number}", "\n\n".join(f"{source} {number}, paragraph {i}." for i in range(9)))
    for source in ("a", "b")
    for number in range(200)
]


def test_sources_take_turns_and_order_does_not_matter() -> None:
    chosen = list(choose_passages(DOCUMENTS, 500))
    assert [passage[0] for passage in chosen[:4]] == ["a", "b", "a", "b"]
    assert list(choose_passages(DOCUMENTS[::-1], 500)) == chosen
    assert 500 <= sum(map(len, chosen)) < 800


def test_a_passage_is_whole_paragraphs_from_inside_a_page() -> None:
    assert cut_passage(["one", "two", "three", "four"], 8) == "two\n\nthree"
    assert cut_passage(["x" * 50], 20) == "x" * 20


def test_no_held_out_page_is_calibrated_on(tmp_path: Path) -> None:
    write_passages(DOCUMENTS, tmp_path)
    calibration, held_out = ((tmp_path / name).read_text() for name in ("calibration.txt", "held_out.txt"))
    for document in DOCUMENTS:
        assert (document.text.split("\n\n")[4] in held_out) == document.held_out
        assert (document.text.split("\n\n")[4] in calibration) != document.held_out


def test_the_texts_are_shipped() -> None:
    assert all((FOLDER / name).stat().st_size > 50_000 for name in ("calibration.txt", "held_out.txt"))
