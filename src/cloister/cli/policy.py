"""`cloister policy`: how each privacy profile treats each feature."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cloister.cli.console import print_json
from cloister.cli.policy_plain import print_comparison, print_profile
from cloister.policy import PROFILING_THREAT, Entry, Profile, Ruling, Verdict, gather
from cloister.policy.counts import WINDOWS_THREAT
from cloister.policy.document import compare_profiles, show_letters, to_data, to_markdown
from cloister.policy.features import declared_threats, judged_apart
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
    """Say what a profile does: of every feature what it is for, what it endangers, and what is done about that."""
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
    """Say what differs between two profiles: each feature that they treat differently, and how each of the two treats it."""
    if first is second:
        raise typer.BadParameter("name two different profiles")
    if as_json:
        print_json(compare_profiles(first, second))
    else:
        print_comparison(first, second)


def list_entries() -> tuple[Entry, ...]:
    """Everything that this build has: what is registered by name, then what the rooms declare beside their code."""
    from cloister import kv, scheduler
    from cloister.backends.base import BACKENDS
    from cloister.client.node_selection import DRAW_THREAT
    from cloister.executor.drafters import DRAFTERS
    from cloister.scheduler.policies import POLICIES
    from cloister.scheduler.speculation import SPECULATION_THREAT

    importlib.import_module("cloister.backends.torch")  # files its entry in BACKENDS, without importing torch
    declared = {
        "prefix cache": kv.PREFIX_CACHE_THREAT,
        "step budget": scheduler.BUDGET_THREAT,
        "draft length": SPECULATION_THREAT,
        "metrics": PROFILING_THREAT,
        "shaped streams": SHAPING_THREAT,
        "draw of nodes": DRAW_THREAT,
        "metrics of sealed nodes": WINDOWS_THREAT,
        **declared_threats(),
    }
    return gather((BACKENDS, POLICIES, DRAFTERS), declared)


def _print_tables(entries: tuple[Entry, ...], profile: Profile | None) -> None:
    console = Console()
    in_build = rows_in_build(entries)
    matrix = _start_table("Threat matrix", profile)
    for row in ROWS:
        about = (row.name, show_letters(row), "yes" if row in in_build else "no")
        matrix.add_row(*about, *_show_rulings(row.rulings, profile))
    console.print(matrix)
    parts = _start_table("Parts that are judged by themselves", profile)
    for feature in judged_apart():
        parts.add_row(feature.name, show_letters(row_of(feature.slug)), "yes", *_show_rulings(feature.rulings, profile))
    console.print(parts)
    console.print(
        "S stateless computation, E enforceable guarantees, P no privileged runtime access, T non-targetability, "
        "V verifiable transparency. --profile NAME shows what must hold; --markdown and --json show residue and attacks too.",
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
        table.add_column("what must hold, or why", overflow="fold")
    return table


def _show_rulings(rulings: Mapping[Profile, Ruling], profile: Profile | None) -> list[str]:
    if profile is None:
        return [_show_verdict(rulings[p]) for p in Profile]
    ruling = rulings[profile]
    return [_show_verdict(ruling), f"{ruling.text} [dim]({ruling.rule})[/]"]


def _show_verdict(ruling: Ruling) -> str:
    return f"[{_STYLES[ruling.verdict]}]{ruling.verdict}[/]"
