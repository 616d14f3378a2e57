"""Witnesses that are named on the command line: `--witness NAME=URL`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cloister.types.errors import ConfigError

if TYPE_CHECKING:
    import httpx

    from cloister.trust.transparency.trust import Trust
    from cloister.trust.transparency.witness import HttpWitness


def open_witnesses(given: Sequence[str], trust: Trust, client: httpx.AsyncClient) -> list[HttpWitness]:
    """Returns the witnesses that are named, at least as many as the trust file requires.

    Args:
        given: each as NAME=URL.

    Raises:
        ConfigError: one is not in the trust file, its URL is none, or they are too few.
    """
    from cloister.private.upstream import check_url
    from cloister.trust.transparency.witness import HttpWitness

    known = {key.name: key for key in trust.witnesses}
    found = []
    for each in given:
        name, _, address = each.partition("=")
        if name not in known:
            raise ConfigError(f"{each!r} names no witness of the trust file; those are {', '.join(known)}", param="witness")
        found.append(HttpWitness(check_url(address, "witness"), known[name], client))
    if len(found) < trust.threshold:
        raise ConfigError(f"the trust file asks for {trust.threshold} witnesses; give --witness for as many", param="witness")
    return found
