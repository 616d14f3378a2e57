"""What this build has: every registered implementation and declared feature, by the row of the matrix it points to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cloister.policy.matrix import ROWS, find_row
from cloister.policy.verdict import Row
from cloister.types.registry import Registry
from cloister.types.threat import ThreatProfile


@dataclass(frozen=True, slots=True)
class Entry:
    """One feature of this build.

    Attributes:
        kind: the registry's kind, or "feature" for one that is not chosen by name.
    """

    kind: str
    name: str
    threat: ThreatProfile

    @classmethod
    def of(cls, registry: Registry[Any], name: str) -> Entry:
        """Returns the entry of an implementation (ConfigError when there is none)."""
        return cls(registry.kind, name, registry.threat(name))


def gather(registries: Iterable[Registry[Any]], declared: Mapping[str, ThreatProfile]) -> tuple[Entry, ...]:
    """Collects what the rooms registered and declared.

    Args:
        declared: name -> threat profile of features that are not chosen by name.

    Raises:
        LookupError: an entry points to no row of the matrix.
        ValueError: an entry owns up to other threats than its row has.
    """
    entries = [Entry(registry.kind, name, threat) for registry in registries for name, threat in registry]
    entries += [Entry("feature", name, threat) for name, threat in declared.items()]
    for entry in entries:
        if entry.threat.threats != find_row(entry.threat.row).threat.threats:
            raise ValueError(f"the {entry.kind} {entry.name!r} and its row {entry.threat.row!r} differ in threats")
    return tuple(entries)


def rows_in_build(entries: Iterable[Entry]) -> tuple[Row, ...]:
    """Rows of which this build has at least one feature, in the matrix's order."""
    present = {entry.threat.row for entry in entries}
    return tuple(row for row in ROWS if row.name in present)
