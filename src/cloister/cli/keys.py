"""`cloister keys`: make, list and remove API keys. Only their digests are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cloister.cli.console import print_table
from cloister.policy.credentials import MAX_PRIORITY, MIN_PRIORITY, Credentials
from cloister.policy.keyfile import locked, read_credentials, write_credentials
from cloister.policy.quotas import KeyQuota

app = typer.Typer(help="Make, list and remove API keys.", no_args_is_help=True)

KeyFile = Annotated[Path, typer.Option("--file", help="The file of hashed API keys.", metavar="FILE")]
Rpm = Annotated[int | None, typer.Option("--rpm", help="Requests that may begin in a minute.", min=0)]
Concurrent = Annotated[int | None, typer.Option("--concurrent", help="Requests that may be open at once.", min=0)]
TokensPerDay = Annotated[
    int | None, typer.Option("--tokens-per-day", help="Tokens of prompts and answers in a day (UTC).", min=0)
]
DEFAULT_FILE = Path("~/.config/cloister/keys.json")


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="Name of the key.")],
    tenant: Annotated[str | None, typer.Option(help="Tenant of the key; unset, a tenant with the key's name.")] = None,
    priority: Annotated[int, typer.Option(help="Its class; smaller is more urgent.", min=MIN_PRIORITY, max=MAX_PRIORITY)] = 0,
    rpm: Rpm = None,
    concurrent: Concurrent = None,
    tokens_per_day: TokensPerDay = None,
    operator: Annotated[bool, typer.Option(help="Its holder may load and unload adapters while the server runs.")] = False,
    file: KeyFile = DEFAULT_FILE,
) -> None:
    """Make an API key and print it once. Keys of one tenant share cached prefixes and one fair share.

    Limits apply to the key, not to its tenant; unset or 0 is no limit.
    """
    with locked(file) as path:
        before = read_credentials(path) if path.exists() else Credentials.empty()
        credentials, api_key = before.add(
            name,
            tenant=tenant,
            priority=priority,
            limits=KeyQuota(rpm or None, concurrent or None, tokens_per_day or None),
            is_operator=operator,
        )
        write_credentials(path, credentials)
    typer.echo(api_key)
    typer.echo(f"This key is not shown again. Serve with: cloister serve --api-keys {path}", err=True)


@app.command("list")
def list_keys(
    file: KeyFile = DEFAULT_FILE, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """List the names of the keys, their tenants, classes and limits."""
    keys = read_credentials(file).keys
    if as_json:
        shown = [{"name": k.name, "tenant": k.tenant, "priority": k.priority, **dict(k.limits.items())} for k in keys]
        typer.echo(json.dumps(shown, indent=2))
        return
    headers = ("name", "tenant", "priority", "requests/min", "at once", "tokens/day")
    limits = (["" if value is None else f"{value:,}" for _, value in key.limits.items()] for key in keys)
    rows = [(key.name, key.tenant, key.priority, *limited) for key, limited in zip(keys, limits, strict=True)]
    print_table("", headers, rows)


@app.command()
def limit(
    name: Annotated[str, typer.Argument(help="Which key.")],
    rpm: Rpm = None,
    concurrent: Concurrent = None,
    tokens_per_day: TokensPerDay = None,
    file: KeyFile = DEFAULT_FILE,
) -> None:
    """Change the limits of a key; 0 removes a limit, and omitted ones are kept. A running server applies the change."""
    with locked(file) as path:
        credentials = read_credentials(path)
        before = next((key.limits for key in credentials.keys if key.name == name), KeyQuota())
        given = (rpm, concurrent, tokens_per_day)
        after = KeyQuota(*((old if new is None else new or None) for (_, old), new in zip(before.items(), given, strict=True)))
        write_credentials(path, credentials.limit(name, after))


@app.command()
def remove(name: Annotated[str, typer.Argument(help="Which key.")], file: KeyFile = DEFAULT_FILE) -> None:
    """Remove a key. A running server rejects it within seconds; requests already running finish."""
    with locked(file) as path:
        write_credentials(path, read_credentials(path).remove(name))
    typer.echo(f"Removed {name}.", err=True)
