"""The messages on docs/troubleshooting.md are those of the code."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT

LEAST_LETTERS = 6
"""Shorter pieces between two ellipses are found anywhere and prove nothing."""


def read_messages() -> list[str]:
    """Returns the code in the first cell of every row."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


def read_sources() -> str:
    """Returns the code with string literals that stand beside each other joined, and what is filled in as an ellipsis."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "src").rglob("*.py")))
    python = re.sub(r"\{[^{}]*\}", "…", re.sub(r'"\s*\n\s*f?"', "", text))
    return python + re.sub(r"\$\(\w+\)", "…", (ROOT / "Makefile").read_text(encoding="utf-8"))


def test_every_message_that_is_explained_can_appear() -> None:
    sources, messages = read_sources(), read_messages()
    assert len(messages) > 30
    pieces = [(message, piece.strip()) for message in messages for piece in message.split("…")]
    assert [(message, piece) for message, piece in pieces if len(piece) >= LEAST_LETTERS and piece not in sources] == []
