"""The issuer's book: how many tokens each API key had under each issuer key. SQLite, counts only.

A batch that comes a second time, since its answer was lost or somebody sent a copy, is counted once: it is known by a digest,
and blind signatures of one message are equal. The book holds no blinded message, no time and nothing of what became of a token.
"""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

from cloister.privacy.tokens.stores.sqlite import connect
from cloister.types.errors import CloisterError, RateLimitError

_TABLE = """
CREATE TABLE IF NOT EXISTS issued (
    epoch INTEGER NOT NULL, holder BLOB NOT NULL, count INTEGER NOT NULL, PRIMARY KEY (epoch, holder)
) WITHOUT ROWID
"""
_BATCHES = """
CREATE TABLE IF NOT EXISTS batches (
    epoch INTEGER NOT NULL, batch BLOB NOT NULL, times INTEGER NOT NULL, PRIMARY KEY (epoch, batch)
) WITHOUT ROWID
"""
_ASK = """
INSERT INTO batches VALUES (:epoch, :batch, 1)
ON CONFLICT DO UPDATE SET times = times + 1 WHERE times < :most_times RETURNING times
"""
_TAKE = """
INSERT INTO issued SELECT :epoch, :holder, :count WHERE :count <= :most
ON CONFLICT DO UPDATE SET count = count + excluded.count WHERE count + excluded.count <= :most
"""

MOST_TIMES = 8
"""How often one batch is signed: an answer may be lost again, but signing costs the issuer and not who asks."""


class QuotaStoreError(CloisterError):
    """The book gives no answer; no token was issued."""

    code = "issuer_unavailable"
    status = 503


class QuotaBook:
    """Counts tokens by epoch and holder of an API key. Safe to use from several threads and processes at once."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._database = connect(path, _TABLE)
        self._database.execute(_BATCHES)

    def take(self, epoch: int, holder: bytes, count: int, *, batch: bytes, most: int, retry_after_s: float) -> None:
        """Counts `count` more tokens, before they are signed: a crash in between gives nothing away.

        Args:
            holder: digest of the API key.
            batch: digest of the holder and all that is to be signed; one that was counted before is not counted again.
            most: tokens of one holder in one epoch.
            retry_after_s: until the next epoch.

        Raises:
            RateLimitError: that would be more than `most`, or the batch came `MOST_TIMES` before; nothing was counted.
            QuotaStoreError: no answer.
        """
        values = {"epoch": epoch, "holder": holder, "count": count, "most": most, "batch": batch, "most_times": MOST_TIMES}
        with self._lock:
            try:
                taken = self._take_once(values)
            except sqlite3.Error as error:
                raise _unavailable(error) from None
        if not taken:
            message = (
                f"this key may have {most:,} tokens in an epoch of the issuer, and one batch {MOST_TIMES} times; ask for "
                "fewer, draw another batch, or wait for the next epoch"
            )
            raise RateLimitError(message, retry_after_s=retry_after_s)

    def forget(self, epoch: int) -> None:
        """Drops the counts of epochs before this one.

        Raises:
            QuotaStoreError: no answer.
        """
        with self._lock:
            try:
                for table in ("issued", "batches"):
                    self._database.execute(f"DELETE FROM {table} WHERE epoch < ?", (epoch,))
            except sqlite3.Error as error:
                raise _unavailable(error) from None

    def _take_once(self, values: dict[str, object]) -> bool:
        """Counts the batch and remembers it, both or neither; a thread and a process of the same book wait meanwhile."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            asked = self._database.execute(_ASK, values).fetchone()
            is_again = asked is not None and asked[0] > 1
            is_taken = is_again or (asked is not None and self._database.execute(_TAKE, values).rowcount == 1)
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT" if is_taken else "ROLLBACK")
        return is_taken

    def close(self) -> None:
        with self._lock:
            self._database.close()


def _unavailable(error: sqlite3.Error) -> QuotaStoreError:
    return QuotaStoreError(f"the issuer's book gives no answer ({type(error).__name__}); try again later")
