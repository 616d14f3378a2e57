"""Names of models as Ollama's clients write them: `NAME:latest` is `NAME`. Pure."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

LATEST: Final = ":latest"


def served_name(name: str | None, served: Container[str]) -> str | None:
    """Returns the name under which a model is served: `name` itself, or without the tag that clients add."""
    if name is None or name in served or not name.endswith(LATEST):
        return name
    return name.removesuffix(LATEST)
