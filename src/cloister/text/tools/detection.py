"""Which family a model's calls belong to, by what its chat template writes."""

from __future__ import annotations

from typing import Final

_SIGNS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("deepseek", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("mistral_args", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("phi4", ("<|tool|>", "<|/tool|>")),
    ("granite", ("<|tool_call|>",)),
    ("hermes", ("<tool_call>",)),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ('"parameters": ', "<|eot_id|>")),
)
"""(family, what its template has); the first of which everything is there wins."""


def detect_family(template: str) -> str | None:
    """Returns the name of a family, or None for a template that shows none."""
    return next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), None)
