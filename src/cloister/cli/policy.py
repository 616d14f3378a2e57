"""`cloister policy`: how each privacy profile treats each feature."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Annotated, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cloister.cli.console import out, print_json
from cloister.policy import PROFILING_THREAT, Entry, Profile, Ruling, Verdict, gather
from cloister.policy.counts import WINDOWS_THREAT
from cloister.policy.document import (
    NO_LETTERS,
    all_features,
    compare_profiles,
    differing_features,
    show_letters,
    to_data,
    to_markdown,
)
from cloister.policy.features import Feature, declared_threats, judged_apart
from cloister.policy.matrix import ROWS, row_of, rows_in_build
from cloister.trust.shape import SHAPING_THREAT

app = typer.Typer(help="What each privacy profile allows, mitigates and refuses.", no_args_is_help=True)

_STYLES = {Verdict.ALLOWED: "green", Verdict.MITIGATED: "yellow", Verdict.REFUSED: "red"}


@app.callback()
def policy() -> None:
    """What each privacy profile allows, mitigates and refuses."""


@app.command()
def show(
    profile: Annotated[Profile | None, typer.Option(help="Profile to show; unset, open.", show_default=False)] = None,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Print the threat matrix: every row, of all profiles or with the rules of one.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/threats.md.")] = False,
) -> None:
    """Show a profile: for every feature its purpose, its threats, and the mitigation."""
    if markdown and (as_json or profile or matrix):
        raise typer.BadParameter("docs/threats.md has every profile; give --markdown by itself")
    if not (markdown or as_json or matrix):
        print_profile(profile or Profile.OPEN)
        return
    entries = list_entries()
    if markdown:
        typer.echo(to_markdown(entries), nl=False)
    elif as_json:
        typer.echo(json.dumps(to_data(entries, [profile] if profile else Profile), indent=2))
    else:
        _print_tables(entries, profile)


@app.command()
def compare(
    first: Annotated[Profile, typer.Argument(help="The profile to compare.", show_default=False)],
    second: Annotated[Profile, typer.Argument(help="The profile to compare it with.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the differences between two profiles: each feature that they treat differently, with both treatments."""
    if first is second:
        raise typer.BadParameter("name two different profiles")
    if as_json:
        print_json(compare_profiles(first, second))
    else:
        print_comparison(first, second)


def list_entries() -> tuple[Entry, ...]:
    """All features of this build: registered implementations, then those that packages declare."""
    from cloister import kv, scheduler
    from cloister.backends import BACKENDS
    from cloister.client.node_selection import DRAW_THREAT
    from cloister.cluster.hot_prefixes import DUPLICATION_THREAT
    from cloister.cluster.migration import MIGRATION_THREAT
    from cloister.cluster.roles import DISAGGREGATION_THREAT, FLIP_THREAT
    from cloister.cluster.routers import ROUTERS
    from cloister.cluster.scaling import SCALING_THREAT
    from cloister.engine.kv_tier_storage import KV_TIERS
    from cloister.engine.kv_transports import KV_TRANSPORTS
    from cloister.executor.drafters import DRAFTERS
    from cloister.kv.tier_admission import TIER_ADMISSIONS
    from cloister.scheduler.layerwise import LAYERWISE_THREAT
    from cloister.scheduler.policies import POLICIES
    from cloister.scheduler.speculation import SPECULATION_THREAT

    importlib.import_module("cloister.backends.torch")  # registers its entry in BACKENDS, without importing torch
    declared = {
        "prefix cache": kv.PREFIX_CACHE_THREAT,
        "step budget": scheduler.BUDGET_THREAT,
        "prompts layer by layer": LAYERWISE_THREAT,
        "draft length": SPECULATION_THREAT,
        "metrics": PROFILING_THREAT,
        "shaped streams": SHAPING_THREAT,
        "draw of nodes": DRAW_THREAT,
        "copies of hot prefixes": DUPLICATION_THREAT,
        "moves of running requests": MIGRATION_THREAT,
        "roles of replicas": DISAGGREGATION_THREAT,
        "flips of roles": FLIP_THREAT,
        "replicas that come and go": SCALING_THREAT,
        "metrics of sealed nodes": WINDOWS_THREAT,
        **declared_threats(),
    }
    return gather((BACKENDS, POLICIES, ROUTERS, DRAFTERS, KV_TRANSPORTS, KV_TIERS, TIER_ADMISSIONS), declared)


def _print_tables(entries: tuple[Entry, ...], profile: Profile | None) -> None:
    console = Console()
    in_build = rows_in_build(entries)
    matrix = _start_table("Threat matrix", profile)
    for row in ROWS:
        about = (row.name, show_letters(row), "yes" if row in in_build else "no")
        matrix.add_row(*about, *_show_rulings(row.rulings, profile))
    console.print(matrix)
    parts = _start_table("Parts with their own verdict", profile)
    for feature in judged_apart():
        parts.add_row(feature.name, show_letters(row_of(feature.slug)), "yes", *_show_rulings(feature.rulings, profile))
    console.print(parts)
    console.print(
        "S stateless computation, E enforceable guarantees, P no privileged runtime access, T non-targetability, "
        f"V verifiable transparency; {NO_LETTERS.replace('`', '')}. "
        "--profile NAME shows the conditions; --markdown and --json show residue and attacks too.",
        style="dim",
    )


def _start_table(title: str, profile: Profile | None) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_lines=profile is not None)
    table.add_column("feature", min_width=16)
    table.add_column("threat", max_width=6)
    table.add_column("built")
    for column in (profile,) if profile else tuple(Profile):
        table.add_column(column, no_wrap=True)
    if profile:
        table.add_column("condition, or reason", overflow="fold")
    return table


def _show_rulings(rulings: Mapping[Profile, Ruling], profile: Profile | None) -> list[str]:
    if profile is None:
        return [_show_verdict(rulings[p]) for p in Profile]
    ruling = rulings[profile]
    return [_show_verdict(ruling), f"{ruling.text} [dim]({ruling.rule})[/]"]


def _show_verdict(ruling: Ruling) -> str:
    return f"[{_STYLES[ruling.verdict]}]{ruling.verdict}[/]"


HEADINGS: Final = {
    Verdict.REFUSED: ("Refused", "red", "no flag, config file or request switches these on"),
    Verdict.MITIGATED: ("Allowed with a mitigation", "yellow", ""),
    Verdict.ALLOWED: ("Allowed without conditions", "green", ""),
}
ABOUT: Final = {
    Profile.OPEN: "one person uses this machine; default on loopback without API keys",
    Profile.TEAM: "people share a server and trust its operator; default elsewhere, and with API keys",
    Profile.PRIVATE: "people who need not trust other users or the operator; default on a sealed node",
    Profile.PARANOID: "nothing is reused, and the network sees one shape",
}


def print_profile(profile: Profile) -> None:
    """Prints what a profile refuses, allows with a mitigation, and allows without conditions."""
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
    """Prints each of two profiles' rulings on features that they treat differently."""
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
    out.print(f"\n{num_alike} other features are treated the same.", style="dim", highlight=False)


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
