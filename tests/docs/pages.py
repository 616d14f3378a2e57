"""The code blocks of README.md and of the pages in docs/."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
"""The line before a block that CI cannot run, with the reason."""


@dataclass(frozen=True)
class Block:
    """One code block.

    Attributes:
        page: Path below the repository.
        line: The first line of its text, counted from 1.
        language: What stands behind the fence; empty where nothing does, or where the block is indented.
        text: The code.
        reason: Why it is not run; empty if it is.
    """

    page: str
    line: int
    language: str
    text: str
    reason: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def list_pages() -> list[str]:
    """Returns README.md and every page of docs/, decisions included."""
    return ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]


@cache
def read_blocks(page: str) -> tuple[Block, ...]:
    """Returns the blocks of a page in their order."""
    source = (ROOT / page).read_text(encoding="utf-8")
    lines = source.split("\n")
    blocks = []
    for token in MarkdownIt("commonmark").parse(source):
        if token.type in ("fence", "code_block") and token.map is not None:
            start = token.map[0]
            marker = NOT_RUN.fullmatch(lines[start - 1].strip()) if start else None
            blocks.append(Block(page, start + 2, token.info.strip(), token.content, marker[1] if marker else ""))
    return tuple(blocks)


def iterate_blocks(*languages: str) -> Iterator[Block]:
    """Yields the blocks of every page, or those in the given languages."""
    for page in list_pages():
        yield from (block for block in read_blocks(page) if not languages or block.language in languages)


def iterate_spans() -> Iterator[tuple[str, str]]:
    """Yields (page, code) for every piece of code inside a sentence."""
    for page in list_pages():
        for token in MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text(encoding="utf-8")):
            for child in token.children or ():
                if child.type == "code_inline":
                    yield page, child.content
