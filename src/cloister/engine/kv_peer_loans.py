"""Borrowed memory, between two steps: one engine borrows slots of the next engine's part of the shared pool, and lends slots of
its own (decisions/0046).

No messages are exchanged: both read words of each other's part. A lender takes its slots back by announcing it and writing
there. What it overwrites does not open, which is a miss. What the borrower still writes may spoil blocks of the lender, which
is a miss too. Neither can produce a wrong bit, because a block is sealed together with its description.
"""

from __future__ import annotations

import os
from typing import Final

from cloister.engine.kv_pool_member import LentSlots, PoolMember
from cloister.engine.kv_tier_files import TierFile
from cloister.kv.lent_tier import BorrowedTierIndex, LendingTierIndex, count_lent
from cloister.kv.tier_admission import AdmissionFactory, AdmitAll
from cloister.types.errors import ConfigError

PEER: Final = "peer"


class PeerLoans:
    """What one engine borrows and lends.

    Args:
        member: the engine in the pool.
        num_shares: owners that may have blocks at once.
        number: of the tier in borrowed memory.
        make_admission: as of `KVTierIndex`.

    Raises:
        ConfigError: there are too few slots to lend some.

    Attributes:
        index: the contents of borrowed memory.
        file: the borrowed slots; while it has borrowed none, those that this engine lends, and then nothing is written.
    """

    def __init__(
        self, member: PoolMember, num_shares: int = 1, number: int = 1, make_admission: AdmissionFactory = AdmitAll
    ) -> None:
        assert isinstance(member.index, LendingTierIndex)
        self._member, self._own = member, member.index
        layout = count_lent(member.index.layout)
        if not member.index.can_lend:
            raise ConfigError("kv_tier is too small to lend a part of it; give peer: a larger size", param="kv_tier")
        self.index = BorrowedTierIndex(PEER, layout, num_shares, number, make_admission=make_admission)
        self.file = TierFile(PEER, os.dup(member.file.fd), layout, is_memory=True, is_shared=True)
        self.file.move_to(member.own_lent.firsts)
        self._loan: LentSlots | None = None

    def follow(self, now: float) -> None:
        """Notes what the next engine lends and has taken back, and lends again what this engine does not need."""
        self._member.ask_for_loan(wants=self._own.needs_more and not self._own.is_lending)
        if self._own.may_lend(now) and self._member.is_asked():
            self._own.lend()
        offer = self._member.find_offer()
        if offer != self._loan:
            self.index.lose_all()
            self._loan = offer
            if offer is not None:
                self.file.move_to(offer.firsts)
            self.file.is_full = False
        if offer is None:
            self.file.is_full = True  # nothing is written
