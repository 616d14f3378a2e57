"""`cloister keys`: make, list and remove API keys. Only their digests are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from cloister.privacy.credentials import MAX_PRIORITY, MIN_PRIORITY, Credentials
from cloister.privacy.keyfile import locked, read_credentials, write_credentials

app = typer.Typer(help="Make, list and remove API keys.", no_args_is_help=True)

KeyFile = Annotated[Path, typer.Option("--file", help="The file of hashed API keys.", metavar="FILE")]
DEFAULT_FILE = Path("~/.config/cloister/keys.json")


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="What to call the key.")],
    tenant: Annotated[str | None, typer.Option(help="Whose key it is; unset, a tenant of the key's own name.")] = None,
    priority: Annotated[int, typer.Option(help="Its class, smaller is more urgent.", min=MIN_PRIORITY, max=MAX_PRIORITY)] = 0,
    file: KeyFile = DEFAULT_FILE,
) -> None:
    """Make an API key and print it once. Keys of one tenant share cached prefixes and one fair share."""
    with locked(file) as path:
        before = read_credentials(path) if path.exists() else Credentials.empty()
        credentials, api_key = before.add(name, tenant=tenant, priority=priority)
        write_credentials(path, credentials)
    typer.echo(api_key)
    typer.echo(f"This key is not shown again. Serve with: cloister serve --api-keys {path}", err=True)


@app.command("list")
def list_keys(
    file: KeyFile = DEFAULT_FILE, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """List the names of the keys, their tenants and classes."""
    keys = read_credentials(file).keys
    if as_json:
        typer.echo(json.dumps([{"name": k.name, "tenant": k.tenant, "priority": k.priority} for k in keys], indent=2))
        return
    table = Table("name", "tenant", "priority")
    for key in keys:
        table.add_row(key.name, key.tenant, str(key.priority))
    Console().print(table)


@app.command()
def remove(name: Annotated[str, typer.Argument(help="Which key.")], file: KeyFile = DEFAULT_FILE) -> None:
    """Remove a key. A running server knows it until it is started again."""
    with locked(file) as path:
        write_credentials(path, read_credentials(path).remove(name))
    typer.echo(f"Removed {name}. Start the server again to lock it out.", err=True)
