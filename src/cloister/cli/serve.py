"""`cloister serve`: the OpenAI-compatible HTTP server."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from cloister.cli.console import out, print_json, print_table
from cloister.cli.options import GivenSettings, with_settings
from cloister.types.config import EngineConfig, ServerConfig
from cloister.types.setting_groups import group_of, list_groups

if TYPE_CHECKING:
    from cloister.types.config import SettingReason


@with_settings(EngineConfig, ServerConfig, rare=["as_json"])
def serve(
    settings: GivenSettings,
    explain: Annotated[bool, typer.Option("--explain", help="Print every setting with its reason, and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --explain: print JSON.")] = False,
) -> None:
    """Serve a model on the OpenAI API until SIGTERM or Ctrl-C."""
    if as_json and not explain:
        raise typer.BadParameter("it needs --explain", param_hint="--json")
    from cloister.launch import resolve_settings
    from cloister.launch.default_model import fetch_model

    resolved = fetch_model(resolve_settings(settings.flags, settings.config_file), may_pull=not explain)
    if explain:
        _explain([*resolved.engine.reasons, *resolved.server.reasons], as_json)
        return
    from cloister.engine.spawning import discard_early_template
    from cloister.launch import launch_sealed
    from cloister.launch import serve as run_server
    from cloister.trust.hardening import sealed

    if resolved.server.config.sealed and sealed() is None:
        discard_early_template()  # only the settings file says that it is sealed; the launcher must not have child processes
        launch_sealed(resolved, sys.argv[1:], settings.config_file)
    raise typer.Exit(run_server(resolved, partial(print, flush=True)))  # flush: a program may read the address from a pipe


def _explain(reasons: list[SettingReason], as_json: bool) -> None:
    if as_json:
        print_json([{"setting": r.name, "group": group_of(r.name), "value": r.value, "why": r.why} for r in reasons])
        return
    named = {reason.name: reason for reason in reasons}
    for group, names in list_groups().items():
        rows = [(name.replace("_", "-"), show_value(named[name].value), named[name].why) for name in names]
        print_table(group.capitalize(), ("setting", "value", "why"), rows)
    out.print("What is unset is chosen from the model when it is loaded; the memory budget is printed then.", style="dim")


def show_value(value: object) -> str:
    """Returns a setting's value in the notation of users."""
    if value is None:
        return "unset"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
