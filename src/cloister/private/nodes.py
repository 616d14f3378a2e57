"""Where nodes are, by the names that clients draw: SHA-256 of their key configurations, which change every hour.

The gateway is told addresses; names and evidence it asks of the nodes themselves. A node that lies about its name gets
requests that it cannot open, for they are sealed to the key that the name is the digest of.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cloister.private.problems import ProblemError
from cloister.private.upstream import Upstream
from cloister.trust.sealing import NODE_KEY_LIFE_S

KEYS_PATH: Final = "/.well-known/ohttp-gateway"
EVIDENCE_PATH: Final = "/.well-known/cloister/evidence"
LOOK_EVERY_S: Final = 15.0
LOOK_AGAIN_S: Final = 1.0
"""How soon the nodes are asked again when a name is not known."""


@dataclass
class _Known:
    url: str
    seen_s: float
    evidence: bytes | None


class NodeBook:
    """Names, addresses and evidence of nodes.

    Args:
        urls: of the nodes, without a slash at the end.
        now: seconds on a clock that never goes back.
    """

    def __init__(self, urls: Sequence[str], upstream: Upstream, now: Callable[[], float] = time.monotonic) -> None:
        self._urls = tuple(urls)
        self._upstream = upstream
        self._now = now
        self._known: dict[str, _Known] = {}
        self._evidence: dict[str, tuple[bytes, float]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._looked_s = float("-inf")

    @property
    def node_ids(self) -> dict[str, str]:
        """The address of each name that is known."""
        return {node_id: known.url for node_id, known in self._known.items()}

    async def find(self, node_id: str) -> str | None:
        """Returns the address of a node; one that is not known is asked for, at most once in `LOOK_AGAIN_S`."""
        if node_id not in self._known and self._now() - self._looked_s >= LOOK_AGAIN_S:
            await self.look()
        known = self._known.get(node_id)
        return known.url if known is not None else None

    @property
    def evidence(self) -> tuple[bytes, ...]:
        """The evidence document that each node showed last."""
        latest = {known.url: known.evidence for known in sorted(self._known.values(), key=lambda known: known.seen_s)}
        return tuple(document for document in latest.values() if document is not None)

    def find_evidence(self, digest: str) -> bytes | None:
        """Returns the evidence document with this SHA-256, in hex."""
        document, _ = self._evidence.get(digest, (None, 0.0))
        return document

    def change_urls(self, urls: Sequence[str]) -> None:
        """Takes other addresses; names at addresses that are gone are forgotten."""
        self._urls = tuple(urls)
        self._known = {node_id: known for node_id, known in self._known.items() if known.url in self._urls}

    async def look(self) -> None:
        """Asks every node for its current key and evidence; whoever comes meanwhile waits for the same answers."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        await asyncio.shield(self._looking)

    async def look_forever(self) -> None:
        """Asks the nodes again and again, until it is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _look(self) -> None:
        await asyncio.gather(*map(self._ask, self._urls))
        self._looked_s = now_s = self._now()
        self._known = {n: known for n, known in self._known.items() if now_s - known.seen_s < NODE_KEY_LIFE_S}
        self._evidence = {d: (one, at) for d, (one, at) in self._evidence.items() if now_s - at < NODE_KEY_LIFE_S}

    async def _ask(self, url: str) -> None:
        try:
            keys = await self._upstream.get(url + KEYS_PATH)
        except ProblemError:
            return  # a node that is away keeps its name for as long as its key lives
        try:
            evidence = await self._upstream.get(url + EVIDENCE_PATH)
        except ProblemError:
            evidence = None  # it has none, or none yet
        if evidence is not None:
            self._evidence[hashlib.sha256(evidence).hexdigest()] = (evidence, self._now())
        self._known[hashlib.sha256(keys).hexdigest()] = _Known(url, self._now(), evidence)
