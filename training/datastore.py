"""The datastore beside the embedded model: the paragraphs of the documentation that its facts were drawn from.

`python -m training.datastore` reads the Debian packages of the recipe and writes it; it takes a minute.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

from cloister.executor.drafters.datastore import write_datastore
from cloister.models import load, locate
from cloister.models.generation import digest_tokenizer
from cloister.text import Tokenizer
from training.corpus import DEBIAN_SOURCES, Document, read_documents
from training.facts import Knowledge, draw_knowledge
from training.recipe import MODEL_NAME

MIN_ANSWER_CHARS = 8
"""Shorter answers stand anywhere."""


def choose_paragraphs(knowledge: Knowledge, documents: Iterable[Document]) -> list[str]:
    """Returns one paragraph of the training pages for each fact: with its subject rather than without, then the shortest."""
    paragraphs: dict[str, list[tuple[str, str]]] = {}
    for document in documents:
        if not document.held_out:
            paragraphs.setdefault(document.source, []).extend((p, _plain(p)) for p in document.text.split("\n\n"))
    chosen = dict[str, None]()
    for fact in knowledge.facts:
        answer = fact.answer.rstrip(".")
        if len(answer) >= MIN_ANSWER_CHARS:
            source = paragraphs.get(knowledge.kinds[fact.kind].source, [])
            found = [(fact.subject not in plain, len(plain), p) for p, plain in source if answer in plain]
            if found:
                chosen[min(found)[2]] = None
    return list(chosen)


def _plain(paragraph: str) -> str:
    """A paragraph as facts are written."""
    return " ".join(paragraph.replace("``", "").replace("*", "").split())


def main(arguments: list[str] | None = None) -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m training.datastore", description=__doc__)
    parser.add_argument("--model", default=MODEL_NAME, help="whose tokens these are")
    parser.add_argument("--out", type=Path, help="folder to write to; unset, beside the model")
    options = parser.parse_args(arguments)
    model = load(locate(options.model))
    tokenizer = Tokenizer(model.path)
    paragraphs = choose_paragraphs(draw_knowledge(DEBIAN_SOURCES), read_documents(DEBIAN_SOURCES))
    header = write_datastore(
        options.out or model.path / "drafters" / "rest",
        (tokenizer.encode(paragraph, parse_special=False) for paragraph in paragraphs),
        num_ids=model.spec.vocab_size,
        tokenizer=digest_tokenizer(model.path),
    )
    print(f"{header.num_tokens} tokens of {header.num_documents} paragraphs")


if __name__ == "__main__":
    main()
