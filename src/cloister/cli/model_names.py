"""How verbs that run a model find it: by a name on the command line, and where there is none, the default."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from cloister.cli.console import err
from cloister.cli.options import GivenSettings

if TYPE_CHECKING:
    from cloister import LLM
    from cloister.app import Settings

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


def fetch_model(settings: Settings, *, may_pull: bool = True) -> Settings:
    """Returns the settings with a model: the one that was named, or the default; downloads one of the catalogue.

    Args:
        may_pull: False downloads nothing.

    Raises:
        ModelError: the model that was named cannot be fetched.
    """
    from cloister.app.default_model import choose_default_model
    from cloister.models import locate
    from cloister.models.pulling import CATALOGUE

    settings = choose_default_model(settings, _tell, may_pull=may_pull)
    if may_pull and settings.engine.config.model in CATALOGUE and not settings.models:
        locate(settings.engine.config.model, progress=True)  # here, where its progress bar is the only thing that is drawn
    return settings


def open_model(settings: GivenSettings) -> LLM:
    """Returns an `LLM` for the settings of a verb, with its model fetched and loaded."""
    from cloister.app import resolve_settings
    from cloister.llm import LLM

    resolved = fetch_model(resolve_settings(settings.flags, settings.config_file, listens=False))
    with err.status("Loading the model"):
        return LLM.open(resolved)


def _tell(line: str) -> None:
    err.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
