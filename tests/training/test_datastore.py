"""The datastore beside the embedded model holds the paragraphs of facts, and no page that is held out."""

from __future__ import annotations

from itertools import count

from training.corpus import Document
from training.datastore import choose_paragraphs
from training.facts import Fact, Kind, Knowledge

KIND = Kind("module", "python", ("{x}",), lambda _: iter(()))


def page(text: str, *, held_out: bool = False) -> Document:
    """A page whose name puts it on that side."""
    pages = (Document("python", f"{number}.txt", text) for number in count())
    return next(document for document in pages if document.held_out == held_out)


def choose(*documents: Document, answer: str = "Encode and decode JSON.") -> list[str]:
    return choose_paragraphs(Knowledge({"module": KIND}, (Fact("module", "json", answer),)), documents)


def test_the_paragraph_with_the_subject_is_taken_then_the_shortest() -> None:
    named, short = "The ``json`` module: *Encode and\ndecode* JSON.", "Encode and decode JSON"
    assert choose(page(f"Other text.\n\n{short}\n\n{named}\n\n{named} And more.")) == [named]
    assert choose(page(f"{short} and XML\n\n{short}")) == [short]


def test_held_out_pages_other_sources_and_answers_that_stand_anywhere_give_nothing() -> None:
    text = "json: Encode and decode JSON."
    assert choose(page(text, held_out=True)) == []
    assert choose(Document("sqlite", page(text).path, text)) == []
    assert choose(page("json is of type enum"), answer="enum") == []
