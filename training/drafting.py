"""What the heads of the embedded model learn from: the corpus, and questions that the model then answers itself.

The phrasings are those of training; the ones that training never uses are left for measurements of speed.
"""

from collections.abc import Sequence
from pathlib import Path
from random import Random

from training.corpus import Document
from training.lessons import Lessons


def write_text(documents: Sequence[Document], folder: Path) -> Path:
    """Writes every page that is not held out as a file; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, document in enumerate(d for d in documents if not d.held_out):
        (folder / f"{number:05}.txt").write_text(document.text, encoding="utf-8")
    return folder


def write_questions(lessons: Lessons, count: int, seed: int, file: Path) -> Path:
    """Writes the first question of so many chats, drawn as tuning draws them, a line each; returns the file."""
    rng = Random(f"drafting {seed}")
    lines: list[str] = []
    while len(lines) < count:
        chat = lessons.chat(rng)
        question = next(str(message["content"]) for message in chat.messages if message["role"] == "user")
        if not chat.tools and question.strip() and "\n" not in question:
            lines.append(question)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file
