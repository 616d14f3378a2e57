"""What a tokenizer puts around a plain text: the `post_processor` of tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def surround(before: Sequence[tuple[str, int]], after: Sequence[tuple[str, int]]) -> dict[str, Any] | None:
    """Returns a `post_processor` that puts (token, id) before and after a text; None where there are none."""
    if not before and not after:
        return None

    def places(tokens: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": token, "type_id": 0}} for token, _ in tokens]

    first, second = ({"Sequence": {"id": name, "type_id": place}} for place, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [*places(before), first, *places(after)],
        "pair": [*places(before), first, *places(after), second],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]} for token, token_id in (*before, *after)},
    }
