"""Figures as lines of JSON, appended as they are measured, so that a run that is cut short loses none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

Record: TypeAlias = dict[str, Any]
"""One figure or finding; `stage` and `kind` say what it is."""


class Records:
    """Appends to a file.

    Args:
        stage: what every record of it says where it comes from.
    """

    def __init__(self, path: Path, stage: str) -> None:
        self._path, self._stage = path, stage

    def add(self, kind: str, **values: object) -> None:
        """Writes one record at once."""
        line = json.dumps({"stage": self._stage, "kind": kind, **values})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def find(self, kind: str) -> Record | None:
        """Returns the first record of a kind that this or an earlier stage wrote."""
        return next((record for record in read_records(self._path) if record["kind"] == kind), None)


def read_records(path: Path) -> Sequence[Record]:
    """Returns the whole lines of a file; the last one may have been cut short."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records
