"""What a privacy profile does, in an operator's words."""

from __future__ import annotations

from typing import Final

from rich.markup import escape
from rich.table import Table

from cloister.cli.console import out
from cloister.policy import Profile, Verdict
from cloister.policy.document import all_features, differing_features
from cloister.policy.features import Feature

HEADINGS: Final = {
    Verdict.REFUSED: ("Refused", "red", "no flag, config file or request switches these on"),
    Verdict.MITIGATED: ("Allowed, since something is done about it", "yellow", ""),
    Verdict.ALLOWED: ("Allowed as it is", "green", ""),
}
ABOUT: Final = {
    Profile.OPEN: "one person uses this machine; chosen by itself on loopback without API keys",
    Profile.TEAM: "people share a server and trust its operator; chosen by itself elsewhere, and with API keys",
    Profile.PRIVATE: "people who need not trust other users or the operator; chosen by itself on a sealed node",
    Profile.PARANOID: "nothing is reused, and the network sees one shape",
}


def print_profile(profile: Profile) -> None:
    """Prints what a profile refuses, allows with something done about it, and allows as it is."""
    features = all_features()
    out.print(f"Profile {profile}: {ABOUT[profile]}.", style="bold", highlight=False)
    for verdict, (heading, style, note) in HEADINGS.items():
        judged = [feature for feature in features if feature.rulings[profile].verdict is verdict]
        if judged:
            out.print(f"\n{heading}{': ' if note else ''}{note}", style=f"bold {style}", highlight=False)
        for feature in judged:
            _print_feature(feature, profile)
    others = ", ".join(other for other in Profile if other is not profile)
    out.print(
        f"\n--profile NAME shows another ({others}), `policy compare` what differs between two, --matrix the threat matrix.",
        style="dim",
        highlight=False,
    )


def print_comparison(first: Profile, second: Profile) -> None:
    """Prints what each of two profiles says of the features that they do not treat alike."""
    features = list(differing_features(first, second))
    num_alike = len(all_features()) - len(features)
    for profile in (first, second):
        out.print(f"{profile}: {ABOUT[profile]}.", style="bold", highlight=False)
    for feature in features:
        table = _start_feature(feature)
        for profile in (first, second):
            ruling = feature.rulings[profile]
            table.add_row(f"  {profile}", f"[{HEADINGS[ruling.verdict][1]}]{ruling.verdict}[/]: {escape(ruling.text)}")
        _print_titled(feature, table)
    out.print(f"\n{num_alike} other features are treated alike.", style="dim", highlight=False)


def _print_feature(feature: Feature, profile: Profile) -> None:
    ruling = feature.rulings[profile]
    table = _start_feature(feature)
    table.add_row(f"  {profile}", ruling.text)
    if ruling.verdict is Verdict.REFUSED and feature.instead:
        table.add_row("  instead", feature.instead)
    _print_titled(feature, table)


def _start_feature(feature: Feature) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=11)
    table.add_column(overflow="fold")
    table.add_row("  does", feature.does)
    table.add_row("  endangers", feature.endangers)
    return table


def _print_titled(feature: Feature, table: Table) -> None:
    asked = f"  ({feature.setting})" if feature.setting else ""
    out.print(f"\n{feature.title}[dim]{asked}[/]", highlight=False, soft_wrap=True)
    out.print(table, highlight=False)
