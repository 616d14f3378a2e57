"""`cloister rm`: deletes models that were pulled, and those of the hub's cache."""

from __future__ import annotations

from typing import Annotated

import typer

from cloister.cli.console import err


def remove(
    names: Annotated[list[str], typer.Argument(help="Models, as `cloister list` names them.", metavar="NAME...")],
) -> None:
    """Delete models that were pulled, or that lie in the hub's cache."""
    from cloister.models.hub import remove_cached
    from cloister.models.location import embedded_names, is_hub_name
    from cloister.models.pulling import Store
    from cloister.types.errors import ModelError

    for name in names:
        if name in embedded_names():
            raise ModelError(f"{name} is a part of the package and stays", param="name")
        freed_bytes = remove_cached(name) if is_hub_name(name) else Store().remove(name)
        err.print(f"{name} is deleted, {freed_bytes / 1e6:,.0f} MB", highlight=False, markup=False)
