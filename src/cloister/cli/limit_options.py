"""Options that move a client's limits on who is in the cloud; the same for every verb that draws or checks."""

from __future__ import annotations

from typing import Annotated

import typer

LeastPresent = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Part of the membership's capacity that the epoch has to name.")
]
MostShare = Annotated[float, typer.Option(min=0.0, max=1.0, help="Most of the capacity that one node may have.")]
AcceptMembership = Annotated[
    int, typer.Option(min=0, help="Take the membership of this number, however much it changed within a day.", metavar="NUMBER")
]
AcceptMaskedChips = Annotated[
    bool,
    typer.Option(
        "--accept-masked-chips", help="Take several nodes on hardware whose evidence names no processor; two may be on one."
    ),
]
LEAST_PRESENT, MOST_SHARE = 0.66, 0.5
"""`client.limits.Limits` has the same; a test holds them together."""
