"""Witnesses given on the command line: `--witness NAME=URL`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cloister.types.errors import ConfigError

if TYPE_CHECKING:
    import httpx

    from cloister.trust.transparency.trust import Trust
    from cloister.trust.transparency.witness import HttpWitness


def find_witnesses(given: Sequence[str], trust: Trust, client: httpx.AsyncClient) -> list[HttpWitness]:
    """Returns the given witnesses.

    Args:
        given: each as NAME=URL.

    Raises:
        ConfigError: one is not in the trust file, or its URL is invalid.
    """
    from cloister.private.upstream import check_url
    from cloister.trust.transparency.witness import HttpWitness

    known = {key.name: key for key in trust.witnesses}
    found = []
    for each in given:
        name, _, address = each.partition("=")
        if name not in known:
            raise ConfigError(
                f"{each!r} is not a witness of the trust file; its witnesses are {', '.join(known)}", param="witness"
            )
        found.append(HttpWitness(check_url(address, "witness"), known[name], client))
    return found


def open_witnesses(given: Sequence[str], trust: Trust, client: httpx.AsyncClient) -> list[HttpWitness]:
    """Like `find_witnesses`, but raises ConfigError if there are fewer than the trust file requires."""
    found = find_witnesses(given, trust, client)
    if len(found) < trust.threshold:
        raise ConfigError(f"the trust file asks for {trust.threshold} witnesses; give --witness for as many", param="witness")
    return found
