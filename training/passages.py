"""The texts that `cloister quantize` calibrates on and measures with: passages of the corpus, a page of each kind in turn.

`python -m training.passages` reads the documents that the recipe's first stage wrote and rewrites both files.
"""

import argparse
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path

from training.corpus import Document

FOLDER = Path(__file__).parents[1] / "src" / "cloister" / "quant" / "passages"
PASSAGE_CHARS = 2000
NUM_CHARS = 120_000


def choose_passages(documents: Iterable[Document], num_chars: int) -> Iterator[str]:
    """Yields one passage of each document, sources in turn and pages by the hash of their name, until there is enough."""
    ranked: dict[str, list[Document]] = {}
    for document in sorted(documents, key=_rank):
        ranked.setdefault(document.source, []).append(document)
    found = 0
    for document in chain.from_iterable(zip_longest(*ranked.values())):
        if document is None:
            continue
        passage = cut_passage(document.text.split("\n\n"))
        yield passage
        found += len(passage)
        if found >= num_chars:
            return


def cut_passage(paragraphs: Sequence[str], num_chars: int = PASSAGE_CHARS) -> str:
    """Returns whole paragraphs from a third of the way into a page on, about `num_chars` of them at most."""
    kept: list[str] = []
    for paragraph in paragraphs[len(paragraphs) // 3 :]:
        if kept and sum(map(len, kept)) + len(paragraph) > num_chars:
            break
        kept.append(paragraph[:num_chars])
    return "\n\n".join(kept)


def read_documents(path: Path) -> list[Document]:
    """The documents of the recipe's first stage."""
    lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    return [Document(**json.loads(line)) for line in lines]


def write_passages(documents: Sequence[Document], folder: Path, num_chars: int = NUM_CHARS) -> None:
    """Writes `calibration.txt` from pages of training and `held_out.txt` from pages that training never saw."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, held_out in (("calibration.txt", False), ("held_out.txt", True)):
        chosen = choose_passages([d for d in documents if d.held_out == held_out], num_chars)
        (folder / name).write_text("\n\n".join(chosen) + "\n", encoding="utf-8")


def _rank(document: Document) -> bytes:
    return hashlib.sha256(f"passage of {document.source}/{document.path}".encode()).digest()


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m training.passages", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/training"), help="folder of the recipe's documents.jsonl")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write to")
    arguments = parser.parse_args()
    write_passages(read_documents(arguments.work / "documents.jsonl"), arguments.out)


if __name__ == "__main__":
    main()
