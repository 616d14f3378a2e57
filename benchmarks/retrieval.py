"""How well a model's vectors find text: halves of paragraphs of the documentation, and questions about the notes of `examples`.

    python -m benchmarks.retrieval --num-threads 1
    python -m benchmarks.retrieval --models cloister-5m,DIRECTORY    # compare

The first half of each of 100 paragraphs looks for its second half among all second halves; each of 16 questions looks for the
note that answers it among 8, as `examples/rag.py` does. Nearest is by cosine, after the mean of all candidates is subtracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final

import numpy as np

from benchmarks.harness import ROOT, console, make_parser
from cloister import LLM
from examples.rag import NOTES, find_nearest, read_paragraphs

NUM_PARAGRAPHS: Final = 100
FEWEST_WORDS: Final = 40
QUESTIONS: Final = (
    ("How long are backups of the database kept?", "backups.txt"),
    ("When are backups made?", "backups.txt"),
    ("Which separator do the fields of reports have?", "csv.txt"),
    ("What happens to lines that cannot be parsed?", "csv.txt"),
    ("When is an index dropped?", "indexes.txt"),
    ("How is an index on a large table created?", "indexes.txt"),
    ("After how many days are log files deleted?", "logging.txt"),
    ("Are debug messages written in production?", "logging.txt"),
    ("How is the hash of a password computed?", "passwords.txt"),
    ("What does somebody get who forgot a password?", "passwords.txt"),
    ("What do we do with a test that fails now and then?", "testing.txt"),
    ("When do slow tests run?", "testing.txt"),
    ("How many threads may be in the pool?", "threads.txt"),
    ("Does each task have a timeout?", "threads.txt"),
    ("What happens after a deadlock error?", "transactions.txt"),
    ("How often does the program try a transaction again?", "transactions.txt"),
)


def cut_paragraphs(seed: int) -> list[tuple[str, str]]:
    """Returns the halves of some paragraphs of the documentation that have at least 40 words."""
    texts = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "worklog.md"]
    paragraphs = [" ".join(paragraph.split()) for text in texts for paragraph in text.split("\n\n") if "|" not in paragraph]
    words = [paragraph.split() for paragraph in paragraphs]
    chosen = Random(seed).sample([some for some in words if len(some) >= FEWEST_WORDS], NUM_PARAGRAPHS)
    return [(" ".join(some[: len(some) // 2]), " ".join(some[len(some) // 2 :])) for some in chosen]


def rank_halves(llm: LLM, halves: Sequence[tuple[str, str]]) -> list[int]:
    """Returns at which place, from 0, each first half finds its second one."""
    first, second = (llm.embed([pair[i] for pair in halves]) for i in (0, 1))
    first, second = (side - second.mean(0) for side in (first, second))
    first, second = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in (first, second))
    scores = first @ second.T
    return [int((row > row[at]).sum()) for at, row in enumerate(scores)]


def rank_notes(llm: LLM) -> list[int]:
    """Returns at which place, from 0, each question finds the note that answers it."""
    paragraphs = read_paragraphs(NOTES)
    found = [[name for _, name, _ in find_nearest(llm, question, paragraphs, len(paragraphs))] for question, _ in QUESTIONS]
    return [names.index(right) for names, (_, right) in zip(found, QUESTIONS, strict=True)]


def main() -> None:
    """Prints how often the right text is the first, and among the first few."""
    parser = make_parser(__doc__)
    parser.add_argument("--models", default="cloister-5m", help="names or directories, separated by commas")
    options = parser.parse_args()
    halves = cut_paragraphs(options.seed)
    for model in options.models.split(","):
        with LLM(model, num_threads=options.num_threads) as llm:
            parts, notes = rank_halves(llm, halves), rank_notes(llm)
        console.print(
            f"{model}: of {len(parts)} halves {sum(at < 1 for at in parts)} first, {sum(at < 5 for at in parts)} among five; "
            f"of {len(notes)} questions {sum(at < 1 for at in notes)} first, {sum(at < 2 for at in notes)} among two"
        )


if __name__ == "__main__":
    main()
