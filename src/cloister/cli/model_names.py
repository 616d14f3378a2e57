"""A model that is named as an argument."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from cloister.cli.options import GivenSettings

ModelName = Annotated[
    str | None,
    typer.Argument(help="Model, as `--model` takes it; unset, smollm2-135m in the profile `open`.", metavar="[MODEL]"),
]


def with_model(settings: GivenSettings, name: str | None) -> GivenSettings:
    """Returns the settings with a model that was named as an argument, None for none."""
    if name is None:
        return settings
    if "model" in settings.flags:
        raise typer.BadParameter("name the model once", param_hint="--model")
    return replace(settings, flags={**settings.flags, "model": name})
