"""Spent tokens in one file, for gateways on one machine.

`WITHOUT ROWID` stores rows in order of their digests, so that the table does not reveal their order of arrival; `secure_delete`
overwrites dropped rows; with `synchronous=FULL` a row is on disk before the request is admitted, even after a power failure.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path
from urllib.parse import unquote, urlsplit

from cloister.trust.tokens.spend import WAIT_S, SpendStoreError
from cloister.types.errors import ConfigError

_TABLE = """
CREATE TABLE IF NOT EXISTS spent (
    key_id BLOB NOT NULL, token BLOB NOT NULL, expires_at INTEGER NOT NULL, PRIMARY KEY (key_id, token)
) WITHOUT ROWID
"""
_ENDED = "CREATE TABLE IF NOT EXISTS ended (key_id BLOB PRIMARY KEY) WITHOUT ROWID"
_EPOCHS = "CREATE TABLE IF NOT EXISTS epochs (log TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID"
_FIRST = "INSERT OR IGNORE INTO epochs VALUES (?1, 0)"
_NOTE = "UPDATE epochs SET number = MAX(number, ?3) WHERE log = ?1 AND number >= ?2"
_SPEND = "INSERT OR IGNORE INTO spent SELECT ?1, ?2, ?3 WHERE NOT EXISTS (SELECT 1 FROM ended WHERE key_id = ?1)"
_END = "INSERT OR IGNORE INTO ended SELECT key_id FROM spent GROUP BY key_id HAVING MAX(expires_at) <= ?"
_DROP = "DELETE FROM spent WHERE key_id IN (SELECT key_id FROM ended)"


class SqliteSpendStore:
    """Opens or creates the file of a URL such as `sqlite:////var/lib/cloister/spent.db` (mode 0600).

    Raises:
        ConfigError: the file cannot be created, or has another format.
    """

    def __init__(self, url: str) -> None:
        self._lock = threading.Lock()
        self._database = connect(_path_of(url), _TABLE, _ENDED, _EPOCHS)

    def spend(self, key_id: bytes, token_digest: bytes, expires_at: int) -> bool:
        row = (key_id, token_digest, expires_at)
        with self._lock:
            try:
                return self._database.execute(_SPEND, row).rowcount == 1
            except sqlite3.Error as error:
                raise _unavailable(error) from None

    def forget(self, now: int) -> None:
        with self._lock:
            try:
                self._database.execute("BEGIN IMMEDIATE")
                with self._database:  # commits or rolls back
                    self._database.execute(_END, (now,))
                    self._database.execute(_DROP)
                self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()  # the log holds what was dropped
            except sqlite3.Error as error:
                raise _unavailable(error) from None

    def note_epoch(self, log: str, known: int, number: int) -> bool:
        with self._lock:
            try:
                if known == 0:
                    self._database.execute(_FIRST, (log,))
                return self._database.execute(_NOTE, (log, known, number)).rowcount == 1
            except sqlite3.Error as error:
                raise _unavailable(error) from None

    def close(self) -> None:
        with self._lock:
            self._database.close()


def connect(path: Path, *tables: str) -> sqlite3.Connection:
    """Opens a database that survives a crash at any point, with its tables; no other user of the machine can open it.

    Raises:
        ConfigError: the file cannot be created or read.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        database = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None, check_same_thread=False)
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "secure_delete=ON"):
            database.execute(f"PRAGMA {pragma}").fetchone()
        for table in tables:
            database.execute(table)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(
            f"cannot use {path} as a database ({type(error).__name__}); give a file that can be written"
        ) from None
    return database


def _path_of(url: str) -> Path:
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc or not path.startswith("/") or path == "/":
        raise ConfigError(
            "a SQLite store is sqlite:/// and a path, such as sqlite:////var/lib/cloister/spent.db", param="spend_store"
        )
    return Path(path[1:])  # three slashes: from the working directory; four: from the root


def _unavailable(error: sqlite3.Error) -> SpendStoreError:
    return SpendStoreError(f"the file of spent tokens gives no answer ({type(error).__name__}); try again later")
