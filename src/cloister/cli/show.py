"""`cloister show`: what is known of one model, on this machine or in the catalogue."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from cloister.cli.console import out, print_json


def show(
    name: Annotated[str, typer.Argument(help="Model, as `--model` takes it, or of the catalogue.")],
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
        out.print(f"{key:{width}}  {shown}", markup=False, highlight=False, soft_wrap=True)


def describe_model(name: str) -> dict[str, Any]:
    """Returns what is known of a model, by headings for people; what is unknown is left out.

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
