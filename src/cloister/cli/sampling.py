"""Sampling options of the verbs that generate text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
import typer

from cloister.types.request import SamplingParams

PANEL = "Sampling"

MaxTokens = Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1, rich_help_panel=PANEL)]
Temperature = Annotated[
    float | None, typer.Option(help="0 takes the most likely token; unset, as the model says.", min=0, rich_help_panel=PANEL)
]
TopP = Annotated[float | None, typer.Option(help="Nucleus sampling.", min=0, max=1, rich_help_panel=PANEL)]
TopK = Annotated[int | None, typer.Option(help="Only the k most likely tokens.", min=0, rich_help_panel=PANEL)]
Seed = Annotated[int | None, typer.Option(help="Makes the answer repeatable.", rich_help_panel=PANEL)]


def choose_sampling(defaults: SamplingParams, given: Mapping[str, object]) -> SamplingParams:
    """Returns the model's own defaults with what was given in their place; None was not given."""
    return msgspec.structs.replace(defaults, **{name: value for name, value in given.items() if value is not None})
