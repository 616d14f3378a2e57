"""`cloister list`, `cloister models`: the models on this machine, their format and size, and what prevents serving them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cloister.cli.console import err, out, print_json, print_table

MIB = 1 << 20


def models(
    directories: Annotated[
        list[Path] | None, typer.Argument(help="Directories to look into, beside the hub's cache.", metavar="[DIRECTORY]...")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models on this machine: embedded, pulled, in the hub's cache, and in the directories given. Reads no weights."""
    from cloister.models.local_models import list_models
    from cloister.types.errors import ModelError

    missing = next((place for place in directories or () if not place.is_dir()), None)
    if missing is not None:
        raise ModelError(f"there is no directory {missing}; give one that holds models", param="directories")
    with err.status("Reading heads"):
        found = list(list_models(directories or ()))
    if as_json:
        print_json([asdict(model) for model in found])
        return
    rows = [(m.name, m.source, m.architecture, m.format, f"{m.size_bytes / MIB:,.0f}") for m in found]
    print_table("Models on this machine", ("--model", "from", "architecture", "weights", "MiB"), rows)
    for model in found:
        if model.obstacle is not None:
            out.print(f"{model.name}: {model.obstacle}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    _print_catalogue({model.name for model in found})


def _print_catalogue(here: set[str]) -> None:
    """Prints which models of the catalogue are not here yet."""
    from cloister.models.pulling import CATALOGUE

    for name, known in CATALOGUE.items():
        if name not in here:
            line = f"`cloister pull {name}` brings {known.title}: {known.download_bytes / 1e6:.0f} MB, {known.licence}"
            out.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
