"""Answer from a folder of notes: `python examples/rag.py ["A question"]` (retrieval-augmented generation, Lewis et al. 2020).

Each paragraph becomes a vector; the ones nearest to the question go into the prompt. The embedded model is small: it finds
the right note more often than not, and is no use for reading it. Take a larger one with --model for answers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from cloister import LLM, SamplingParams

NOTES = Path(__file__).parent / "data" / "notes"
QUESTION = "After how many days are log files deleted?"


def read_paragraphs(folder: Path) -> list[tuple[str, str]]:
    """Returns (name of the file, paragraph) of every text in a folder."""
    return [
        (file.name, " ".join(paragraph.split()))
        for file in sorted(folder.glob("*.txt"))
        for paragraph in file.read_text(encoding="utf-8").split("\n\n")
        if paragraph.strip()
    ]


def find_nearest(llm: LLM, question: str, paragraphs: list[tuple[str, str]], num_wanted: int) -> list[tuple[float, str, str]]:
    """Returns (cosine, name, paragraph) of those nearest to the question, the nearest first."""
    vectors = llm.embed([question, *(text for _, text in paragraphs)])
    # What all texts have in common says nothing of any of them; without it the rest stands out.
    vectors = vectors - vectors[1:].mean(0)
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    scores = vectors[1:] @ vectors[0]
    return [(float(scores[i]), *paragraphs[i]) for i in np.argsort(-scores)[:num_wanted]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--notes", type=Path, default=NOTES)
    parser.add_argument("--num-notes", type=int, default=2)
    parser.add_argument("--model", default="cloister-5m")
    chosen = parser.parse_args()
    with LLM(chosen.model) as llm:
        found = find_nearest(llm, chosen.question, read_paragraphs(chosen.notes), chosen.num_notes)
        for score, name, _ in found:
            print(f"{score:.3f} {name}")
        notes = "\n".join(text for _, _, text in found)
        asked = f"Answer from these notes alone.\n\n{notes}\n\nQuestion: {chosen.question}"
        print(llm.chat([{"role": "user", "content": asked}], SamplingParams(temperature=0, max_tokens=80)).text)


if __name__ == "__main__":
    main()
