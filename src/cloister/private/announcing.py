"""Keeps a node's evidence current: requests a new document for each new key.

Evidence is bound to one key and expires with it. While a new document is being produced, the document of the previous key is
served: that key still opens requests. Expired evidence is never served.
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
    """Requests evidence from the attester and serves it.

    Args:
        unsealer: holds the node's keys.
        attester: requests a quote from the hardware; this may take seconds, so it runs in a thread.
        facts: fields of the statement in addition to the key and the hardening.
        hardening: returns the outcome of each measure; called for each statement, because some measures are applied late.
        started_s: earliest time at which the first key can have been created, Unix seconds.
        read_checkpoint: returns the latest witnessed checkpoint of the log, empty if there is none.
        life_s: lifetime of a key.
        now: returns Unix seconds.
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
        """Returns the current document; None while none is valid."""
        return self._document if self._now() < self._ends_s else None

    async def rehearse(self) -> None:
        """Requests a quote for an empty statement, so that a machine that cannot attest fails before it serves.

        Raises:
            AttestationError: the machine cannot attest; the message says what is missing.
        """
        await asyncio.to_thread(self._attester.attest, b"rehearsal")

    async def renew(self) -> bool:
        """Requests evidence if the key has changed; returns whether it did.

        Raises:
            CloisterError: the hardware produced none; the previous document is kept.
        """
        now = self._now()
        keys, receipt_key = await self._unsealer.publish_all()
        if keys == self._keys:
            self._seen_s = now
            return False
        # The key is not older than the last check that saw the previous key, so this expiry is never later than the key's.
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
        """Refreshes periodically until cancelled. The reason for a failure is logged once, not on every attempt."""
        while True:
            try:
                if await self.renew():
                    self._last_word = ""
            except CloisterError as error:
                if error.message != self._last_word:
                    _logger.error("no evidence for the new key: %s", error.message)
                self._last_word = error.message
            await asyncio.sleep(LOOK_EVERY_S)
