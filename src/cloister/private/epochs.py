"""Keeps the epoch file current: publishes one when keys of a node or the gateway change, and before the old one expires."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cloister.private.nodes import NodeBook
from cloister.private.unsealing import Unsealer
from cloister.trust.transparency.epoch import GatewayEntry, IssuerEntry
from cloister.trust.transparency.publisher import Contents, Published, Publisher
from cloister.trust.transparency.refusal import Reason, TransparencyError
from cloister.types.errors import CloisterError

LOOK_EVERY_S: Final = 5.0
REST_S: Final = 60.0
"""Minimum time between two epochs: a node whose evidence changes on every request must not fill the log."""
RENEW_BEFORE_S: Final = 300.0
"""Overlap of two epochs: the next one is published this long before the current one expires, to allow for clock skew."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpochSettings:
    """The operator's settings for epochs.

    Attributes:
        url: URL of the gateway, as clients use it.
        release: digest of the release that nodes must run, hex.
        profile: name of the privacy profile that they must run under.
    """

    url: str
    release: str
    profile: str


class EpochKeeper:
    """Publishes epochs and serves the newest.

    Args:
        issuers: returns the issuers whose tokens are accepted now.
        log: directory of the log.
        now: returns Unix seconds.
    """

    def __init__(
        self,
        settings: EpochSettings,
        publisher: Publisher,
        unsealer: Unsealer,
        nodes: NodeBook,
        issuers: Callable[[], tuple[IssuerEntry, ...]],
        log: Path,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.log = log
        self._settings = settings
        self._publisher = publisher
        self._unsealer = unsealer
        self._nodes = nodes
        self._issuers = issuers
        self._now = now
        self._published: Published | None = None
        self._contents: Contents | None = None
        self._last_word = ""
        nodes.find_signer = lambda evidence: publisher.find_signer(evidence, now())

    async def read(self) -> bytes | None:
        """Returns the newest epoch file; None while there is none."""
        return None if self._published is None else self._published.bundle

    async def renew(self) -> bool:
        """Publishes an epoch if its content, the log or the membership has changed, or the current one expires soon. Returns
        whether it did.

        Raises:
            CloisterError: clients would refuse the new epoch; the current one is kept unless its release was revoked.
        """
        contents = await self._gather()
        has_changed = self._publisher.has_grown() or self._publisher.has_new_members(self._now())
        if contents == self._contents and not self._ends_soon() and not has_changed:
            return False
        try:
            self._published = await self._publisher.publish(contents, self._now())
        except TransparencyError as error:
            if error.reason is Reason.REVOKED:
                self._published = None
            raise
        self._contents = contents
        return True

    async def renew_forever(self) -> None:
        """Refreshes periodically until cancelled. The reason for a failure is logged once, not on every attempt."""
        await self._nodes.look()
        while True:
            rest_s = LOOK_EVERY_S
            try:
                if await self.renew():
                    self._last_word, rest_s = "", REST_S
                    _logger.info("published epoch %d", self._published.epoch.epoch if self._published else 0)
            except CloisterError as error:
                self._complain(error.message)
            await asyncio.sleep(rest_s)

    async def _gather(self) -> Contents:
        gateway = GatewayEntry(self._settings.url, await self._unsealer.publish())
        evidence = tuple(sorted(self._nodes.evidence))
        return Contents(gateway, self._issuers(), evidence, self._settings.release, self._settings.profile)

    def _ends_soon(self) -> bool:
        return self._published is None or self._now() > self._published.epoch.not_after - RENEW_BEFORE_S

    def _complain(self, why: str) -> None:
        if why != self._last_word:
            _logger.warning("no new epoch: %s", why)
        self._last_word = why
