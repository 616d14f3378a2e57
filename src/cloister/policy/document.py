"""The matrix as Markdown for `docs/threats.md` and as plain data for `--json`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Final

from cloister.policy.features import ALWAYS_THERE, FEATURES, Feature, judged_apart
from cloister.policy.matrix import REQUIREMENTS, ROWS, Entry, find_row, rows_in_build
from cloister.policy.verdict import Profile, Residue, Row, Ruling, Steering, Verdict
from cloister.types.threat import Requirement

_HEAD = """# Threats

<!-- Printed from the code by `cloister policy show --markdown`; do not edit. -->

The threats of every feature of a language-model server, the state that it leaves, and how each privacy profile treats it.
[Privacy](privacy.md) explains the profiles. A feature is *in this build* when an implementation is registered or declared
in the code; the other rows state the requirements for adding one."""

_PROFILES = """A rule is named `T6.<row>.<profile>`, or `T6.<row>.<part>.<profile>` if a part of a row has its own verdict.
**Allowed**: no condition. **Mitigated**: allowed, because the condition in the cell is met. **Refused**: no flag, config file
or request can switch it on, and the refusal names the rule."""


NO_LETTERS: Final = (
    "`-` is none of the five, and `- (T with flip)` none, but T if roles of replicas flip while they run (`--rebalance`)"
)
"""What stands in place of letters."""


def show_letters(row: Row) -> str:
    """Returns the row's threats as letters in the order S E P T V, or `-`."""
    letters = "".join(r.value for r in Requirement if r in row.threat.threats) or "-"
    return f"{letters} ({row.threat_note})" if row.threat_note else letters


def show_residue(row: Row) -> str:
    """Returns the residual state and its location, or `-`."""
    return ", ".join(filter(None, (row.threat.residue, *row.threat.where))) or "-"


def to_markdown(entries: Sequence[Entry]) -> str:
    """Returns the whole of `docs/threats.md`.

    Args:
        entries: features of this build (`matrix.gather`).
    """
    in_build = rows_in_build(entries)
    sections = (
        _HEAD,
        "## The five requirements",
        "\n".join(f"- **{r}** {name}: {meaning}." for r, (name, meaning) in REQUIREMENTS.items()),
        "## Optimisation and threat",
        f"{NO_LETTERS}.",
        _table(
            ("feature", "threat", "residue, where", "attack", "mitigation", "in this build"),
            (
                (
                    r.name,
                    show_letters(r),
                    show_residue(r),
                    r.threat.attack or "-",
                    *r.threat.mitigations,
                    "yes" if r in in_build else "no",
                )
                for r in ROWS
            ),
        ),
        "## Verdicts of the profiles",
        _PROFILES,
        _table(("feature", "rule", *Profile), ((r.name, f"`T6.{r.slug}`", *_cells(r.rulings)) for r in ROWS)),
        "Parts with their own verdict, and what enables them:",
        _table(
            ("feature", "asked for by", *Profile),
            ((f"`{f.name}`", f.setting, *_cells(f.rulings)) for f in judged_apart()),
        ),
        "## Features of this build",
        _table(
            ("kind", "name", "row", "threat"),
            ((e.kind, f"`{e.name}`", e.threat.row, show_letters(find_row(e.threat.row))) for e in entries),
        ),
        "## Taxonomy of residue",
        _table(
            ("feature", "state that stays", "where", "mitigation", "leak", "inference", "access pattern", "difference"),
            ((r.feature, r.state, ", ".join(r.where), r.mitigation, *_attacks(r)) for r in (row.residue for row in ROWS) if r),
        ),
        "## Steering (non-targetability)",
        _table(
            ("feature", "raises hits", "lowers misses"),
            ((s.feature, s.raises_hits, s.lowers_misses) for s in (row.steering for row in ROWS) if s),
        ),
    )
    return "\n\n".join(sections) + "\n"


def to_data(entries: Sequence[Entry], profiles: Iterable[Profile] = Profile) -> dict[str, object]:
    """Returns the matrix as JSON-compatible lists and dicts, with the rulings of `profiles`."""
    profiles = tuple(profiles)
    in_build = rows_in_build(entries)
    return {
        "rows": [
            {
                "feature": row.name,
                "threats": [r.value for r in Requirement if r in row.threat.threats],
                "threat_note": row.threat_note,
                "residue": row.threat.residue,
                "where": list(row.threat.where),
                "attack": row.threat.attack,
                "mitigations": list(row.threat.mitigations),
                "in_build": row in in_build,
                "rulings": _rulings_data(row.rulings, profiles),
            }
            for row in ROWS
        ],
        "features": [
            {"feature": f.name, "setting": f.setting, "rulings": _rulings_data(f.rulings, profiles)} for f in FEATURES.values()
        ],
        "entries": [{"kind": e.kind, "name": e.name, "row": e.threat.row} for e in entries],
        "residues": [_taxonomy_data(row.slug, row.residue) for row in ROWS if row.residue],
        "steering": [_taxonomy_data(row.slug, row.steering) for row in ROWS if row.steering],
    }


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = tuple(head)
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _cells(rulings: Mapping[Profile, Ruling]) -> tuple[str, ...]:
    return tuple(f"**{rulings[p].verdict}**: {rulings[p].text}" for p in Profile)


def _attacks(residue: Residue) -> tuple[str, ...]:
    kinds = (residue.leak, residue.inference, residue.access_pattern, residue.difference)
    return tuple("x" if kind else "" for kind in kinds)


def _rulings_data(rulings: Mapping[Profile, Ruling], profiles: Iterable[Profile]) -> dict[str, object]:
    return {p.value: asdict(rulings[p]) for p in profiles}


def _taxonomy_data(slug: str, entry: Residue | Steering) -> dict[str, object]:
    return {"feature": entry.feature, "slug": slug, **asdict(entry)}


# Differences between two privacy profiles.


def all_features() -> tuple[Feature, ...]:
    """Returns the optional features of this build, then those that are always on."""
    return (*FEATURES.values(), *ALWAYS_THERE)


def differing_features(first: Profile, second: Profile) -> Iterator[Feature]:
    """Yields the features that two profiles treat differently: another verdict, or another condition for a mitigated
    feature."""
    for feature in all_features():
        ours, theirs = feature.rulings[first], feature.rulings[second]
        is_conditional = ours.verdict is Verdict.MITIGATED
        if ours.verdict is not theirs.verdict or (is_conditional and ours.text != theirs.text):
            yield feature


def compare_profiles(first: Profile, second: Profile) -> dict[str, object]:
    """Returns `differing_features` as JSON-compatible lists and dicts."""
    return {
        "profiles": [first.value, second.value],
        "features": [
            {
                "feature": feature.title,
                "setting": feature.setting,
                "does": feature.does,
                "endangers": feature.endangers,
                **{profile.value: asdict(feature.rulings[profile]) for profile in (first, second)},
            }
            for feature in differing_features(first, second)
        ],
    }
