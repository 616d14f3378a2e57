"""Maps node names to addresses. A name is the SHA-256 of a node's key configuration, which changes every hour.

The gateway is configured with addresses and fetches names and evidence from the nodes. A node that states the name of another
one cannot open what is sealed to it. But it would stop that, clients would draw again, and so it would raise its own share. So
of several addresses that state a name, one gets its requests: the one whose member signed for it, else the one that had it.
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


@dataclass(frozen=True)
class _Stated:
    """What an address states.

    Attributes:
        member: the member that signed evidence for this very name; None if none did.
    """

    node_id: str
    evidence: bytes | None
    member: str | None


class NodeBook:
    """Names, addresses and evidence of nodes.

    Args:
        urls: of the nodes, without a trailing slash.
        now: seconds on a clock that never goes back.

    Attributes:
        find_signer: returns the name that an evidence document is for, and the member that signed it; None if none did.
    """

    find_signer: Callable[[bytes], tuple[str, str] | None] | None = None

    def __init__(self, urls: Sequence[str], upstream: Upstream, now: Callable[[], float] = time.monotonic) -> None:
        self._urls = tuple(urls)
        self._upstream = upstream
        self._now = now
        self._known: dict[str, _Known] = {}
        self._evidence: dict[str, tuple[bytes, float]] = {}
        self._silent_urls: set[str] = set()
        self._members: dict[str, str] = {}  # by address: the first to sign for a name that it alone stated
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
        self._members = {url: member for url, member in self._members.items() if url in self._urls}
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
            if one is not None and url in self._urls:  # they may have been replaced meanwhile
                claims.setdefault(one.node_id, {})[url] = one
        for node_id, claimed in claims.items():
            owner = self._find_owner(node_id, claimed)
            one = claimed[owner]
            if len(claimed) == 1 and one.member is not None:
                self._members.setdefault(owner, one.member)
            self._known[node_id] = _Known(owner, now_s, one.evidence)
            if one.evidence is not None:
                self._evidence[hashlib.sha256(one.evidence).hexdigest()] = (one.evidence, now_s)
        self._known = {n: known for n, known in self._known.items() if now_s - known.seen_s < NODE_KEY_LIFE_S}
        self._evidence = {d: (one, at) for d, (one, at) in self._evidence.items() if now_s - at < NODE_KEY_LIFE_S}

    async def _ask(self, url: str) -> _Stated | None:
        """Returns what an address states; None if it does not answer."""
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
        signer = None if evidence is None or self.find_signer is None else self.find_signer(evidence)
        return _Stated(node_id, evidence, signer[1] if signer is not None and signer[0] == node_id else None)

    def _find_owner(self, node_id: str, claimed: Mapping[str, _Stated]) -> str:
        """Returns the address to which a name belongs, of those that state it now."""
        known = self._known.get(node_id)
        own = [url for url, one in claimed.items() if one.member is not None and self._members.get(url) == one.member]
        had = [known.url] if known is not None and known.url in claimed else []
        if len(own) > 1:
            own = [url for url in had if url in own] or own
        owner = next(iter((*own, *had, *claimed)))
        for url in claimed.keys() - {owner}:
            if (owner, url) not in self._contested:
                self._contested.add((owner, url))
                words = "which gets the requests for it. If these are two nodes, stop the first: it takes requests away"
                _logger.warning("the node %s states the key of the node %s, %s", url, owner, words)
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
