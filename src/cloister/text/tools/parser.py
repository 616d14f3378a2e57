"""Finds tool calls in a streamed answer. Anything that is not a valid call of an offered tool is text; and which format a
template uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cloister.text.tools.base import CallReader, Tool, ToolCallFormat
from cloister.text.tools.reading import MalformedError, OutputBuffer, Reading


def read_calls(source: OutputBuffer, family: ToolCallFormat, tools: Mapping[str, Tool]) -> Reading[None]:
    """Reads an answer to its end: text and calls.

    Args:
        tools: by name.
    """
    reader = CallReader(source, tools)
    mark = yield from _find_first(reader, family)
    while mark is not None:
        try:
            yield from family.read(reader, mark)
        except MalformedError:
            if (part := reader.give_up()) is not None:
                yield part
        else:
            source.keep()
        mark = yield from _find_next(reader, family)


def _find_first(reader: CallReader, family: ToolCallFormat) -> Reading[str | None]:
    if family.is_bare:
        yield from reader.source.skip_space()
        if (yield from reader.source.peek()) == "{":
            return ""
    return (yield from _find_next(reader, family))


def _find_next(reader: CallReader, family: ToolCallFormat) -> Reading[str | None]:
    return (yield from reader.source.pass_text(family.marks, drops_last_space=reader.num_calls > 0))


# Detects a model's tool-call format from its chat template.


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
