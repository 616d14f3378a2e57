"""Keeps the epoch file current: a new one when a node's or the gateway's keys change, and before the old one ends."""

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
"""Between two epochs at least: a node that shows other evidence each time must not fill the log."""
RENEW_BEFORE_S: Final = 300.0
"""How long before its end an epoch is followed by the next, so that clients with clocks a little apart have one that holds."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpochSettings:
    """What an operator says of epochs.

    Attributes:
        url: of the gateway, as clients name it.
        release: digest of the release that nodes have to run, hex.
        profile: name of the profile that they have to run under.
    """

    url: str
    release: str
    profile: str


class EpochKeeper:
    """Publishes epochs and hands out the newest.

    Args:
        issuers: returns whose tokens are taken now.
        log: directory of the log's files.
        now: Unix seconds.
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

    async def read(self) -> bytes | None:
        """Returns the newest epoch file; None while there is none."""
        return None if self._published is None else self._published.bundle

    async def renew(self) -> bool:
        """Publishes an epoch if what belongs into it, the log or the membership has changed, or the old one ends soon; says
        whether it did.

        Raises:
            CloisterError: clients would refuse it; the old one stays, unless its release was revoked.
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
        """Looks again and again, until it is cancelled. Why there is no new epoch is logged once, not every time."""
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
