"""What a gateway might do to a part of the victim's requests for nodes that are not captured."""

from __future__ import annotations

from enum import StrEnum


class Attack(StrEnum):
    """An attack by name."""

    NONE = "none"
    STEER = "steer"
    """Delivers them to the captured node."""
    DROP = "drop"
    """Says that the node that was drawn is away."""
