"""Prompts of two topics, from this Python's own standard library: the beginning of a function, or of an explanation.

Code against prose stands for what was shown to leak elsewhere (medical advice or coding assistance: Carlini and Nasr, 2024).
Both are cut to one length and come from the same files, so that neither size nor source of a request tells them apart.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LETTERS: Final = 240
MOST_LETTERS: Final = 0.93
FEWEST_LETTERS: Final = 0.87
"""Shares of letters and single spaces: prose that shows code, and code that is all words, are left out."""
CLASSES: Final = ("prose", "code")
_SKIPPED: Final = ("test", "idlelib", "site-packages", "lib2to3", "encodings")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        label: number of its class in `CLASSES`.
        group: the file it comes from; no file is in training and test at once.
    """

    text: str
    label: int
    group: str


def draw_prompts(num_each: int, seed: int) -> list[Prompt]:
    """Returns `num_each` different prompts of each class, mixed.

    Raises:
        SystemExit: this Python has not so many.
    """
    rng = random.Random(seed)
    found: dict[str, Prompt] = {}
    for prompt in _find_prompts(Path(sysconfig.get_paths()["stdlib"])):
        found.setdefault(prompt.text, prompt)
    drawn: list[Prompt] = []
    for label in range(len(CLASSES)):
        those = [prompt for prompt in found.values() if prompt.label == label]
        if len(those) < num_each:
            raise SystemExit(f"the standard library has {len(those)} prompts of {CLASSES[label]}; ask for no more")
        drawn += rng.sample(those, num_each)
    rng.shuffle(drawn)
    return drawn


def _find_prompts(root: Path) -> Iterator[Prompt]:
    for path in sorted(root.rglob("*.py")):
        group = str(path.relative_to(root))
        if any(part in group for part in _SKIPPED):
            continue
        source = path.read_text(encoding="utf-8", errors="ignore")
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                yield from _of_node(node, lines, group)


def _of_node(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module, lines: list[str], group: str
) -> Iterator[Prompt]:
    if said := ast.get_docstring(node):
        for text in _cut(" ".join(said.split()), " "):
            if _share_of_letters(text) > MOST_LETTERS:
                yield Prompt(text, 0, group)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        body = lines[node.lineno - 1 : node.end_lineno]
        for text in _cut("\n".join(line for line in body if line.strip() and not line.lstrip().startswith("#")), "\n"):
            if _share_of_letters(text) < FEWEST_LETTERS:
                yield Prompt(text, 1, group)


def _cut(text: str, mark: str) -> Iterator[str]:
    """Yields pieces of at most `LETTERS` that end before a mark."""
    while len(text) > LETTERS:
        end = text.rfind(mark, LETTERS // 2, LETTERS)
        if end < 0:
            return
        if text[:end].isascii():
            yield text[:end]
        text = text[end:]


def _share_of_letters(text: str) -> float:
    return sum(letter.isalpha() or letter == " " for letter in text.replace("    ", "")) / len(text.replace("    ", ""))
