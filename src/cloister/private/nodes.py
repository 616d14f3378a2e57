"""Maps node names to addresses. A name is the SHA-256 of a node's key configuration, which changes every hour.

The gateway is configured with addresses and fetches names and evidence from the nodes. A node that states a wrong name could
not open what it would get: that is sealed to the key whose digest the name is. But its clients would draw again, and so it would
raise its own share. So a name stays with the address that had it, or had its member's last one, for as long as that states it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
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
    member: bytes = b""


@dataclass(frozen=True)
class _Stated:
    """What an address states: a name, the evidence for it, and the member that signed that."""

    node_id: str
    evidence: bytes | None
    member: bytes


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
        self._contested: set[tuple[str, str]] = set()
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
        urls = self._urls
        stated = await asyncio.gather(*map(self._ask, urls))
        self._looked_s = now_s = self._now()
        claims: dict[str, dict[str, _Stated]] = {}
        for url, one in zip(urls, stated, strict=True):
            if one is not None and url in self._urls:
                claims.setdefault(one.node_id, {})[url] = one
        owners = {node_id: self._find_owner(node_id, claimed) for node_id, claimed in claims.items()}
        for node_id, owner in owners.items():
            one = claims[node_id][owner]
            self._known[node_id] = _Known(owner, now_s, one.evidence, one.member)
            if one.evidence is not None:
                self._evidence[hashlib.sha256(one.evidence).hexdigest()] = (one.evidence, now_s)
        self._known = {n: known for n, known in self._known.items() if now_s - known.seen_s < NODE_KEY_LIFE_S}
        self._evidence = {d: (one, at) for d, (one, at) in self._evidence.items() if now_s - at < NODE_KEY_LIFE_S}

    async def _ask(self, url: str) -> _Stated | None:
        """Returns what an address states; None if it does not answer, or shows the evidence of another name."""
        try:
            keys = await self._upstream.get(url + KEYS_PATH)
        except ProblemError as error:
            self._note_silence(url, error.message)
            return None  # an unreachable node keeps its name until its key expires
        self._note_answer(url)
        try:
            evidence = await self._upstream.get(url + EVIDENCE_PATH)
        except ProblemError:
            evidence = None  # the node has none, or none yet
        node_id = hashlib.sha256(keys).hexdigest()
        return _Stated(node_id, evidence, b"" if evidence is None else _read_member(evidence))

    def _find_owner(self, node_id: str, claimed: Mapping[str, _Stated]) -> str:
        """Returns the address that a name belongs to, of those that state it now: the one that had it, else the one that had
        the last name of its member, else the first."""
        if len(claimed) == 1:
            return next(iter(claimed))
        known = self._known.get(node_id)
        before = {one.url: one.member for one in sorted(self._known.values(), key=lambda one: one.seen_s)}
        owners = [url for url, one in claimed.items() if one.member and before.get(url) == one.member]
        owner = known.url if known is not None and known.url in claimed else next(iter((*owners, *claimed)))
        for url in claimed.keys() - {owner}:
            if (owner, url) not in self._contested:
                self._contested.add((owner, url))
                words = "it gets no requests for it; if it is not the same node, it takes requests from the other one"
                _logger.warning("the node %s states the key of the node %s; %s", url, owner, words)
        return owner

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
