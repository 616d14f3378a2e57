"""Frames of questions and the words around them, read from `wordings.toml`."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Families = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Manner:
    """How one kind of fact is asked for.

    ``sorts`` are words for the sort of thing. ``trained`` and ``held_out`` are its own frames; with ``general`` those of
    ``ABOUT`` are used as well. ``called`` says that people write ``()`` behind the name.
    """

    sorts: tuple[str, ...]
    trained: tuple[str, ...]
    held_out: tuple[str, ...]
    general: bool
    called: bool


_FILE: dict[str, Any] = tomllib.loads((Path(__file__).parent / "wordings.toml").read_text(encoding="utf-8"))


def _lines(text: str) -> tuple[str, ...]:
    return tuple(text.splitlines())


def _families(table: str) -> dict[str, tuple[str, ...]]:
    return {name: _lines(text) for name, text in _FILE[table].items()}


_SHARED = _families("shared")


def _manner(entry: Mapping[str, Any]) -> Manner:
    shared = entry.get("asked_as")
    return Manner(
        sorts=tuple(entry["sorts"]),
        trained=_SHARED[shared] if shared else _lines(entry["trained"]),
        held_out=_SHARED[f"{shared}_held_out"] if shared else _lines(entry["held_out"]),
        general=entry.get("general", True),
        called=entry.get("called", False),
    )


ABOUT: Families = _families("about")
ABOUT_HELD_OUT: Families = _families("about_held_out")
MANNERS: Mapping[str, Manner] = {kind: _manner(entry) for kind, entry in _FILE["manners"].items()}
OPENINGS = _lines(_FILE["openings"])
OPENINGS_HELD_OUT = _lines(_FILE["openings_held_out"])
CLOSINGS = _lines(_FILE["closings"])
CLOSINGS_HELD_OUT = _lines(_FILE["closings_held_out"])
PLACES: Families = {source: tuple(names) for source, names in _FILE["places"].items()}
SHORT_FORMS: Families = {words: tuple(forms) for words, forms in _FILE["short_forms"].items()}
