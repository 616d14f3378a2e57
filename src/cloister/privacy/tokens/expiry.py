"""When records of spent tokens may go: by a wall clock that has to stay right for an hour of uptime before it is believed.

A wall clock can be set forward by mistake (NTP, a virtual machine that resumes, an operator) and back again. Whoever drops
records in between loses the proof that tokens were spent. Two rules hold that off:

- A time counts as passed when the wall clock has shown it or a later one for `SETTLE_S` of the monotonic clock.
- What the store drops, it drops with the key: a key whose records are gone is refused for good, wherever the clock goes
  (`SpendStore.forget`). So a clock that stays wrong for longer costs tokens, and gives none away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from cloister.privacy.tokens.spend import SpendStore, SpendStoreError

SETTLE_S: Final = 3600
"""For how long the wall clock must not fall back before a time that it showed is believed."""
LOOK_S: Final = 300.0

_logger = logging.getLogger(__name__)


class Expiry:
    """Has a store drop the records of keys that ended.

    Args:
        wall: Unix seconds; may jump.
        monotonic: seconds since some moment; never jumps.
    """

    def __init__(self, store: SpendStore, wall: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._store = store
        self._wall = wall
        self._monotonic = monotonic
        self._shown: float | None = None
        self._shown_since = 0.0

    def drop_ended(self) -> None:
        """Drops what ended by a time that has settled; called again and again, at least every `SETTLE_S`.

        Raises:
            SpendStoreError: the store gives no answer.
        """
        wall, uptime = self._wall(), self._monotonic()
        if self._shown is not None and wall >= self._shown:
            if uptime - self._shown_since < SETTLE_S:
                return
            self._store.forget(int(self._shown))
        self._shown, self._shown_since = wall, uptime

    async def run_forever(self) -> None:
        """Looks every five minutes until it is cancelled."""
        while True:
            try:
                await asyncio.to_thread(self.drop_ended)
            except SpendStoreError as error:
                _logger.warning("records of ended keys stay for now: %s", error.message)
            await asyncio.sleep(LOOK_S)
