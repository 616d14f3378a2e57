"""Maps node names to addresses. A name is the SHA-256 of a node's key configuration, which changes every hour.

The gateway is configured with addresses and fetches names and evidence from the nodes. A node that states a wrong name gets
requests that it cannot open: they are sealed to the key whose digest the name is.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
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
"""Shortest interval between queries for an unknown name."""

_logger = logging.getLogger(__name__)


@dataclass
class _Known:
    url: str
    seen_s: float
    evidence: bytes | None


class NodeBook:
    """Names, addresses and evidence of nodes.

    Args:
        urls: of the nodes, without a trailing slash.
        now: seconds on a clock that never goes back.
    """

    def __init__(self, urls: Sequence[str], upstream: Upstream, now: Callable[[], float] = time.monotonic) -> None:
        self._urls = tuple(urls)
        self._upstream = upstream
        self._now = now
        self._known: dict[str, _Known] = {}
        self._evidence: dict[str, tuple[bytes, float]] = {}
        self._silent_urls: set[str] = set()
        self._looking: asyncio.Task[None] | None = None
        self._looked_s = float("-inf")

    @property
    def node_ids(self) -> dict[str, str]:
        """The address of each known name."""
        return {node_id: known.url for node_id, known in self._known.items()}

    async def find(self, node_id: str) -> str | None:
        """Returns the address of a node. For an unknown name it queries the nodes, at most once per `LOOK_AGAIN_S`."""
        if node_id not in self._known and self._now() - self._looked_s >= LOOK_AGAIN_S:
            await self.look()
        known = self._known.get(node_id)
        return known.url if known is not None else None

    @property
    def evidence(self) -> tuple[bytes, ...]:
        """The latest evidence document of each node."""
        latest = {known.url: known.evidence for known in sorted(self._known.values(), key=lambda known: known.seen_s)}
        return tuple(document for document in latest.values() if document is not None)

    def find_evidence(self, digest: str) -> bytes | None:
        """Returns the evidence document with this SHA-256, in hex."""
        document, _ = self._evidence.get(digest, (None, 0.0))
        return document

    def change_urls(self, urls: Sequence[str]) -> None:
        """Replaces the addresses; names at removed addresses are dropped."""
        self._urls = tuple(urls)
        self._silent_urls.intersection_update(self._urls)
        self._known = {node_id: known for node_id, known in self._known.items() if known.url in self._urls}

    async def look(self) -> None:
        """Fetches key and evidence from every node; concurrent callers share one round of queries."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        await asyncio.shield(self._looking)

    async def look_forever(self) -> None:
        """Queries the nodes periodically until cancelled."""
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
        except ProblemError as error:
            self._note_silence(url, error.message)
            return  # an unreachable node keeps its name until its key expires
        self._note_answer(url)
        try:
            evidence = await self._upstream.get(url + EVIDENCE_PATH)
        except ProblemError:
            evidence = None  # the node has none, or none yet
        if evidence is not None:
            self._evidence[hashlib.sha256(evidence).hexdigest()] = (evidence, self._now())
        self._known[hashlib.sha256(keys).hexdigest()] = _Known(url, self._now(), evidence)

    def _note_silence(self, url: str, why: str) -> None:
        """Tells the operator once, since nobody else can see it before the node's key expires."""
        if url not in self._silent_urls:
            self._silent_urls.add(url)
            words = "epochs may name it for an hour more, and draws of it fail meanwhile"
            _logger.warning("the node %s cannot be asked for its key (%s); %s", url, why, words)

    def _note_answer(self, url: str) -> None:
        if url in self._silent_urls:
            self._silent_urls.remove(url)
            _logger.info("the node %s answers again", url)
