"""A node's evidence, kept current: made at the start, and anew for each of its keys.

Evidence binds one key and ends with it. While it is being made the document of the key before is served, whose key still opens
requests; one that has ended is not served at all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from cloister.private.unsealing import Unsealer
from cloister.trust.attestation import Attester
from cloister.trust.attestation.evidence import MAX_LIFE_S
from cloister.trust.attestation.node import Facts, with_host
from cloister.types.errors import CloisterError

LOOK_EVERY_S: Final = 5.0

_logger = logging.getLogger(__name__)


class Announcer:
    """Makes evidence and hands it out.

    Args:
        unsealer: holds the node's keys.
        attester: asks the hardware; it may take seconds, so it runs in a thread.
        facts: what the statement says beside the key and the hardening.
        hardening: returns what became of each measure; asked for each statement, for the last of them come late.
        started_s: Unix seconds at which the first key can have been made at the earliest.
        read_checkpoint: returns the latest witnessed checkpoint of the log, empty if there is none.
        life_s: of a key.
        now: Unix seconds.
    """

    def __init__(
        self,
        unsealer: Unsealer,
        attester: Attester,
        facts: Facts,
        started_s: float,
        hardening: Callable[[], Mapping[str, str]],
        read_checkpoint: Callable[[], str] = lambda: "",
        life_s: float = MAX_LIFE_S,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._unsealer = unsealer
        self._attester = attester
        self._facts = facts
        self._hardening = hardening
        self._read_checkpoint = read_checkpoint
        self._life_s = life_s
        self._now = now
        self._seen_s = started_s
        self._keys = b""
        self._document: bytes | None = None
        self._ends_s = 0
        self._last_word = ""

    def evidence(self) -> bytes | None:
        """Returns the document; None while there is none that holds."""
        return self._document if self._now() < self._ends_s else None

    async def rehearse(self) -> None:
        """Asks the hardware once, for a statement of nothing, so that a machine that cannot attest does not begin to serve.

        Raises:
            AttestationError: it cannot; the message says what it lacks.
        """
        await asyncio.to_thread(self._attester.attest, b"rehearsal")

    async def renew(self) -> bool:
        """Makes evidence if the key is a new one; says whether it did.

        Raises:
            CloisterError: the hardware gives none; what there was stays.
        """
        now = self._now()
        keys, receipt_key = await self._unsealer.publish_all()
        if keys == self._keys:
            self._seen_s = now
            return False
        # A new key is no older than the last look that saw the one before, so this end is never after the key's.
        born_s = int(min(self._seen_s, now))
        ends_s = born_s + int(self._life_s)
        checkpoint = await asyncio.to_thread(self._read_checkpoint)
        hardening = with_host(self._hardening(), self._attester.kind)
        statement = self._facts.state(keys, born_s, ends_s, checkpoint, hardening, receipt_key)
        evidence = await asyncio.to_thread(self._attester.attest, statement)
        self._document, self._ends_s = evidence.encode(), ends_s
        self._keys, self._seen_s = keys, now
        return True

    async def renew_forever(self) -> None:
        """Looks again and again, until it is cancelled. Why there is no new evidence is logged once, not every time."""
        while True:
            try:
                if await self.renew():
                    self._last_word = ""
            except CloisterError as error:
                if error.message != self._last_word:
                    _logger.error("no evidence for the new key: %s", error.message)
                self._last_word = error.message
            await asyncio.sleep(LOOK_EVERY_S)
